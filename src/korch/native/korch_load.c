/* Loads relocatable ELF objects (x86-64, AArch64) that were compiled for kernels and tables.
 *
 * All sections are laid out in one mapping: code, then constants, then data. Relocations are applied with checks of their
 * ranges; functions that are too far away are called through stubs, which also have the addresses that are loaded from memory.
 * Then code is made executable and constants read-only; nothing is ever both writable and executable.
 * Whatever is not expected is refused: no content of an object makes this file access anything outside of its bytes. */
#include "korch_load.h"

#include <ar.h>
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

static bool read_header(linker *own, object *o) {
    const header *const h = o->head = (const header *)o->bytes;
    if (o->size < sizeof *h) return korch_refuse(own, "it is truncated");
    if (memcmp(h->e_ident, ELFMAG "\2\1\1", 7) != 0 || h->e_type != ET_REL)
        return korch_refuse(own, "it is no relocatable ELF object of 64 bits");
    if (h->e_machine != own->machine) return korch_refuse(own, "it is for machine %d, not %d", h->e_machine, own->machine);
    if (h->e_shentsize != sizeof(section) || !is_inside(o, h->e_shoff, h->e_shnum, sizeof(section)))
        return korch_refuse(own, "its table of sections is not in it");
    o->sections = (const section *)(o->bytes + h->e_shoff);
    o->places = calloc(h->e_shnum + 1u, sizeof(place));
    return o->places || korch_refuse(own, "there is no memory");
}

/* Whether the name of a section has this beginning. */
static bool is_named(const object *o, const section *s, const char *begin) {
    const section *const names = &o->sections[o->head->e_shstrndx];
    const size_t size = strlen(begin);
    return names->sh_size - s->sh_name >= size && memcmp(o->bytes + names->sh_offset + s->sh_name, begin, size) == 0;
}

/* Give each section a place in one of the parts. */
static bool place_sections(linker *own, object *o) {
    const header *const h = o->head;
    if (h->e_shnum == 0) return true;
    if (h->e_shstrndx >= h->e_shnum) return korch_refuse(own, "it has no names of sections");
    const section *const names = &o->sections[h->e_shstrndx];
    if (names->sh_type == SHT_NOBITS || !is_inside(o, names->sh_offset, names->sh_size, 1))
        return korch_refuse(own, "its names are not in it");
    for (int i = 0; i < h->e_shnum; ++i) {
        const section *const s = &o->sections[i];
        o->places[i].part = -1;
        if (s->sh_type != SHT_NOBITS && !is_inside(o, s->sh_offset, s->sh_size, 1))
            return korch_refuse(own, "section %d is not in it", i);
        if (!(s->sh_flags & SHF_ALLOC)) continue;
        if (s->sh_name >= names->sh_size) return korch_refuse(own, "the name of section %d is not in it", i);
        const bool is_of_exceptions = s->sh_type == SHT_X86_64_UNWIND || is_named(o, s, ".eh_frame");
        if (is_of_exceptions || s->sh_type == SHT_NOTE) continue;
        if (s->sh_flags & (SHF_TLS | SHF_COMPRESSED)) return korch_refuse(own, "section %d is of threads, or compressed", i);
        if (s->sh_type != SHT_PROGBITS && s->sh_type != SHT_NOBITS)
            return korch_refuse(own, "section %d has the type %u", i, s->sh_type);
        const bool is_data = (s->sh_flags & SHF_WRITE) && !is_named(o, s, ".data.rel.ro");
        if (is_data && (s->sh_flags & SHF_EXECINSTR)) return korch_refuse(own, "section %d is code that can be written", i);
        const uint64_t alignment = s->sh_addralign ? s->sh_addralign : 1;
        if (alignment & (alignment - 1) || alignment > MOST_ALIGNMENT)
            return korch_refuse(own, "section %d is aligned to %llu bytes", i, (unsigned long long)alignment);
        const int part = s->sh_flags & SHF_EXECINSTR ? CODE : is_data ? DATA : CONSTANTS;
        const uint64_t start = (own->sizes[part] + alignment - 1) & -alignment;
        if (s->sh_size > MOST_BYTES || start + s->sh_size > MOST_BYTES) return korch_refuse(own, "it is too large");
        o->places[i] = (place){part, start};
        own->sizes[part] = start + s->sh_size;
    }
    return true;
}

