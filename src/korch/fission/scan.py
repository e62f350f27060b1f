"""Fission of running sums.

Sums over 1, 2, 4, ... predecessors are added up, log2(n) steps of n additions. A product with a
triangular matrix would be one step, but it turns an infinity into NaN in all other sums.
"""

from __future__ import annotations

from korch.fission.context import Context, axis_of
from korch.fission.rule import Refusal, Rule, rule

LONGEST = 1024


def _cumsum(c: Context) -> int | Refusal:
    x, axes = c.input(0), c.ints(1)
    if axes is None:
        return Refusal("the axis is computed at run time")
    axis = axis_of(axes[0], c.rank(x))
    size = c.shape(x)[axis]
    if size > LONGEST:
        return Refusal(f"an axis of more than {LONGEST} elements")
    if 0 in c.shape(x):
        return Refusal("an empty input")
    is_reverse = bool(c.attribute("reverse", 0))
    total, reach = x, 1
    while reach < size:
        total = c.elementwise("add", total, _shifted(c, total, axis, reach, is_reverse))
        reach *= 2
    return _shifted(c, total, axis, 1, is_reverse) if c.attribute("exclusive", 0) else total


def _shifted(c: Context, value: int, axis: int, count: int, is_reverse: bool) -> int:
    """Return a value moved along an axis towards its end (or its beginning), zeros moving in."""
    size, rank = c.shape(value)[axis], c.rank(value)
    kept = c.slice_axis(value, axis, count if is_reverse else 0, size - count)
    zeros = [0] * rank
    pads = [count if i == axis else 0 for i in range(rank)]
    return c.pad(kept, zeros, pads) if is_reverse else c.pad(kept, pads, zeros)


RULES: tuple[Rule, ...] = (rule("CumSum", _cumsum, 11),)
