/* Loads relocatable ELF objects (x86-64, AArch64) that were compiled for kernels and tables.
 *
 * All sections are laid out in one mapping: code, then constants, then data. Relocations are applied with checks of their
 * ranges; functions that are too far away are called through stubs, and addresses that are loaded from memory have slots
 * beside the constants. Then code is made executable and constants read-only; nothing is ever both writable and executable.
 * Whatever is not expected is refused: no content of an object makes this file access anything outside of its bytes. */
#include "korch_load.h"

#include <math.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

static const uint64_t MOST_BYTES = (uint64_t)1 << 30, MOST_ALIGNMENT = 4096;

/* -- Functions that kernels may call -------------------------------------------------------------------------------- */

int korch_loop_create(), korch_loop_run(), korch_loop_team(), korch_loop_destroy(),
    korch_onnxruntime_create(), korch_onnxruntime_run(), korch_onnxruntime_destroy(), korch_rows_run();

#define AT(name) {#name, (const void *)name}
#define BOTH(name) AT(name), AT(name##f)
static const entry own_entries[] = {
    AT(korch_region), AT(korch_max_threads), AT(korch_matrix_units), AT(korch_loop_create), AT(korch_loop_run),
    AT(korch_loop_team), AT(korch_loop_destroy), AT(korch_onnxruntime_create), AT(korch_onnxruntime_run),
    AT(korch_onnxruntime_destroy), AT(korch_rows_run), AT(memcpy), AT(memset), AT(memmove), AT(memcmp), BOTH(sin), BOTH(cos),
    BOTH(tan), BOTH(asin), BOTH(acos), BOTH(atan), BOTH(sinh), BOTH(cosh),
    BOTH(tanh), BOTH(asinh), BOTH(acosh), BOTH(atanh), BOTH(exp), BOTH(log), BOTH(pow), BOTH(fmod), BOTH(erf), BOTH(exp2),
    BOTH(fma), BOTH(floor), BOTH(ceil), BOTH(trunc), BOTH(rint), BOTH(nearbyint), BOTH(round)};

/* Write what is wrong; return false. */
bool korch_refuse(linker *own, const char *format, ...) {
    va_list arguments;
    const int begun = snprintf(own->error, own->error_size, "object %d is refused: ", own->at);
    va_start(arguments, format);
    if (begun > 0 && (size_t)begun < own->error_size)
        vsnprintf(own->error + begun, own->error_size - (size_t)begun, format, arguments);
    va_end(arguments);
    return false;
}

/* -- Symbols -------------------------------------------------------------------------------------------------------- */

static uint64_t hash_of(const char *name) {
    uint64_t hash = 1469598103934665603u;
    for (; *name; ++name) hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    return hash;
}

static entry *find(const korch_code *code, const char *name) {
    uint64_t at = hash_of(name) & (code->room - 1);
    while (code->symbols[at].name && strcmp(code->symbols[at].name, name) != 0) at = (at + 1) & (code->room - 1);
    return &code->symbols[at];
}

const void *korch_symbol(const korch_code *code, const char *name) { return find(code, name)->address; }

/* -- Reading -------------------------------------------------------------------------------------------------------- */

/* Whether `count` entries of `size` bytes from `offset` on are in an object. */
static bool is_inside(const object *o, uint64_t offset, uint64_t count, uint64_t size) {
    return offset <= o->size && count <= (o->size - offset) / size;
}

static void *copied(const object *o, uint64_t offset, uint64_t count, uint64_t size) {
    void *const found = malloc(count * size + 1);
    if (found) memcpy(found, o->bytes + offset, count * size);
    return found;
}