/* Read the table of symbols, and count the relocations. */
static bool read_symbols(linker *own, object *o) {
    for (int i = 0; i < o->head->e_shnum; ++i) {
        const section *const s = &o->sections[i];
        if (s->sh_type == SHT_RELA && s->sh_info < o->head->e_shnum && o->places[s->sh_info].part >= 0)
            own->distant += s->sh_size / sizeof(relocation);
        if (s->sh_type != SHT_SYMTAB) continue;
        if (o->symbols || s->sh_entsize != sizeof(symbol) || s->sh_link >= o->head->e_shnum)
            return korch_refuse(own, "its table of symbols is not as expected");
        const section *const names = &o->sections[s->sh_link];
        if (names->sh_type == SHT_NOBITS || names->sh_size == 0 || o->bytes[names->sh_offset + names->sh_size - 1] != 0)
            return korch_refuse(own, "its names of symbols do not end");
        o->symbol_count = s->sh_size / sizeof(symbol);
        o->symbols = (const symbol *)(o->bytes + s->sh_offset);
        o->names = o->bytes + names->sh_offset;
        o->names_size = names->sh_size;
        own->symbol_count += o->symbol_count;
        own->names_size += o->names_size;
        o->targets = calloc(2 * o->symbol_count + 1, sizeof(char *));
        if (!o->targets) return korch_refuse(own, "there is no memory");
        o->stubs = o->targets + o->symbol_count;
    }
    return true;
}

/* -- Resolving ------------------------------------------------------------------------------------------------------ */

/* Where each symbol is that an object defines; its global symbols are entered. */
static bool define(linker *own, object *o) {
    if (!o->symbols) return true;
    char *const names = memcpy(own->next_name, o->names, o->names_size);
    own->next_name += o->names_size;
    for (uint64_t i = 0; i < o->symbol_count; ++i) {
        const symbol *const s = &o->symbols[i];
        const int binding = ELF64_ST_BIND(s->st_info), type = ELF64_ST_TYPE(s->st_info);
        if (s->st_shndx == SHN_UNDEF || type == STT_FILE) continue;
        if (s->st_shndx >= SHN_LORESERVE || s->st_shndx >= o->head->e_shnum || binding > STB_WEAK || type > STT_SECTION)
            return korch_refuse(own, "symbol %s is of a kind that is not expected", name_of(o, s));
        const section *const in = &o->sections[s->st_shndx];
        const place *const at = &o->places[s->st_shndx];
        if (at->part < 0) continue;
        if (s->st_value > in->sh_size) return korch_refuse(own, "symbol %s is outside of its section", name_of(o, s));
        o->targets[i] = own->code->base + own->starts[at->part] + at->offset + s->st_value;
        if (binding == STB_LOCAL || *name_of(o, s) == 0) continue;
        entry *const found = find(own->code, name_of(o, s));
        if (found->name && binding == STB_GLOBAL) return korch_refuse(own, "symbol %s is defined twice", name_of(o, s));
        if (found->name) {
            o->targets[i] = (char *)found->address;
            continue;
        }
        *found = (entry){names + s->st_name, o->targets[i]};
    }
    return true;
}

/* Find the symbols that an object does not define. */
static bool resolve(linker *own, object *o) {
    for (uint64_t i = 1; i < o->symbol_count; ++i) {
        const symbol *const s = &o->symbols[i];
        if (s->st_shndx != SHN_UNDEF) continue;
        const char *const name = name_of(o, s);
        o->targets[i] = (char *)korch_symbol(own->code, name);
        for (size_t k = 0; !o->targets[i] && k < sizeof own_entries / sizeof *own_entries; ++k)
            if (strcmp(own_entries[k].name, name) == 0) o->targets[i] = (char *)own_entries[k].address;
    }
    return true;
}

/* Apply the relocations of one section. */
static bool relocate(linker *own, object *o, const section *rows) {
    const place *const at = &o->places[rows->sh_info];
    const section *const target = &o->sections[rows->sh_info];
    if (rows->sh_entsize != sizeof(relocation) || target->sh_type == SHT_NOBITS)
        return korch_refuse(own, "its relocations are not as expected");
    for (uint64_t i = 0; i < rows->sh_size / sizeof(relocation); ++i) {
        const relocation *const row = (const relocation *)(o->bytes + rows->sh_offset) + i;
        const uint32_t type = ELF64_R_TYPE(row->r_info), number = ELF64_R_SYM(row->r_info);
        if (type == 0) continue;
        if (row->r_offset > target->sh_size || number >= o->symbol_count)
            return korch_refuse(own, "relocation %llu is outside of its section, or of a missing symbol", (unsigned long long)i);
        if (!o->targets[number]) return korch_refuse(own, "symbol %s is not defined", name_of(o, &o->symbols[number]));
        char *const place = own->code->base + own->starts[at->part] + at->offset + row->r_offset;
        const fix f = {place, target->sh_size - row->r_offset, type, number, row->r_addend};
        if (!korch_relocate(own, o, &f)) return false;
    }
    return true;
}

