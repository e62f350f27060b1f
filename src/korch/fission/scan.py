"""Fission of running sums.

The axis is cut into blocks. Within a block each running sum is a sum over a window that begins in
the padding before the block. The totals of the blocks are summed up in the same way, and each block
adds the sum of the blocks before it. So an element takes about `BLOCK` additions for any length of
the axis, all of them vectorized, and the size of the kernels' code does not depend on the length.
Nothing is subtracted or multiplied, so an infinity or NaN affects only the sums that contain it.
"""

from __future__ import annotations

from korch.fission.context import Context, axis_of
from korch.fission.rule import FissionRule, NotSplit, rule
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import ValueId

BLOCK = 16
WHOLE = 32
"""The longest axis that is processed as one block."""


def _cumsum(c: Context) -> ValueId | NotSplit:
    x, axes = c.input(0), c.ints(1)
    if axes is None:
        return NotSplit("the axis is computed at run time")
    axis, is_reverse = axis_of(axes[0], c.rank(x)), bool(c.attributes.integer("reverse", 0))
    total = _sums(c, x, axis, is_reverse)
    return _shifted(c, total, axis, is_reverse) if c.attributes.integer("exclusive", 0) else total


def _sums(c: Context, value: ValueId, axis: int, is_reverse: bool) -> ValueId:
    """Return the sum of each element and all elements before it along an axis, or all after it if `is_reverse`."""
    shape = c.shape(value)
    size, lead, trail = shape[axis], shape[:axis], shape[axis + 1 :]
    if size <= WHOLE:
        return _sums_of_block(c, value, axis, is_reverse)
    count = -(-size // BLOCK)
    more = [count * BLOCK - size if i == axis else 0 for i in range(len(shape))]
    whole = c.pad(value, [0] * len(shape), more)
    blocks = c.reshape(whole, (*lead, count, BLOCK, *trail))
    within = _sums_of_block(c, blocks, axis + 1, is_reverse)
    last = c.slice_axis(within, axis + 1, 0 if is_reverse else BLOCK - 1, 1)
    totals = _sums(c, c.reshape(last, (*lead, count, *trail)), axis, is_reverse)
    before = c.reshape(_shifted(c, totals, axis, is_reverse), (*lead, count, 1, *trail))
    result = c.reshape(c.elementwise("add", within, before), c.shape(whole))
    return c.slice_axis(result, axis, 0, size)


def _sums_of_block(c: Context, value: ValueId, axis: int, is_reverse: bool) -> ValueId:
    """Return the sums along an axis as sums over windows that are as long as the axis."""
    size, rest = c.shape(value)[axis], c.rank(value) - axis - 1
    if size == 1:
        return value
    ones, none, reach = (1,) * (rest + 1), (0,) * (rest + 1), (size - 1, *(0,) * rest)
    begin, end = (none, reach) if is_reverse else (reach, none)
    window = PoolAttributes((size, *ones[1:]), ones, begin, end, ones)
    return c.add("pool_sum", value, attributes=window)


def _shifted(c: Context, value: ValueId, axis: int, is_reverse: bool) -> ValueId:
    """Return a value shifted by one position towards the end of an axis (or the start); a zero is inserted."""
    size, rank = c.shape(value)[axis], c.rank(value)
    kept = c.slice_axis(value, axis, 1 if is_reverse else 0, size - 1)
    zeros = [0] * rank
    pads = [1 if i == axis else 0 for i in range(rank)]
    return c.pad(kept, zeros, pads) if is_reverse else c.pad(kept, pads, zeros)


RULES: tuple[FissionRule, ...] = (rule("CumSum", _cumsum, 11),)
