"""Blocks of memory that are read through tensor descriptors, which the tensor memory accelerator of Hopper copies."""

from __future__ import annotations

from dataclasses import dataclass

from korch.primitive.types import DType
from korch.tile.ir.index import Expr, Ranges, add, bounds, constant, scale, substitute, var
from korch.tile.ir.program import Axis, Inside, Load
from korch.tile.triton.text import Coordinates, Text

ALIGNMENT = 16
"""The alignment in bytes of the beginning of a block and of each of its rows, and the minimum size of a row."""

LONGEST = 256
"""The maximum elements of a block along an axis."""


@dataclass(frozen=True, slots=True)
class DescribedBlock:
    """A block that moves through memory with the iterations of a loop.

    Attributes:
        begin: the index of the first element of the first iteration's block.
        sizes: the number of valid elements from there on along its two axes; elements beyond are read as 0.
        step: the memory step from one row to the next.
        shape: rows and columns of the block; columns are contiguous in memory.
        moves: by how many rows and columns it moves per iteration.
        turn: the variable of the loop.
        is_turned: whether the block is transposed: its rows are the columns of the tile.
    """

    begin: Expr
    sizes: tuple[Expr, Expr]
    step: int
    shape: tuple[int, int]
    moves: tuple[int, int]
    turn: str
    is_turned: bool

    def texts(self, text: Text, at: Coordinates) -> tuple[list[str], list[str], list[str], list[str]]:
        """Return sizes, steps and shape of the descriptor, and the offsets of the block, as Triton text."""
        sizes = [text.expr(size, at) for size in self.sizes]
        offsets = [(at[self.turn].times(move) if move else "") or "0" for move in self.moves]
        return sizes, [str(self.step), "1"], list(map(str, self.shape)), offsets


def described_block(
    load: Load, axes: tuple[Axis | None, Axis | None], loop: Axis, dtype: DType, ranges: Ranges
) -> DescribedBlock | None:
    """Return the block that a load reads in an iteration of a loop; None if a descriptor can't read it.

    Args:
        load: the load at each point of the two axes; where a guard fails, the value is 0.
        axes: the axes of the rows and columns of the tile.
        loop: the innermost loop.
        dtype: the element type of the buffer.
        ranges: the ranges of all variables.
    """
    index, (rows, columns) = load.index, axes
    if rows is None or columns is None:
        return None
    steps = [index.coefficient(axis.name) for axis in (rows, columns)]
    move = index.coefficient(loop.name) if loop.extent > 1 else 0
    if steps.count(1) != 1 or None in steps or move is None:
        return None
    is_turned = steps[0] == 1
    outer, inner = (columns, rows) if is_turned else (rows, columns)
    step = steps[is_turned] or 0
    zero = dict.fromkeys((rows.name, columns.name, loop.name), constant(0))
    begin = substitute(index, zero, ranges)
    lengths = [step, begin.constant, inner.extent, *(coefficient for _, coefficient in begin.terms)]
    if step <= 0 or any(n * dtype.size_bytes % ALIGNMENT for n in lengths) or max(outer.extent, inner.extent) > LONGEST:
        return None
    moves = (move // step, 0) if move % step == 0 else (0, move)
    sizes = []
    for axis, moved in ((outer, moves[0]), (inner, moves[1])):
        own = [guard for guard in load.guards if axis.name in guard.expr.variables]
        size = _size(axis, own, moved, loop, ranges)
        if size is None or bounds(size, ranges)[0] < 1:
            return None
        sizes.append(size)
    if any(not guard.expr.variables & {outer.name, inner.name} for guard in load.guards):
        return None
    shape = (outer.extent, inner.extent)
    return DescribedBlock(begin, (sizes[0], sizes[1]), step, shape, moves, loop.name, is_turned)


def _size(axis: Axis, guards: list[Inside], moved: int, loop: Axis, ranges: Ranges) -> Expr | None:
    """Return the number of valid elements along an axis from the first iteration's block on; None if unknown."""
    if axis.ragged is not None:
        name, total = axis.ragged
        if guards or moved or not isinstance(total, int):
            return None
        return add(constant(total), scale(var(name), -axis.extent))
    if not guards:
        return constant(axis.extent + moved * (loop.extent - 1))
    if len(guards) > 1:
        return None
    (guard,) = guards
    expr = guard.expr
    own = expr.coefficient(axis.name), expr.coefficient(loop.name) if loop.extent > 1 else moved
    if own != (1, moved) or bounds(expr, ranges)[0] < guard.low:
        return None
    first = substitute(expr, dict.fromkeys((axis.name, loop.name), constant(0)), ranges)
    return add(constant(guard.high), scale(first, -1))
