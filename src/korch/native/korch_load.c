/* Loads relocatable ELF objects (x86-64, AArch64) that were compiled for kernels and tables.
 *
 * All sections are laid out in one mapping: code, then constants, then data. Relocations are applied with checks of their
 * ranges; functions that are too far away are called through stubs, and addresses that are loaded from memory have slots
 * beside the constants. Then code is made executable and constants read-only; nothing is ever both writable and executable.
 * Whatever is not expected is refused: no content of an object makes this file access anything outside of its bytes. */
#include "korch_runtime.h"

#include <math.h>
#include <stdarg.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

/* -- The parts of the format that are used -------------------------------------------------------------------------- */

typedef struct {
    unsigned char magic[16];
    uint16_t type, machine;
    uint32_t version;
    uint64_t entry, segments, sections;
    uint32_t flags;
    uint16_t size, segment_size, segment_count, section_size, section_count, names;
} header;

typedef struct {
    uint32_t name, type;
    uint64_t flags, address, offset, size;
    uint32_t link, info;
    uint64_t alignment, entry_size;
} section;

typedef struct {
    uint32_t name;
    unsigned char info, other;
    uint16_t section;
    uint64_t value, size;
} symbol;

typedef struct {
    uint64_t offset;
    uint32_t type, symbol;
    int64_t addend;
} relocation;

enum { RELOCATABLE = 1, X86_64 = 62, AARCH64 = 183 };
enum { BITS = 1, SYMBOLS = 2, ADDENDS = 4, NO_BITS = 8, NOTE = 7, UNWIND = 0x70000001 };
enum { WRITABLE = 1, IN_MEMORY = 2, IS_CODE = 4, IS_COMPRESSED = 0x800, IS_OF_THREADS = 0x400 };
enum { LOCAL = 0, GLOBAL = 1, WEAK = 2 };
enum { NO_TYPE = 0, OBJECT = 1, FUNCTION = 2, SECTION = 3, FILE_NAME = 4 };
enum { UNDEFINED = 0, RESERVED = 0xff00 };

#if defined(__x86_64__)
enum { OWN_MACHINE = X86_64 };
#else
enum { OWN_MACHINE = AARCH64 };
#endif

enum { STUB_BYTES = 16, SLOT_BYTES = 8, PARTS = 3 };
enum { CODE, CONSTANTS, DATA };
static const uint64_t MOST_BYTES = (uint64_t)1 << 30, MOST_ALIGNMENT = 4096;

/* -- Functions that kernels may call -------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    const void *address;
} entry;

int korch_loop_create(), korch_loop_run(), korch_loop_team(), korch_loop_destroy(), korch_onednn_create(),
    korch_onednn_run(), korch_onednn_destroy(), korch_onnxruntime_create(), korch_onnxruntime_run(),
    korch_onnxruntime_destroy();

#define AT(name) {#name, (const void *)name}
#define BOTH(name) AT(name), AT(name##f)
static const entry own_entries[] = {
    AT(korch_region), AT(korch_max_threads), AT(korch_matrix_units), AT(korch_loop_create), AT(korch_loop_run),
    AT(korch_loop_team), AT(korch_loop_destroy), AT(korch_onednn_create), AT(korch_onednn_run), AT(korch_onednn_destroy),
    AT(korch_onnxruntime_create), AT(korch_onnxruntime_run), AT(korch_onnxruntime_destroy), AT(memcpy), AT(memset),
    AT(memmove), AT(memcmp), BOTH(sin), BOTH(cos), BOTH(tan), BOTH(asin), BOTH(acos), BOTH(atan), BOTH(sinh), BOTH(cosh),
    BOTH(tanh), BOTH(asinh), BOTH(acosh), BOTH(atanh), BOTH(exp), BOTH(log), BOTH(pow), BOTH(fmod), BOTH(erf), BOTH(exp2),
    BOTH(fma), BOTH(floor), BOTH(ceil), BOTH(trunc), BOTH(rint), BOTH(nearbyint), BOTH(round)};

/* -- State ---------------------------------------------------------------------------------------------------------- */

/* A section that is in memory. */
typedef struct {
    int part;        /* -1: it is not in memory */
    uint64_t offset; /* in its part */
} place;

