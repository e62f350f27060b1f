/* What the two files of the loader share: the parts of the ELF format that are used, and the loader's state. */
#pragma once

#include "korch_runtime.h"

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

/* A symbol's name and address. */
typedef struct {
    const char *name;
    const void *address;
} entry;

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
    uint64_t distant; /* the number of relocations that may need a stub and a slot */
    char *next_stub, *next_slot;
    int at; /* the number of the object that is read */
    char *error;
    size_t error_size;
} linker;

/* What is relocated: a symbol's address plus an addend, written at a place. */
typedef struct {
    char *at;
    uint64_t left; /* the bytes of the section from the place on */
    uint32_t type, symbol;
    int64_t addend;
} fix;

/* The name of a symbol; names end within their table, which ends with a zero. */
static inline const char *name_of(const object *o, const symbol *s) {
    return s->name < o->names_size ? o->names + s->name : "";
}

/* Write what is wrong; return false. */
__attribute__((format(printf, 2, 3))) bool korch_refuse(linker *own, const char *format, ...);

/* Apply one relocation; return whether it is known and in range. */
bool korch_relocate(linker *own, object *o, const fix *f);
