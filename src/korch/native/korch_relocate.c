/* Applies the relocations of x86-64 and AArch64. */
#include "korch_load.h"

/* The place of code that jumps to a symbol; at SLOT_AT is the symbol's address. */
static char *stub_of(linker *own, object *o, uint32_t number) {
    if (o->stubs[number]) return o->stubs[number];
    static const unsigned char jumps[2][8] = {
        {0xff, 0x25, 2, 0, 0, 0, 0x0f, 0x0b},         /* jmp *2(%rip); ud2 */
        {0x50, 0, 0, 0x58, 0x00, 0x02, 0x1f, 0xd6}}; /* ldr x16, . + 8; br x16 */
    char *const at = own->next_stub;
    memcpy(at, jumps[own->machine == EM_AARCH64], 8);
    memcpy(at + SLOT_AT, &o->targets[number], 8);
    own->next_stub += STUB_BYTES;
    return o->stubs[number] = at;
}

static char *slot_of(linker *own, object *o, uint32_t number) { return stub_of(own, o, number) + SLOT_AT; }

static bool out_of_range(linker *own, const fix *f, const object *o) {
    return korch_refuse(own, "relocation %u of symbol %s is out of range", f->type, name_of(o, &o->symbols[f->symbol]));
}

static int64_t distance(const char *from, const char *to, int64_t addend) {
    return (int64_t)((uint64_t)(uintptr_t)to + (uint64_t)addend - (uint64_t)(uintptr_t)from);
}

static bool fits(int64_t value, int bits) {
    return value >= -((int64_t)1 << (bits - 1)) && value < (int64_t)1 << (bits - 1);
}

static bool write_number(linker *own, const object *o, const fix *f, int64_t value, int size, bool is_unsigned) {
    if (f->left < (uint64_t)size) return korch_refuse(own, "relocation %u is outside of its section", f->type);
    if (size == 4 && !(is_unsigned ? (uint64_t)value <= UINT32_MAX : fits(value, 32))) return out_of_range(own, f, o);
    memcpy(f->at, &value, (size_t)size);
    return true;
}

static bool apply_x86(linker *own, object *o, const fix *f) {
    const char *target = o->targets[f->symbol];
    const int64_t value = distance(NULL, target, f->addend);
    switch (f->type) {
    case R_X86_64_64: return write_number(own, o, f, value, 8, false);
    case R_X86_64_32: return write_number(own, o, f, value, 4, true);
    case R_X86_64_32S: return write_number(own, o, f, value, 4, false);
    case R_X86_64_PC64: return write_number(own, o, f, distance(f->at, target, f->addend), 8, false);
    case R_X86_64_PLT32:
        if (!fits(distance(f->at, target, f->addend), 32)) target = stub_of(own, o, f->symbol);
        return write_number(own, o, f, distance(f->at, target, f->addend), 4, false);
    case R_X86_64_PC32: return write_number(own, o, f, distance(f->at, target, f->addend), 4, false);
    case R_X86_64_GOTPCREL:
    case R_X86_64_GOTPCRELX:
    case R_X86_64_REX_GOTPCRELX:
        return write_number(own, o, f, distance(f->at, slot_of(own, o, f->symbol), f->addend), 4, false);
    default: return korch_refuse(own, "relocation %u is not known", f->type);
    }
}

/* Set some bits of an instruction. */
static bool set_bits(linker *own, const fix *f, uint32_t mask, uint32_t bits) {
    uint32_t instruction;
    if (f->left < 4) return korch_refuse(own, "relocation %u is outside of its section", f->type);
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
    const char *target = o->targets[f->symbol];
    const int64_t value = distance(NULL, target, f->addend);
    switch (f->type) {
    case R_AARCH64_ABS64: return write_number(own, o, f, value, 8, false);
    case R_AARCH64_ABS32: return write_number(own, o, f, value, 4, true);
    case R_AARCH64_PREL64: return write_number(own, o, f, distance(f->at, target, f->addend), 8, false);
    case R_AARCH64_PREL32: return write_number(own, o, f, distance(f->at, target, f->addend), 4, false);
    case R_AARCH64_ADR_PREL_PG_HI21:
    case R_AARCH64_ADR_PREL_PG_HI21_NC: return set_page(own, o, f, pages_between(f->at, target, f->addend));
    case R_AARCH64_ADD_ABS_LO12_NC:
    case R_AARCH64_LDST8_ABS_LO12_NC: return set_low(own, o, f, value, 0);
    case R_AARCH64_LDST16_ABS_LO12_NC: return set_low(own, o, f, value, 1);
    case R_AARCH64_LDST32_ABS_LO12_NC: return set_low(own, o, f, value, 2);
    case R_AARCH64_LDST64_ABS_LO12_NC: return set_low(own, o, f, value, 3);
    case R_AARCH64_LDST128_ABS_LO12_NC: return set_low(own, o, f, value, 4);
    case R_AARCH64_JUMP26:
    case R_AARCH64_CALL26: {
        if (!fits(distance(f->at, target, f->addend), 28)) target = stub_of(own, o, f->symbol);
        const int64_t jump = distance(f->at, target, f->addend);
        if (!fits(jump, 28) || jump & 3) return out_of_range(own, f, o);
        return set_bits(own, f, 0x03ffffff, (uint32_t)(jump >> 2));
    }
    case R_AARCH64_ADR_GOT_PAGE: return set_page(own, o, f, pages_between(f->at, slot_of(own, o, f->symbol), 0));
    case R_AARCH64_LD64_GOT_LO12_NC: return set_low(own, o, f, distance(NULL, slot_of(own, o, f->symbol), 0), 3);
    default: return korch_refuse(own, "relocation %u is not known", f->type);
    }
}

bool korch_relocate(linker *own, object *o, const fix *f) {
    return own->machine == EM_X86_64 ? apply_x86(own, o, f) : apply_arm(own, o, f);
}