typedef struct {
    const unsigned char *bytes;
    uint64_t size;
    header head;
    const section *sections; /* copies */
    place *places;
    const symbol *symbols; /* copies */
    uint64_t symbol_count;
    const char *names;
    uint64_t names_size;
    char **targets; /* where each symbol is; null if that is not known yet */
    char **stubs;   /* for each symbol: its stub, or null */
    char **slots;   /* for each symbol: the slot with its address, or null */
} object;

struct korch_code {
    char *base;
    uint64_t size;
    entry *symbols; /* a hash table, open addressing */
    uint64_t room, used;
    char *names;
};

typedef struct {
    korch_code *code;
    object *objects;
    int64_t count;
    int machine;
    uint64_t sizes[PARTS], starts[PARTS];
    uint64_t far; /* the number of relocations that may need a stub and a slot */
    char *next_stub, *next_slot;
    int at; /* the number of the object that is read */
    char *error;
    size_t error_size;
} linker;

/* Write what is wrong; return false. */
__attribute__((format(printf, 2, 3))) static bool refuse(linker *own, const char *format, ...) {
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

/* The name of a symbol; names end within their table, which ends with a zero. */
static const char *name_of(const object *o, const symbol *s) { return s->name < o->names_size ? o->names + s->name : ""; }

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
    if (o->size < sizeof o->head) return refuse(own, "it is truncated");
    memcpy(&o->head, o->bytes, sizeof o->head);
    const header *const h = &o->head;
    if (memcmp(h->magic, "\177ELF\2\1\1", 7) != 0 || h->type != RELOCATABLE)
        return refuse(own, "it is no relocatable ELF object of 64 bits");
    if (h->machine != own->machine) return refuse(own, "it is for machine %d, not %d", h->machine, own->machine);
    if (h->section_size != sizeof(section) || !is_inside(o, h->sections, h->section_count, sizeof(section)))
        return refuse(own, "its table of sections is not in it");
    o->sections = copied(o, h->sections, h->section_count, sizeof(section));
    o->places = calloc(h->section_count + 1u, sizeof(place));
    return (o->sections && o->places) || refuse(own, "there is no memory");
}

/* Whether a section is to be loaded; frames for exceptions are not. */
static bool is_loaded(const object *o, const section *s) {
    if (!(s->flags & IN_MEMORY) || s->type == UNWIND || s->type == NOTE) return false;
    const section *const names = &o->sections[o->head.names];
    const char *const name = (const char *)o->bytes + names->offset + s->name;
    return names->size - s->name < 9 || memcmp(name, ".eh_frame", 9) != 0;
}

static bool is_relocated_constant(const object *o, const section *s) {
    const section *const names = &o->sections[o->head.names];
    const char *const name = (const char *)o->bytes + names->offset + s->name;
    return names->size - s->name >= 12 && memcmp(name, ".data.rel.ro", 12) == 0;
}