static bool fill(linker *own, object *o) {
    for (int i = 0; i < o->head->e_shnum; ++i) {
        const section *const s = &o->sections[i];
        const place *const at = &o->places[i];
        if (at->part >= 0 && s->sh_type == SHT_PROGBITS)
            memcpy(own->code->base + own->starts[at->part] + at->offset, o->bytes + s->sh_offset, s->sh_size);
    }
    for (int i = 0; i < o->head->e_shnum; ++i) {
        const section *const s = &o->sections[i];
        const bool is_one = s->sh_type == SHT_RELA || s->sh_type == SHT_REL;
        if (!is_one || s->sh_info >= o->head->e_shnum || o->places[s->sh_info].part < 0) continue;
        if (s->sh_type != SHT_RELA) return korch_refuse(own, "it has relocations without addends");
        if (!relocate(own, o, s)) return false;
    }
    return true;
}

/* -- Memory --------------------------------------------------------------------------------------------------------- */

/* Map memory for all parts, stubs and slots, and make the table of symbols. */
static bool allocate(linker *own) {
    korch_code *const code = own->code;
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), code_bytes = (own->sizes[CODE] + 15) & -(uint64_t)16;
    own->starts[CONSTANTS] = (code_bytes + own->distant * STUB_BYTES + page - 1) & -page;
    own->starts[DATA] = (own->starts[CONSTANTS] + own->sizes[CONSTANTS] + page - 1) & -page;
    code->size = (own->starts[DATA] + own->sizes[DATA] + page) & -page;
    void *base = MAP_FAILED;
    if (code->size <= 4 * MOST_BYTES) base = mmap(NULL, code->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    code->base = base == MAP_FAILED ? NULL : base;
    for (code->room = 16; code->room < 2 * own->symbol_count;) code->room *= 2;
    code->symbols = calloc(code->room, sizeof(entry));
    code->names = malloc(own->names_size + 1);
    if (!code->base || !code->symbols || !code->names) return korch_refuse(own, "there is no memory for it");
    own->next_name = code->names;
    own->next_stub = code->base + code_bytes;
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
    if (!each(own, define) || !each(own, resolve) || !each(own, fill)) return false;
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

/* Find the objects in an archive of `ar`; return their number, or -1 if it is damaged. `objects` may be null. */
static int64_t objects_in(const char *bytes, int64_t size, object *objects) {
    int64_t count = 0;
    if (size < SARMAG || memcmp(bytes, ARMAG, SARMAG) != 0) return -1;
    for (int64_t at = SARMAG, own; at < size; at += own + (own & 1)) {
        const struct ar_hdr *const head = (const struct ar_hdr *)(bytes + at);
        if (size - at < (int64_t)sizeof *head || memcmp(head->ar_fmag, ARFMAG, 2) != 0) return -1;
        own = strtoll(head->ar_size, NULL, 10); /* it is followed by ar_fmag */
        at += sizeof *head;
        if (own < 0 || own > size - at) return -1;
        if (objects) objects[count] = (object){.bytes = bytes + at, .size = (uint64_t)own};
        ++count;
    }
    return count;
}

korch_code *korch_load(int machine, const void *archive, int64_t size, char *error, size_t error_size) {
    linker own = {.count = objects_in(archive, size, NULL), .error = error, .error_size = error_size};
    if (own.count < 0) {
        snprintf(error, error_size, "the archive of objects is damaged");
        return NULL;
    }
    own.machine = machine ? machine : OWN_MACHINE;
    own.code = calloc(1, sizeof *own.code);
    own.objects = calloc((size_t)own.count + 1, sizeof(object));
    const bool has_memory = own.code && own.objects;
    if (has_memory) objects_in(archive, size, own.objects);
    const bool is_done = has_memory ? link_all(&own) : korch_refuse(&own, "there is no memory for it");
    for (int64_t i = 0; own.objects && i < own.count; ++i) {
        free(own.objects[i].places);
        free(own.objects[i].targets);
    }
    free(own.objects);
    if (is_done) return own.code;
    korch_unload(own.code);
    return NULL;
}
