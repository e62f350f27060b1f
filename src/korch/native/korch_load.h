/* What the two files of the loader share. */
#pragma once

#include "korch_runtime.h"

#include <elf.h>

#if defined(__x86_64__)
enum { OWN_MACHINE = EM_X86_64 };
#else
enum { OWN_MACHINE = EM_AARCH64 };
#endif

enum { STUB_BYTES = 16, SLOT_AT = 8 };
enum { CODE, CONSTANTS, DATA, PARTS };

/* The tables of an object, which are at any address. */
#define UNALIGNED __attribute__((aligned(1)))
typedef Elf64_Ehdr header UNALIGNED;
typedef Elf64_Shdr section UNALIGNED;
typedef Elf64_Sym symbol UNALIGNED;
typedef Elf64_Rela relocation UNALIGNED;

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
    const char *bytes;
    uint64_t size;
    const header *head;
    const section *sections;
    place *places;
    const symbol *symbols;
    uint64_t symbol_count;
    const char *names;
    uint64_t names_size;
    char **targets; /* where each symbol is; null if that is not known yet */
    char **stubs;   /* for each symbol: its stub, or null */
} object;

struct korch_code {
    char *base;
    uint64_t size;
    entry *symbols; /* a hash table, open addressing */
    uint64_t room;
    char *names;
};

typedef struct {
    korch_code *code;
    object *objects;
    int64_t count;
    int machine;
    uint64_t sizes[PARTS], starts[PARTS];
    uint64_t symbol_count, names_size; /* of all objects */
    uint64_t distant; /* the number of relocations that may need a stub */
    char *next_name, *next_stub;
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
    return s->st_name < o->names_size ? o->names + s->st_name : "";
}

/* Write what is wrong; return false. */
__attribute__((format(printf, 2, 3))) bool korch_refuse(linker *own, const char *format, ...);

/* Apply one relocation; return whether it is known and in range. */
bool korch_relocate(linker *own, object *o, const fix *f);
