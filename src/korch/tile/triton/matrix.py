"""Blocks of matrices in memory that the device copies by itself, as tensor descriptors (TMA) describe them."""

from __future__ import annotations

from dataclasses import dataclass

from korch.primitive.types import DType
from korch.tile.ir.index import Expr, Ranges, add, bounds, scale, substitute, var
from korch.tile.ir.index import constant as number
from korch.tile.ir.program import Axis, Buffer, Load

ALIGNED_BYTES = 16
"""The bytes of which rows are a multiple."""

SWIZZLED_BYTES = 128
"""The most bytes of a row that are copied at a time."""


@dataclass(frozen=True, slots=True)
class CopiedMatrix:
    """A matrix of dense rows in memory, of which a launch copies blocks. Elements outside of it are read as 0."""

    dtype: DType
    shape: tuple[int, int]  # rows and columns
    block: tuple[int, int]  # the rows and columns of a block, powers of two

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.shape[1] * self.dtype.size_bytes

    @property
    def box(self) -> tuple[int, int]:
        """The rows and columns that are copied at a time."""
        return self.block[0], min(self.block[1], SWIZZLED_BYTES // self.dtype.size_bytes)

    @property
    def swizzle(self) -> int:
        """How copied rows are permuted (CUtensorMapSwizzle): 0 for boxes of 16 bytes, 1 for 32, 2 for 64, 3 for 128."""
        return (self.box[1] * self.dtype.size_bytes // 16).bit_length() - 1


@dataclass(frozen=True, slots=True)
class CopiedBlock:
    """A block: its matrix, the row and column at which it begins, and whether it is turned after it is copied."""

    matrix: CopiedMatrix
    begin: tuple[Expr, Expr]
    is_turned: bool


def copied_block(
    load: Load, buffer: Buffer, axes: tuple[Axis, Axis], shape: tuple[int, int], ranges: Ranges
) -> CopiedBlock | None:
    """Return the block that a load of rows and columns reads; None if a descriptor can't describe what it reads.

    A load can be described if its index is linear, and if it is guarded by the ends of the matrix or does not reach
    them. Results for rows of a tile beyond the end of their axis are not stored, so these may have any values.

    `axes`: rows and columns. `shape`: the sides of the tile. `ranges`: of all variables.
    """
    index, steps = load.index, {name: load.index.coefficient(name) for name in sorted(load.index.variables)}
    is_turned = steps.get(axes[1].name) != 1
    (outer, inner), block = (axes[::-1], shape[::-1]) if is_turned else (axes, shape)
    stride = steps.get(outer.name) or 0
    if None in steps.values() or index.constant or steps.get(inner.name) != 1 or stride < 2:
        return None
    matrix = CopiedMatrix(buffer.dtype, (buffer.size // stride, stride), (block[0], block[1]))
    if matrix.row_bytes % ALIGNED_BYTES or buffer.size % stride or buffer.size >= 1 << 31 or max(block) > 256:
        return None
    row = add(*(scale(var(name), step // stride) for name, step in steps.items() if step and step % stride == 0))
    column = add(*(scale(var(name), step) for name, step in steps.items() if step and step % stride))
    if any(guard.expr not in (row, column) or guard.low > 0 for guard in load.guards):
        return None
    for side, axis, size in zip((row, column), (outer, inner), matrix.shape, strict=True):
        ends = {guard.high for guard in load.guards if guard.expr == side}
        if ends - {size} or (not ends and _end(side, axis, ranges) > size):
            return None
    begin = (substitute(side, {axis.name: number(0)}, ranges) for side, axis in ((row, outer), (column, inner)))
    return CopiedBlock(matrix, (next(begin), next(begin)), is_turned)


def _end(side: Expr, axis: Axis, ranges: Ranges) -> int:
    """Return the end of the rows, or columns, that a load reads along an axis."""
    match axis.ragged:
        case outer, int(total) if side == add(scale(var(outer), axis.extent), var(axis.name)):
            return total
        case _, int(total) if side == var(axis.name):  # there is one block
            return min(total, axis.extent)
    return bounds(side, {**ranges, axis.name: (0, axis.extent - 1)})[1] + 1
