"""The sizes of contractions of bytes on matrix units."""

from __future__ import annotations

from korch.system.alignment import ceil_div

STRIP = 32
"""The columns that are computed together; also the width of a panel."""

MOST_QUADS = 16
"""The maximum number of quads (groups of four terms) of a step."""


def steps_of(quads: int) -> int:
    """Return the number of equal steps in which a number of quads of terms is multiplied."""
    return next(count for count in range(ceil_div(quads, MOST_QUADS), quads + 1) if quads % count == 0)


def whole_quads(quads: int) -> int:
    """Return the number of quads rounded up so that they divide into the minimum number of equal steps."""
    steps = ceil_div(quads, MOST_QUADS)
    return steps * ceil_div(quads, steps)
