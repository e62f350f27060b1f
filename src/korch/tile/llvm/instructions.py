"""The instructions that multiply and add, each declared with the contraction that it implements."""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.primitive.types import DType
from korch.tile.ir.program import PAIR, QUAD
from korch.tile.llvm.emit import Emit, SsaValue, array

TILES = 8
"""The number of tile registers."""

TILE_ROWS, TILE_BYTES = 16, 64
"""The rows of a tile register, and the bytes of a row."""

ROWS, COLUMNS = (4, 5), (6, 7)
"""The tile registers of two tiles of rows and two of columns; register 2 r + c has the sums of tiles r and c."""

ROW_BYTES_AT, ROWS_AT = 16, 48
"""Where the configuration has the bytes of a row of each tile register (two bytes), and its rows (one byte)."""


@dataclass(frozen=True, slots=True)
class DotInstruction:
    """An instruction that adds the product of a (rows, terms) and b (terms, columns) to sums (rows, columns)."""

    name: str  # LLVM's name
    feature: str  # LLVM's name of the extension that has it
    a: DType  # the element type of the first operand
    b: DType  # that of the second operand
    rows: int  # rows of sums
    columns: int  # columns of sums
    terms: int  # the terms of each sum
    # adjacent elements of each operand, the terms that one number of 32 bits holds. The first operand has groups in
    # rows; the second has the groups of all columns for each group of terms.
    group: int
    # whether operands and sums are tile registers; else vectors, of which the first repeats one group
    in_tiles: bool = False

    def add(self, emit: Emit, total: SsaValue, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print it for vectors; return the new sums."""
        return emit.call(self.name, total.kind, total.lanes, total, a, b)

    def add_tiles(self, emit: Emit, total: int, a: int, b: int) -> None:
        """Print it for tile registers."""
        print_tiles(emit, self.name, *(SsaValue(str(n), "i8") for n in (total, a, b)))


def print_tiles(emit: Emit, name: str, *operands: SsaValue) -> None:
    """Print the call of an instruction for tile registers, which are given as numbers of 8 bits."""
    emit.declare(name, "void", *(x.type for x in operands))
    emit.effect(f"call void @{name}({', '.join(x.typed for x in operands)})")


def configure_tiles(emit: Emit, row_bytes: int, height: SsaValue, quads: int) -> None:
    """Print the configuration of the tile registers: sums, two tiles of rows, two of columns."""
    numbers = [1, *[0] * (TILE_BYTES - 1)]
    for n in range(TILES):
        numbers[ROW_BYTES_AT + 2 * n] = row_bytes if n in ROWS else TILE_BYTES
        numbers[ROWS_AT + n] = quads if n in COLUMNS else height.number or 0
    place = emit.array("i8", TILE_BYTES)
    emit.store(array("i8", numbers), place, TILE_BYTES)
    if height.number is None:
        for n in range(COLUMNS[0]):
            emit.store(emit.convert("trunc", height, "i8"), emit.place("i8", place, emit.index(ROWS_AT + n)), 1)
    print_tiles(emit, "llvm.x86.ldtilecfg", place)


def _tiles(name: str, feature: str, a: DType, b: DType, group: int) -> DotInstruction:
    columns = TILE_BYTES // 4
    return DotInstruction(f"llvm.x86.{name}", feature, a, b, TILE_ROWS, columns, columns * group, group, True)


DOTS = (
    DotInstruction("llvm.x86.avx512.vpdpbusd.512", "avx512vnni", DType.U8, DType.I8, 1, 16, QUAD, QUAD),
    DotInstruction("llvm.aarch64.neon.sdot.v4i32.v16i8", "dotprod", DType.I8, DType.I8, 1, 4, QUAD, QUAD),
    DotInstruction("llvm.aarch64.neon.udot.v4i32.v16i8", "dotprod", DType.U8, DType.U8, 1, 4, QUAD, QUAD),
    DotInstruction("llvm.aarch64.neon.usdot.v4i32.v16i8", "i8mm", DType.U8, DType.I8, 1, 4, QUAD, QUAD),
    DotInstruction("llvm.x86.avx512bf16.dpbf16ps.512", "avx512bf16", DType.BF16, DType.BF16, 1, 16, PAIR, PAIR),
    DotInstruction("llvm.aarch64.neon.bfdot.v4f32.v8bf16", "bf16", DType.BF16, DType.BF16, 1, 4, PAIR, PAIR),
    _tiles("tdpbssd", "amx-int8", DType.I8, DType.I8, QUAD),
    _tiles("tdpbsud", "amx-int8", DType.I8, DType.U8, QUAD),
    _tiles("tdpbusd", "amx-int8", DType.U8, DType.I8, QUAD),
    _tiles("tdpbuud", "amx-int8", DType.U8, DType.U8, QUAD),
    _tiles("tdpbf16ps", "amx-bf16", DType.BF16, DType.BF16, PAIR),
)
"""The declared instructions."""


def dot_of_tiles(a: DType, b: DType) -> DotInstruction:
    """Return the instruction that multiplies tile registers of two element types."""
    return next(dot for dot in DOTS if (dot.a, dot.b, dot.in_tiles) == (a, b, True))


def dot_of_vectors(a: DType, b: DType, extensions: Sequence[str]) -> DotInstruction | None:
    """Return the instruction of some extensions that multiplies vectors of b by those of a, else by those of a type."""
    own = (dot for dot in DOTS if not dot.in_tiles and dot.feature in extensions and b in (dot.a, dot.b))
    return min(own, key=lambda dot: {dot.a, dot.b} != {a, b}, default=None)