static bool read_header(linker *own, object *o) {
    if (o->size < sizeof o->head) return korch_refuse(own, "it is truncated");
    memcpy(&o->head, o->bytes, sizeof o->head);
    const header *const h = &o->head;
    if (memcmp(h->magic, "\177ELF\2\1\1", 7) != 0 || h->type != RELOCATABLE)
        return korch_refuse(own, "it is no relocatable ELF object of 64 bits");
    if (h->machine != own->machine) return korch_refuse(own, "it is for machine %d, not %d", h->machine, own->machine);
    if (h->section_size != sizeof(section) || !is_inside(o, h->sections, h->section_count, sizeof(section)))
        return korch_refuse(own, "its table of sections is not in it");
    o->sections = copied(o, h->sections, h->section_count, sizeof(section));
    o->places = calloc(h->section_count + 1u, sizeof(place));
    return (o->sections && o->places) || korch_refuse(own, "there is no memory");
}

/* Whether the name of a section has this beginning. */
static bool is_named(const object *o, const section *s, const char *begin) {
    const section *const names = &o->sections[o->head.names];
    const size_t size = strlen(begin);
    return names->size - s->name >= size && memcmp(o->bytes + names->offset + s->name, begin, size) == 0;
}

/* Give each section a place in one of the parts. */
static bool place_sections(linker *own, object *o) {
    const header *const h = &o->head;
    if (h->section_count == 0) return true;
    if (h->names >= h->section_count) return korch_refuse(own, "it has no names of sections");
    const section *const names = &o->sections[h->names];
    if (names->type == NO_BITS || !is_inside(o, names->offset, names->size, 1)) return korch_refuse(own, "its names are not in it");
    for (int i = 0; i < h->section_count; ++i) {
        const section *const s = &o->sections[i];
        o->places[i].part = -1;
        if (s->type != NO_BITS && !is_inside(o, s->offset, s->size, 1))
            return korch_refuse(own, "section %d is not in it", i);
        if (!(s->flags & IN_MEMORY)) continue;
        if (s->name >= names->size) return korch_refuse(own, "the name of section %d is not in it", i);
        if (s->type == UNWIND || s->type == NOTE || is_named(o, s, ".eh_frame")) continue; /* for exceptions */
        if (s->flags & (IS_OF_THREADS | IS_COMPRESSED)) return korch_refuse(own, "section %d is of threads, or compressed", i);
        if (s->type != BITS && s->type != NO_BITS) return korch_refuse(own, "section %d has the type %u", i, s->type);
        const bool is_data = (s->flags & WRITABLE) && !is_named(o, s, ".data.rel.ro");
        if (is_data && (s->flags & IS_CODE)) return korch_refuse(own, "section %d is code that can be written", i);
        const uint64_t alignment = s->alignment ? s->alignment : 1;
        if (alignment & (alignment - 1) || alignment > MOST_ALIGNMENT)
            return korch_refuse(own, "section %d is aligned to %llu bytes", i, (unsigned long long)alignment);
        const int part = s->flags & IS_CODE ? CODE : is_data ? DATA : CONSTANTS;
        const uint64_t start = (own->sizes[part] + alignment - 1) & -alignment;
        if (s->size > MOST_BYTES || start + s->size > MOST_BYTES) return korch_refuse(own, "it is too large");
        o->places[i] = (place){part, start};
        own->sizes[part] = start + s->size;
    }
    return true;
}

/* Read the table of symbols, and count the relocations. */
static bool read_symbols(linker *own, object *o) {
    for (int i = 0; i < o->head.section_count; ++i) {
        const section *const s = &o->sections[i];
        if (s->type == ADDENDS && s->info < o->head.section_count && o->places[s->info].part >= 0)
            own->distant += s->size / sizeof(relocation);
        if (s->type != SYMBOLS) continue;
        if (o->symbols || s->entry_size != sizeof(symbol) || s->link >= o->head.section_count)
            return korch_refuse(own, "its table of symbols is not as expected");
        const section *const names = &o->sections[s->link];
        if (names->type == NO_BITS || names->size == 0 || o->bytes[names->offset + names->size - 1] != 0)
            return korch_refuse(own, "its names of symbols do not end");
        o->symbol_count = s->size / sizeof(symbol);
        o->symbols = copied(o, s->offset, o->symbol_count, sizeof(symbol));
        o->names = (const char *)o->bytes + names->offset;
        o->names_size = names->size;
        o->targets = calloc(3 * o->symbol_count + 1, sizeof(char *));
        if (!o->symbols || !o->targets) return korch_refuse(own, "there is no memory");
        o->stubs = o->targets + o->symbol_count;
        o->slots = o->stubs + o->symbol_count;
    }
    return true;
}

