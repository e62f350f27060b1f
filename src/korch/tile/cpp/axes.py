"""The axes of a contraction with their steps in memory: template types of micro-kernels, and merging of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from korch.tile.cpp.numbers import argument
from korch.tile.ir.program import Axis

Steps = Mapping[str, int]
"""The memory step, in elements, along each axis of a contraction."""


def even_step(rows: Sequence[Axis], steps: Steps) -> int | None:
    """Return the memory step between consecutive rows, numbered across all axes of rows; None if it varies."""
    step = steps[rows[-1].name]
    if len(rows) > 1 and steps[rows[0].name] != step * rows[1].extent:
        return None
    return step


def rows_type(rows: Sequence[Axis], a: Steps) -> str:
    """Return the C++ type that computes where each row of the first operand begins."""
    step = even_step(rows, a)
    if step is not None:
        return f"korch::Rows<{step}>"
    return f"korch::Rows<{a[rows[1].name]}, {argument(rows[1].extent)}, {argument(a[rows[0].name])}>"


def joined(terms: Sequence[Axis], a: Steps, b: Steps) -> list[Axis]:
    """Return the axes of terms with adjacent ones merged, where both operands step through them evenly."""
    found = [terms[0]]
    for axis in terms[1:]:
        outer, n = found[-1], axis.extent
        is_even = all(steps[outer.name] == steps[axis.name] * n for steps in (a, b))
        if is_even and axis.ragged is None and outer.ragged is None:
            found[-1] = replace(axis, size=outer.extent * n)
        else:
            found.append(axis)
    return found


def turns_type(terms: Sequence[Axis], a: Steps, b: Steps) -> str:
    """Return the C++ type of the loops over terms outside the innermost one."""
    *outer, last = terms
    text = f"korch::Once<{last.extent if outer and last.ragged is None else 0}>"
    for axis in reversed(outer):
        text = f"korch::Turns<{axis.extent}, {argument(a[axis.name])}, {b[axis.name]}, {text}>"
    return text
