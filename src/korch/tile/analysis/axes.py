"""The axes of a contraction with their steps in memory, and merging of axes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from korch.tile.ir.program import Axis

Steps = Mapping[str, int]
"""The memory step, in elements, along each axis of a contraction."""


def even_step(rows: Sequence[Axis], steps: Steps) -> int | None:
    """Return the memory step between consecutive rows, numbered across all axes of rows; None if it varies."""
    step = steps[rows[-1].name]
    if len(rows) > 1 and steps[rows[0].name] != step * rows[1].extent:
        return None
    return step


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
