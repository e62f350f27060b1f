"""The rows of windows that a contraction reads in place: their steps, and which of them are inside an image."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from korch.tile.ir.program import Axis, Contract, Inside, refused


class ImageRow(NamedTuple):
    """One row of a window."""

    stride: int  # the distance between the rows of adjacent positions, in elements of the image
    dilation: int  # the distance between the elements of a row
    unit: int  # the memory step between adjacent elements of the image
    before: int  # how many elements ahead of the image's row the row of the first position begins
    width: int  # the elements of an image's row


def rows_of_window(step: Contract) -> dict[Axis, tuple[Inside, ...]]:
    """Return the axes of a window's rows, with the guards that bound each.

    Raises:
        InvalidGraphError: a guard depends on several axes of the contraction.
    """
    *outer, _ = step.axes[2:]
    found = {}
    for axis in outer:
        found[axis] = tuple(guard for guard in step.where if axis.name in guard.expr.variables)
        others = {other.name for other in step.axes} - {axis.name}
        if any(g.expr.variables & others or (g.expr.coefficient(axis.name) or 0) <= 0 for g in found[axis]):
            raise refused("a guard of a window turns on two axes of it")
    return found


def row_of_window(step: Contract, a: Mapping[str, int]) -> ImageRow:
    """Return how the last axis of a window steps through an image.

    `step`: a contraction of positions, columns, and the terms of a window.

    Raises:
        InvalidGraphError: the guards do not match the steps in memory.
    """
    places, _, *_, last = step.axes
    stride, dilation, before, width = _guarded_row(step, a)
    unit = a[places.name] // stride or a[last.name] // dilation or 1
    if (a[places.name], a[last.name]) != tuple(
        n * unit if axis.extent > 1 else 0 for n, axis in ((stride, places), (dilation, last))
    ):
        raise refused("the guards of a window and its places in memory differ")
    return ImageRow(stride, dilation, unit, before, width)


def _guarded_row(step: Contract, a: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Return stride and dilation of the last axis of a window, zeros before a row, and the elements of a row."""
    places, _, *_, last = step.axes
    own = {places.name, last.name}
    guards = [guard for guard in step.where if guard.expr.variables & own]
    if not guards:
        unit = math.gcd(a[places.name], a[last.name]) or 1
        stride, dilation = (max(a[axis.name] // unit, 1) for axis in (places, last))
        return stride, dilation, 0, (places.extent - 1) * stride + (last.extent - 1) * dilation + 1
    slopes = {tuple(guard.expr.coefficient(axis.name) for axis in (places, last)) for guard in guards}
    known = [n for n in slopes.pop() if n is not None]
    if slopes or len(known) != 2 or any(guard.expr.variables - own for guard in guards):
        raise refused("a guard of a window turns on more than a row of it")
    stride, dilation = known
    low, high = (
        max(guard.low - guard.expr.constant for guard in guards),
        min(guard.high - guard.expr.constant for guard in guards),
    )
    return max(stride, 1), max(dilation, 1), low, max(high - low, 0)
