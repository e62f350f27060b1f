"""Contractions of bytes whose columns have a first operand each -> calls of their micro-kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping

from korch.tile.cpp_finish import tails_of
from korch.tile.program import PAIR, Buffer, Contract, Panels


def lane_contraction(
    step: Contract, second: Buffer, lanes: int, at_once: int, a: Mapping[str, int], b: Mapping[str, int]
) -> str | None:
    """Return the type of the micro-kernel, or None if it does not read operands as these lie.

    Args:
        step: a contraction of rows, columns and two axes of terms.
        second: the buffer of the second operand.
        lanes: of a vector of 32-bit numbers.
        at_once: rows that are in registers at a time.
        a: the step in memory of each axis, of the first operand.
        b: the same of the second, which has pairs of terms of the first of their axes.
    """
    rows, columns, *taps = step.axes
    if len(taps) != 2:
        return None
    height, width = (axis.extent for axis in taps)
    pairs = -(-height // PAIR) * PAIR
    expected = {rows.name: 0, columns.name: 1, taps[0].name: lanes, taps[1].name: pairs * lanes}
    is_packed = second.layout == (Panels(second.size // (pairs * width), lanes, PAIR),)
    if not is_packed or a[columns.name] != 1 or any(b[name] not in (0, expected[name]) for name in b):
        return None
    unit = math.gcd(a[rows.name], a[taps[1].name]) or 1
    strides = (max(a[axis.name] // unit, 1) for axis in (rows, taps[1]))
    sizes = (lanes, at_once, height, width, *strides, unit, a[taps[0].name], *tails_of((rows,), at_once))
    return f"korch::LaneContraction<{', '.join(map(str, sizes))}>"
