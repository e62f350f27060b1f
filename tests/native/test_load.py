"""The loader of objects: what it lays out and relocates, and what it refuses."""

import ctypes
import random
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from korch.system.archive import pack_objects
from korch.system.native import ERROR_BYTES, Code, runtime
from korch.tile.llvm.isa import ISAS

X86_64, AARCH64 = 62, 183

TEXT = """
@table = private constant [3 x i32] [i32 10, i32 20, i32 30], align 64
@pointers = hidden constant [2 x ptr] [ptr @table, ptr @answer]
@other = external hidden global i32
declare double @sin(double)
declare i32 @elsewhere(i32)
define ptr @table_at() {
  ret ptr @table
}
define i32 @answer(i32 %i) {
  %at = getelementptr i32, ptr @table, i32 %i
  %x = load i32, ptr %at
  %y = call i32 @elsewhere(i32 %x)
  ret i32 %y
}
define double @sine(double %x) {
  %y = call double @sin(double %x)
  ret double %y
}
define ptr @address() {
  ret ptr @elsewhere
}
"""
ELSEWHERE = "define i32 @elsewhere(i32 %x) {\n  %y = add i32 %x, 1\n  ret i32 %y\n}\n"


def compiled(text: str, isa: str = "generic") -> bytes:
    """Return the object of a module."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = ISAS[isa].triple
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, reloc="pic", codemodel="default")
    return bytes(machine.emit_object(llvm.parse_assembly(f'target triple = "{triple}"\n{text}')))


def load_for(machine: int, *objects: bytes) -> tuple[int | None, str]:
    """Return the code for a machine, or why it is refused."""
    archive, error = pack_objects(objects), ctypes.create_string_buffer(ERROR_BYTES)
    code = runtime().korch_load(machine, archive, ctypes.c_int64(len(archive)), error, ctypes.c_size_t(ERROR_BYTES))
    return code, error.value.decode(errors="replace")


def test_objects_call_each_other_and_the_c_library() -> None:
    code = Code(pack_objects([compiled(TEXT), compiled(ELSEWHERE)]))
    assert [code.function("answer")(i) for i in range(3)] == [11, 21, 31]
    sine = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(code.address("sine"))
    assert sine(0.5) == pytest.approx(0.479425538604203)
    table = code.function("table_at", ctypes.c_void_p)()
    assert table % 64 == 0
    pointers = (ctypes.c_void_p * 2).from_address(code.address("pointers") or 0)
    assert [*pointers] == [table, code.address("answer")]
    assert code.function("address", ctypes.c_void_p)() == code.address("elsewhere")
    assert code.address("nowhere") is None


def test_code_is_not_writable_and_constants_are_not_code() -> None:
    code = Code(pack_objects([compiled(TEXT), compiled(ELSEWHERE)]))
    lines = [line.split() for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]

    def rights(address: int | None) -> str:
        assert address is not None
        ranges = ((*(int(end, 16) for end in line[0].split("-")), line[1]) for line in lines)
        return next(found for begin, end, found in ranges if begin <= address < end)

    assert rights(code.address("answer")) == "r-xp"
    assert rights(code.address("pointers")) == "r--p"


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([TEXT], "object 0 is refused: symbol elsewhere is not defined"),
        ([ELSEWHERE, ELSEWHERE], "object 1 is refused: symbol elsewhere is defined twice"),
        (["@x = thread_local global i32 1\n"], "object 0 is refused: section 3 is of threads, or compressed"),
    ],
)
def test_what_is_not_expected_is_refused(texts: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Code(pack_objects(map(compiled, texts)))


def test_a_damaged_archive_is_refused() -> None:
    whole = pack_objects([compiled(ELSEWHERE)])
    cut = [whole[:size] for size in (0, 7, 40, len(whole) - 2)]
    size, end = whole.index(b"`\n") - 10, whole.index(b"`\n")
    for damaged in (*cut, whole[:end] + b"00" + whole[end + 2 :], whole[:size] + b"9" * 10 + whole[end:]):
        with pytest.raises(ValueError, match="the archive of objects is damaged"):
            Code(damaged)


def test_objects_for_another_machine_are_refused() -> None:
    own, other = ("neon", "generic") if compiled(ELSEWHERE)[18] == X86_64 else ("generic", "neon")
    with pytest.raises(ValueError, match="it is for machine"):
        Code(pack_objects([compiled(ELSEWHERE, own)]))
    assert compiled(ELSEWHERE, other)[18] in (X86_64, AARCH64)


def word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def page_of(address: int) -> int:
    """Return the page that an `adrp` instruction computes."""
    bits = word(address)
    number = (bits >> 29 & 3) | (bits >> 5 & 0x7FFFF) << 2
    return (address & ~4095) + ((number - (1 << 21 if number >> 20 else 0)) << 12)


def test_the_code_of_other_processors_finds_its_constants_and_calls() -> None:
    code, error = load_for(AARCH64, compiled(TEXT, "neon"), compiled(ELSEWHERE, "neon"))
    assert code is not None, error

    def at(name: str) -> int:
        return int(runtime().korch_symbol(ctypes.c_void_p(code), name.encode()))

    start = at("table_at")  # adrp x0, table; add x0, x0, :lo12:table; ret
    table = page_of(start) + (word(start + 4) >> 10 & 0xFFF)
    assert [*(ctypes.c_int32 * 3).from_address(table)] == [10, 20, 30]
    assert ctypes.c_uint64.from_address(at("pointers")).value == table
    start = at("address")  # adrp x0, :got:elsewhere; ldr x0, [x0, :got_lo12:elsewhere]
    slot = page_of(start) + (word(start + 4) >> 10 & 0xFFF) * 8
    assert ctypes.c_uint64.from_address(slot).value == at("elsewhere")
    jumps = [a for a in range(at("sine"), at("sine") + 32, 4) if word(a) >> 26 in (0b000101, 0b100101)]
    offset = word(jumps[0]) & 0x3FFFFFF
    stub = jumps[0] + 4 * (offset - (1 << 26 if offset >> 25 else 0))
    sine = ctypes.cast(ctypes.CDLL(None).sin, ctypes.c_void_p).value  # a program may have a stub of its own for it
    if stub != sine:  # it is too far away: ldr x16, . + 8; br x16
        assert (word(stub), word(stub + 4)) == (0x58000050, 0xD61F0200)
        assert ctypes.c_uint64.from_address(stub + 8).value == sine
    runtime().korch_unload(ctypes.c_void_p(code))


@pytest.mark.parametrize("kind", range(12))
def test_no_section_may_lie_outside_of_the_object(kind: int) -> None:
    content = bytearray(compiled(ELSEWHERE))
    sections, count = int.from_bytes(content[40:48], "little"), int.from_bytes(content[60:62], "little")
    heads = [sections + 64 * i for i in range(count)]
    table = next(head for head in heads if content[head + 4] == 2)  # of symbols
    names = heads[int.from_bytes(content[table + 40 : table + 44], "little")]
    content[names + 4] = kind
    content[names + 24 : names + 32] = (1 << 40).to_bytes(8, "little")
    code, error = load_for(int.from_bytes(content[18:20], "little"), bytes(content))
    assert code is None
    assert error.startswith("object 0 is refused: ")


@pytest.mark.parametrize(("isa", "machine"), [("generic", X86_64), ("neon", AARCH64)])
def test_no_damaged_object_crashes(isa: str, machine: int) -> None:
    rng = random.Random(0)
    whole = [compiled(TEXT, isa), compiled(ELSEWHERE, isa)]
    refused = 0
    for _ in range(20_000):
        content = bytearray(whole[0])
        for _ in range(rng.randrange(1, 4)):
            kind, at = rng.random(), rng.randrange(len(content))
            if kind < 0.1:
                content = content[: at + 1]
            elif kind < 0.6:
                content[at if kind < 0.4 else at % 64] = rng.randrange(256)
            else:
                number = rng.choice([0, 1, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1, len(content)])
                content[at : at + 8] = number.to_bytes(8, "little")
        code, error = load_for(machine, bytes(content), whole[1])
        refused += code is None
        assert (code is None) == bool(error)
        runtime().korch_unload(ctypes.c_void_p(code))
    assert 5_000 < refused < 20_000