/* -- Resolving ------------------------------------------------------------------------------------------------------ */

/* Where each symbol is that an object defines; its global symbols are entered. */
static bool define(linker *own, object *o, char **names) {
    for (uint64_t i = 0; i < o->symbol_count; ++i) {
        const symbol *const s = &o->symbols[i];
        const int binding = s->info >> 4, type = s->info & 15;
        if (s->section == UNDEFINED || type == FILE_NAME) continue;
        if (s->section >= RESERVED || s->section >= o->head.section_count || binding > WEAK || type > SECTION)
            return korch_refuse(own, "symbol %s is of a kind that is not expected", name_of(o, s));
        const section *const in = &o->sections[s->section];
        const place *const at = &o->places[s->section];
        if (at->part < 0) continue;
        if (s->value > in->size) return korch_refuse(own, "symbol %s is outside of its section", name_of(o, s));
        o->targets[i] = own->code->base + own->starts[at->part] + at->offset + s->value;
        if (binding == LOCAL || *name_of(o, s) == 0) continue;
        entry *const found = find(own->code, name_of(o, s));
        if (found->name && binding == GLOBAL) return korch_refuse(own, "symbol %s is defined twice", name_of(o, s));
        if (found->name) {
            o->targets[i] = (char *)found->address;
            continue;
        }
        found->name = strcpy(*names, name_of(o, s));
        found->address = o->targets[i];
        *names += strlen(*names) + 1;
    }
    return true;
}

/* Find the symbols that an object does not define. */
static bool resolve(linker *own, object *o) {
    for (uint64_t i = 1; i < o->symbol_count; ++i) {
        const symbol *const s = &o->symbols[i];
        if (s->section != UNDEFINED) continue;
        const char *const name = name_of(o, s);
        o->targets[i] = (char *)korch_symbol(own->code, name);
        for (size_t k = 0; !o->targets[i] && k < sizeof own_entries / sizeof *own_entries; ++k)
            if (strcmp(own_entries[k].name, name) == 0) o->targets[i] = (char *)own_entries[k].address;
    }
    return true;
}

/* Apply the relocations of one section. */
static bool relocate(linker *own, object *o, const section *rows) {
    const place *const at = &o->places[rows->info];
    const section *const target = &o->sections[rows->info];
    if (rows->entry_size != sizeof(relocation) || target->type == NO_BITS)
        return korch_refuse(own, "its relocations are not as expected");
    for (uint64_t i = 0; i < rows->size / sizeof(relocation); ++i) {
        relocation row;
        memcpy(&row, o->bytes + rows->offset + i * sizeof row, sizeof row);
        if (row.type == 0) continue;
        if (row.offset > target->size || row.symbol >= o->symbol_count)
            return korch_refuse(own, "relocation %llu is outside of its section, or of a missing symbol", (unsigned long long)i);
        if (!o->targets[row.symbol])
            return korch_refuse(own, "symbol %s is not defined", name_of(o, &o->symbols[row.symbol]));
        const fix f = {own->code->base + own->starts[at->part] + at->offset + row.offset, target->size - row.offset, row.type,
                       row.symbol, row.addend};
        if (!korch_relocate(own, o, &f)) return false;
    }
    return true;
}

static bool fill(linker *own, object *o) {
    for (int i = 0; i < o->head.section_count; ++i) {
        const section *const s = &o->sections[i];
        if (o->places[i].part >= 0 && s->type == BITS)
            memcpy(own->code->base + own->starts[o->places[i].part] + o->places[i].offset, o->bytes + s->offset, s->size);
    }
    for (int i = 0; i < o->head.section_count; ++i) {
        const section *const s = &o->sections[i];
        const bool is_one = s->type == ADDENDS || s->type == 9;
        if (!is_one || s->info >= o->head.section_count || o->places[s->info].part < 0) continue;
        if (s->type != ADDENDS) return korch_refuse(own, "it has relocations without addends");
        if (!relocate(own, o, s)) return false;
    }
    return true;
}

