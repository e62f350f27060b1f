"""The loops that measure the rates of a machine, as LLVM IR: memory, multiply-adds, products of components."""

from collections.abc import Callable, Sequence

from korch.primitive.types import DType
from korch.target import Target
from korch.tile.llvm.emit import Emit, SsaValue, constant
from korch.tile.llvm.functions import fused
from korch.tile.llvm.instructions import (
    TILE_BYTES,
    TILE_ROWS,
    configure_tiles,
    dot_of_tiles,
    dot_of_vectors,
    print_tiles,
)
from korch.tile.llvm.isa import ISAS, Isa
from korch.tile.llvm.print import module

CHAINS, LOADS = 12, 8
"""The independent chains of multiply-adds, and the vectors that are loaded or stored together."""

FACTOR = 0.999
"""The number by which sums are multiplied, and which is added: they stay finite and normal."""

COMPONENT_PRODUCTS = 6
"""The products of components for one product of float32 numbers."""

AT, COUNT = SsaValue("%at", "ptr"), SsaValue("%count", "i64")


def print_rates(target: Target) -> tuple[str, float]:
    """Return a module, and the operations of one iteration of `multiply_split` (0: it has none).

    Its functions `read`, `write` and `stream` pass over `%count` floats from `%at` on, a multiple of `LOADS * lanes`;
    `multiply` and `multiply_split` do `%count` iterations of `2 * CHAINS * lanes` operations, or of these. `nothing` is
    a kernel without work, and `region` one that opens a region without work.
    """
    emit, isa = Emit(), ISAS[target.isa]
    _passes(emit, isa, target.lanes)
    _empty(emit)
    zero, work = emit.index(0), 0.0

    def chains(name: str, step: Callable[[SsaValue], SsaValue]) -> None:
        first = [constant("float", i / CHAINS, target.lanes) for i in range(CHAINS)]
        with emit.function(f"void @{name}({AT.typed}, {COUNT.typed}) #0"):
            _use(emit, isa, *emit.loop(zero, COUNT, 1, lambda _, *sums: list(map(step, sums)), *first))

    factor = constant("float", FACTOR, target.lanes)
    chains("multiply", lambda x: fused(emit, x, factor, factor))
    if pairs := dot_of_vectors(DType.BF16, DType.BF16, isa.features):
        none = SsaValue("zeroinitializer", "bfloat", 2 * target.lanes)
        chains("multiply_split", lambda x: pairs.add(emit, x, none, none))
        work = 2.0 * CHAINS * 2 * target.lanes / COMPONENT_PRODUCTS
    elif "amx-bf16" in isa.features:
        dot = dot_of_tiles(DType.BF16, DType.BF16)
        with emit.function(f"void @multiply_split({AT.typed}, {COUNT.typed}) #0"):
            configure_tiles(emit, TILE_BYTES, emit.index(TILE_ROWS), TILE_ROWS)
            for n in range(4, 8):
                print_tiles(emit, "llvm.x86.tilezero", constant("i8", n))

            def products(_: SsaValue) -> None:
                for n in range(4):
                    dot.add_tiles(emit, n, 4 + n // 2, 6 + n % 2)

            emit.loop(zero, COUNT, 1, products)
            print_tiles(emit, "llvm.x86.tilerelease")
            emit.effect("ret void")
        work = 2.0 * 4 * dot.rows * dot.columns * dot.terms / COMPONENT_PRODUCTS
    return module(emit, isa, "rates"), work


def _passes(emit: Emit, isa: Isa, lanes: int) -> None:
    one = constant("float", 1.0, lanes)

    def place(i: SsaValue, v: int) -> SsaValue:
        return emit.place("float", emit.place("float", AT, i), emit.index(v * lanes))

    def read(i: SsaValue, *sums: SsaValue) -> Sequence[SsaValue]:
        loads = [emit.load("float", lanes, place(i, v), 4, emit.depth) for v in range(LOADS)]
        return [emit.op("fadd", x, y) for x, y in zip(sums, loads, strict=True)]

    with emit.function(f"void @read({AT.typed}, {COUNT.typed}) #0"):
        zeros = [constant("float", 0.0, lanes)] * LOADS
        _use(emit, isa, *emit.loop(emit.index(0), COUNT, LOADS * lanes, read, *zeros))
    for name, align, note in (("write", 4, ""), ("stream", 4 * lanes, ", !nontemporal !0")):

        def write(i: SsaValue, align: int = align, note: str = note) -> None:
            for v in range(LOADS):
                emit.store(one, place(i, v), align, note)

        with emit.function(f"void @{name}({AT.typed}, {COUNT.typed}) #0"):
            emit.loop(emit.index(0), COUNT, LOADS * lanes, write)
            emit.effect("ret void")


def _empty(emit: Emit) -> None:
    with emit.function("i32 @nothing(ptr %state, ptr %buffers)"):
        emit.effect("ret i32 0")
    emit.declare("korch_max_threads", "i32")
    emit.declare("korch_region", "i32", "i32", "ptr", "ptr")
    with emit.function("i32 @region(ptr %state, ptr %buffers)"):
        emit.effect("%threads = call i32 @korch_max_threads()")
        emit.effect("%failed = call i32 @korch_region(i32 %threads, ptr @nothing, ptr null)")
        emit.effect("ret i32 %failed")


def _use(emit: Emit, isa: Isa, *values: SsaValue) -> None:
    """Print the end of a function that computes values for nothing."""
    for value in values:
        emit.effect(f'call void asm sideeffect "", "{"v" if isa.is_x86 else "w"}"({value.typed})')
    emit.effect("ret void")