/* Give each section a place in one of the parts. */
static bool place_sections(linker *own, object *o) {
    const header *const h = &o->head;
    if (h->section_count == 0) return true;
    if (h->names >= h->section_count) return refuse(own, "it has no names of sections");
    const section *const names = &o->sections[h->names];
    if (names->type == NO_BITS || !is_inside(o, names->offset, names->size, 1)) return refuse(own, "its names are not in it");
    for (int i = 0; i < h->section_count; ++i) {
        const section *const s = &o->sections[i];
        o->places[i].part = -1;
        if (s->type != NO_BITS && !is_inside(o, s->offset, s->size, 1))
            return refuse(own, "section %d is not in it", i);
        if (!(s->flags & IN_MEMORY)) continue;
        if (s->name >= names->size) return refuse(own, "the name of section %d is not in it", i);
        if (!is_loaded(o, s)) continue;
        if (s->flags & (IS_OF_THREADS | IS_COMPRESSED)) return refuse(own, "section %d is of threads, or compressed", i);
        if (s->type != BITS && s->type != NO_BITS) return refuse(own, "section %d has the type %u", i, s->type);
        const bool is_data = (s->flags & WRITABLE) && !is_relocated_constant(o, s);
        if (is_data && (s->flags & IS_CODE)) return refuse(own, "section %d is code that can be written", i);
        const uint64_t alignment = s->alignment ? s->alignment : 1;
        if (alignment & (alignment - 1) || alignment > MOST_ALIGNMENT)
            return refuse(own, "section %d is aligned to %llu bytes", i, (unsigned long long)alignment);
        const int part = s->flags & IS_CODE ? CODE : is_data ? DATA : CONSTANTS;
        const uint64_t start = (own->sizes[part] + alignment - 1) & -alignment;
        if (s->size > MOST_BYTES || start + s->size > MOST_BYTES) return refuse(own, "it is too large");
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
            own->far += s->size / sizeof(relocation);
        if (s->type != SYMBOLS) continue;
        if (o->symbols || s->entry_size != sizeof(symbol) || s->link >= o->head.section_count)
            return refuse(own, "its table of symbols is not as expected");
        const section *const names = &o->sections[s->link];
        if (names->type == NO_BITS || names->size == 0 || o->bytes[names->offset + names->size - 1] != 0)
            return refuse(own, "its names of symbols do not end");
        o->symbol_count = s->size / sizeof(symbol);
        o->symbols = copied(o, s->offset, o->symbol_count, sizeof(symbol));
        o->names = (const char *)o->bytes + names->offset;
        o->names_size = names->size;
        o->targets = calloc(3 * o->symbol_count + 1, sizeof(char *));
        if (!o->symbols || !o->targets) return refuse(own, "there is no memory");
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
            return refuse(own, "symbol %s is of a kind that is not expected", name_of(o, s));
        const section *const in = &o->sections[s->section];
        const place *const at = &o->places[s->section];
        if (at->part < 0) continue;
        if (s->value > in->size) return refuse(own, "symbol %s is outside of its section", name_of(o, s));
        o->targets[i] = own->code->base + own->starts[at->part] + at->offset + s->value;
        if (binding == LOCAL || *name_of(o, s) == 0) continue;
        entry *const found = find(own->code, name_of(o, s));
        if (found->name && binding == GLOBAL) return refuse(own, "symbol %s is defined twice", name_of(o, s));
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

/* The place of code that jumps to a symbol. */
static char *stub_of(linker *own, object *o, uint32_t number) {
    if (o->stubs[number]) return o->stubs[number];
    static const unsigned char jumps[2][8] = {
        {0xff, 0x25, 2, 0, 0, 0, 0x0f, 0x0b},         /* jmp *2(%rip); ud2 */
        {0x50, 0, 0, 0x58, 0x00, 0x02, 0x1f, 0xd6}}; /* ldr x16, . + 8; br x16 */
    char *const at = own->next_stub;
    memcpy(at, jumps[own->machine == AARCH64], 8);
    memcpy(at + 8, &o->targets[number], 8);
    own->next_stub += STUB_BYTES;
    return o->stubs[number] = at;
}

/* The place of a symbol's address. */
static char *slot_of(linker *own, object *o, uint32_t number) {
    if (o->slots[number]) return o->slots[number];
    memcpy(own->next_slot, &o->targets[number], SLOT_BYTES);
    own->next_slot += SLOT_BYTES;
    return o->slots[number] = own->next_slot - SLOT_BYTES;
}

/* -- Relocations ---------------------------------------------------------------------------------------------------- */

/* What is relocated: a symbol's address plus an addend, written at a place. */
typedef struct {
    char *at;
    uint64_t left; /* the bytes of the section from the place on */
    uint32_t type, symbol;
    int64_t addend;
} fix;

static bool out_of_range(linker *own, const fix *f, const object *o) {
    return refuse(own, "relocation %u of symbol %s is out of range", f->type, name_of(o, &o->symbols[f->symbol]));
}

static int64_t distance(const char *from, const char *to, int64_t addend) {
    return (int64_t)((uint64_t)(uintptr_t)to + (uint64_t)addend - (uint64_t)(uintptr_t)from);
}

static bool fits(int64_t value, int bits) {
    return value >= -((int64_t)1 << (bits - 1)) && value < (int64_t)1 << (bits - 1);
}

static bool write_number(linker *own, const object *o, const fix *f, int64_t value, int size, bool is_unsigned) {
    if (f->left < (uint64_t)size) return refuse(own, "relocation %u is outside of its section", f->type);
    if (size == 4 && !(is_unsigned ? (uint64_t)value <= UINT32_MAX : fits(value, 32))) return out_of_range(own, f, o);
    memcpy(f->at, &value, (size_t)size);
    return true;
}

static bool apply_x86(linker *own, object *o, const fix *f) {
    enum { R64 = 1, PC32 = 2, PLT32 = 4, GOTPCREL = 9, R32 = 10, R32S = 11, PC64 = 24, GOTPCRELX = 41, REX_GOTPCRELX = 42 };
    const char *target = o->targets[f->symbol];
    const int64_t value = distance(NULL, target, f->addend);
    switch (f->type) {
    case R64: return write_number(own, o, f, value, 8, false);
    case R32: return write_number(own, o, f, value, 4, true);
    case R32S: return write_number(own, o, f, value, 4, false);
    case PC64: return write_number(own, o, f, distance(f->at, target, f->addend), 8, false);
    case PLT32:
        if (!fits(distance(f->at, target, f->addend), 32)) target = stub_of(own, o, f->symbol);
        return write_number(own, o, f, distance(f->at, target, f->addend), 4, false);
    case PC32: return write_number(own, o, f, distance(f->at, target, f->addend), 4, false);
    case GOTPCREL:
    case GOTPCRELX:
    case REX_GOTPCRELX:
        return write_number(own, o, f, distance(f->at, slot_of(own, o, f->symbol), f->addend), 4, false);
    default: return refuse(own, "relocation %u is not known", f->type);
    }
}

/* Set some bits of an instruction. */
static bool set_bits(linker *own, const fix *f, uint32_t mask, uint32_t bits) {
    uint32_t instruction;
    if (f->left < 4) return refuse(own, "relocation %u is outside of its section", f->type);
    memcpy(&instruction, f->at, 4);
    instruction = (instruction & ~mask) | (bits & mask);
    memcpy(f->at, &instruction, 4);
    return true;
}

static int64_t pages_between(const char *from, const char *to, int64_t addend) {
    const int64_t page = ~(int64_t)4095;
    return (distance(NULL, to, addend) & page) - (distance(NULL, from, 0) & page);
}

static bool set_page(linker *own, const object *o, const fix *f, int64_t pages) {
    if (!fits(pages, 33)) return out_of_range(own, f, o);
    const uint32_t number = (uint32_t)(pages >> 12);
    return set_bits(own, f, 0x60ffffe0, (number & 3) << 29 | (number >> 2 & 0x7ffff) << 5);
}

/* Set the low bits of an address, in units of an access. */
static bool set_low(linker *own, const object *o, const fix *f, int64_t address, int shift) {
    const uint32_t low = (uint32_t)(address & 4095);
    if (low & ((1u << shift) - 1)) return out_of_range(own, f, o);
    return set_bits(own, f, 0x3ffc00, low >> shift << 10);
}

static bool apply_arm(linker *own, object *o, const fix *f) {
    enum { ABS64 = 257, ABS32 = 258, PREL64 = 260, PREL32 = 261, PAGE = 275, PAGE_NC = 276, ADD = 277, LDST8 = 278,
           JUMP26 = 282, CALL26 = 283, LDST16 = 284, LDST32 = 285, LDST64 = 286, LDST128 = 299, GOT_PAGE = 311, GOT_LOW = 312 };
    const char *target = o->targets[f->symbol];
    const int64_t value = distance(NULL, target, f->addend);
    switch (f->type) {
    case ABS64: return write_number(own, o, f, value, 8, false);
    case ABS32: return write_number(own, o, f, value, 4, true);
    case PREL64: return write_number(own, o, f, distance(f->at, target, f->addend), 8, false);
    case PREL32: return write_number(own, o, f, distance(f->at, target, f->addend), 4, false);
    case PAGE:
    case PAGE_NC: return set_page(own, o, f, pages_between(f->at, target, f->addend));
    case ADD:
    case LDST8: return set_low(own, o, f, value, 0);
    case LDST16: return set_low(own, o, f, value, 1);
    case LDST32: return set_low(own, o, f, value, 2);
    case LDST64: return set_low(own, o, f, value, 3);
    case LDST128: return set_low(own, o, f, value, 4);
    case JUMP26:
    case CALL26: {
        if (!fits(distance(f->at, target, f->addend), 28)) target = stub_of(own, o, f->symbol);
        const int64_t jump = distance(f->at, target, f->addend);
        if (!fits(jump, 28) || jump & 3) return out_of_range(own, f, o);
        return set_bits(own, f, 0x03ffffff, (uint32_t)(jump >> 2));
    }
    case GOT_PAGE: return set_page(own, o, f, pages_between(f->at, slot_of(own, o, f->symbol), 0));
    case GOT_LOW: return set_low(own, o, f, distance(NULL, slot_of(own, o, f->symbol), 0), 3);
    default: return refuse(own, "relocation %u is not known", f->type);
    }
}

/* Apply the relocations of one section. */
static bool relocate(linker *own, object *o, const section *rows) {
    const place *const at = &o->places[rows->info];
    const section *const target = &o->sections[rows->info];
    if (rows->entry_size != sizeof(relocation) || target->type == NO_BITS)
        return refuse(own, "its relocations are not as expected");
    for (uint64_t i = 0; i < rows->size / sizeof(relocation); ++i) {
        relocation row;
        memcpy(&row, o->bytes + rows->offset + i * sizeof row, sizeof row);
        if (row.type == 0) continue;
        if (row.offset > target->size || row.symbol >= o->symbol_count)
            return refuse(own, "relocation %llu is outside of its section, or of a missing symbol", (unsigned long long)i);
        if (!o->targets[row.symbol])
            return refuse(own, "symbol %s is not defined", name_of(o, &o->symbols[row.symbol]));
        const fix f = {own->code->base + own->starts[at->part] + at->offset + row.offset, target->size - row.offset, row.type,
                       row.symbol, row.addend};
        if (!(own->machine == X86_64 ? apply_x86 : apply_arm)(own, o, &f)) return false;
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
        if (s->type != ADDENDS) return refuse(own, "it has relocations without addends");
        if (!relocate(own, o, s)) return false;
    }
    return true;
}

/* -- Memory --------------------------------------------------------------------------------------------------------- */

#ifdef _WIN32
static char *map(uint64_t size) { return VirtualAlloc(NULL, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }
static void unmap(char *at, uint64_t size) { (void)size, VirtualFree(at, 0, MEM_RELEASE); }
static bool protect(char *at, uint64_t size, bool is_code) {
    DWORD before;
    return size == 0 || VirtualProtect(at, size, is_code ? PAGE_EXECUTE_READ : PAGE_READONLY, &before);
}
static uint64_t page_bytes(void) { return 4096; }
#else
static char *map(uint64_t size) {
    void *const found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}
static void unmap(char *at, uint64_t size) { munmap(at, size); }
static bool protect(char *at, uint64_t size, bool is_code) {
    return size == 0 || mprotect(at, size, is_code ? PROT_READ | PROT_EXEC : PROT_READ) == 0;
}
static uint64_t page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }
#endif

/* Map memory for all parts, stubs and slots, and make the table of symbols. */
static bool allocate(linker *own) {
    korch_code *const code = own->code;
    const uint64_t page = page_bytes(), code_bytes = (own->sizes[CODE] + 15) & -(uint64_t)16;
    const uint64_t constant_bytes = (own->sizes[CONSTANTS] + 15) & -(uint64_t)16;
    own->starts[CONSTANTS] = (code_bytes + own->far * STUB_BYTES + page - 1) & -page;
    own->starts[DATA] = (own->starts[CONSTANTS] + constant_bytes + own->far * SLOT_BYTES + page - 1) & -page;
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
    if (!code->base || !code->symbols || !code->names) return refuse(own, "there is no memory for it");
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
    return (protect(base, own->starts[CONSTANTS], true) &&
            protect(base + own->starts[CONSTANTS], own->starts[DATA] - own->starts[CONSTANTS], false)) ||
           refuse(own, "the system does not let its code run");
}

void korch_unload(korch_code *code) {
    if (!code) return;
    if (code->base) unmap(code->base, code->size);
    free(code->symbols);
    free(code->names);
    free(code);
}

/* The same for a machine, which may be another one: then nothing can be run. */
KORCH_API korch_code *korch_load_for(int machine, const korch_object *objects, int64_t count, char *error,
                                     size_t error_size) {
    linker own = {.count = count, .machine = machine, .error = error, .error_size = error_size};
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

korch_code *korch_load(const korch_object *objects, int64_t count, char *error, size_t error_size) {
    return korch_load_for(OWN_MACHINE, objects, count, error, error_size);
}