/* -- Memory --------------------------------------------------------------------------------------------------------- */

static char *map(uint64_t size) {
    void *const found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

/* Map memory for all parts, stubs and slots, and make the table of symbols. */
static bool allocate(linker *own) {
    korch_code *const code = own->code;
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), code_bytes = (own->sizes[CODE] + 15) & -(uint64_t)16;
    const uint64_t constant_bytes = (own->sizes[CONSTANTS] + 15) & -(uint64_t)16;
    own->starts[CONSTANTS] = (code_bytes + own->distant * STUB_BYTES + page - 1) & -page;
    own->starts[DATA] = (own->starts[CONSTANTS] + constant_bytes + own->distant * SLOT_BYTES + page - 1) & -page;
    code->size = (own->starts[DATA] + own->sizes[DATA] + page) & -page;
    code->base = code->size <= 4 * MOST_BYTES ? map(code->size) : NULL;
    uint64_t symbols = 0, names = 1;
    for (int64_t i = 0; i < own->count; ++i)
        for (uint64_t k = 0; k < own->objects[i].symbol_count; ++k) {
            ++symbols;
            names += strlen(name_of(&own->objects[i], &own->objects[i].symbols[k])) + 1;
        }
    for (code->room = 16; code->room < 2 * symbols;) code->room *= 2;
    code->symbols = calloc(code->room, sizeof(entry));
    code->names = malloc(names);
    if (!code->base || !code->symbols || !code->names) return korch_refuse(own, "there is no memory for it");
    own->next_stub = code->base + code_bytes;
    own->next_slot = code->base + own->starts[CONSTANTS] + constant_bytes;
    return true;
}

/* Call a function for each object until it fails. */
static bool each(linker *own, bool (*call)(linker *, object *)) {
    for (own->at = 0; own->at < own->count; ++own->at)
        if (!call(own, &own->objects[own->at])) return false;
    own->at = 0;
    return true;
}

static bool link_all(linker *own) {
    if (!each(own, read_header) || !each(own, place_sections) || !each(own, read_symbols) || !allocate(own)) return false;
    char *names = own->code->names;
    for (own->at = 0; own->at < own->count; ++own->at)
        if (!define(own, &own->objects[own->at], &names)) return false;
    if (!each(own, resolve) || !each(own, fill)) return false;
    if (own->machine != OWN_MACHINE) return true; /* to look at it */
    char *const base = own->code->base;
    __builtin___clear_cache(base, base + own->starts[CONSTANTS]);
    const uint64_t code_bytes = own->starts[CONSTANTS], constant_bytes = own->starts[DATA] - code_bytes;
    return (mprotect(base, code_bytes, PROT_READ | PROT_EXEC) == 0 &&
            mprotect(base + code_bytes, constant_bytes, PROT_READ) == 0) ||
           korch_refuse(own, "the system does not let its code run");
}

void korch_unload(korch_code *code) {
    if (!code) return;
    if (code->base) munmap(code->base, code->size);
    free(code->symbols);
    free(code->names);
    free(code);
}

korch_code *korch_load(int machine, const korch_object *objects, int64_t count, char *error, size_t error_size) {
    linker own = {.count = count, .machine = machine ? machine : OWN_MACHINE, .error = error, .error_size = error_size};
    own.code = calloc(1, sizeof *own.code);
    own.objects = calloc((size_t)count + 1, sizeof(object));
    for (int64_t i = 0; own.objects && i < count; ++i) {
        own.objects[i].bytes = objects[i].bytes;
        own.objects[i].size = (uint64_t)objects[i].size;
    }
    const bool is_done = own.code && own.objects && link_all(&own);
    for (int64_t i = 0; own.objects && i < count; ++i) {
        free((void *)own.objects[i].sections);
        free(own.objects[i].places);
        free((void *)own.objects[i].symbols);
        free(own.objects[i].targets);
    }
    free(own.objects);
    if (is_done) return own.code;
    korch_unload(own.code);
    return NULL;
}
