"""Prints contractions of bytes on matrix units as calls of their micro-kernel, which reads rows in place."""

from __future__ import annotations

import math

from korch.system.alignment import ceil_div
from korch.tile.analysis.axes import Steps, even_step, joined
from korch.tile.analysis.panels import panels
from korch.tile.analysis.sums import sides_of
from korch.tile.ir.program import QUAD, Buffer, Contract, refused

STRIP = 32
"""The columns that are computed together; also the width of a panel."""

MOST_QUADS = 16
"""The maximum number of quads (groups of four terms) of a step."""

MOST_TURNS = 2
"""The maximum number of axes of terms outside the innermost one."""


def steps_of(quads: int) -> int:
    """Return the number of equal steps in which a number of quads of terms is multiplied."""
    return next(count for count in range(ceil_div(quads, MOST_QUADS), quads + 1) if quads % count == 0)


def whole_quads(quads: int) -> int:
    """Return the number of quads rounded up so that they divide into the minimum number of equal steps."""
    steps = ceil_div(quads, MOST_QUADS)
    return steps * ceil_div(quads, steps)


def byte_tiles(step: Contract, second: Buffer, a: Steps, b: Steps) -> str:
    """Return the type of the micro-kernel.

    Args:
        step: a contraction of one or two axes of rows, columns, and up to three axes of terms.
        second: the buffer of the second operand, in panels with groups of four terms.
        a: the memory step of the first operand along each axis.
        b: the same for the second operand.

    Raises:
        InvalidGraphError: the micro-kernel does not support the layout of the operands.
    """
    rows, _, terms = sides_of(step)
    *turns, last = joined(terms, a, b)
    layout, registers = panels(second), step.registers
    if layout is None or (layout.width, layout.group) != (STRIP, QUAD) or registers is None:
        raise refused(f"buffer {second.name} is not in panels of {STRIP} columns and {QUAD} terms")
    depth = second.size // layout.columns // math.prod(axis.extent for axis in turns)
    count = steps_of(ceil_div(depth, QUAD))
    expected = depth * STRIP
    for axis in reversed(turns):
        if b[axis.name] != expected:
            raise refused(f"the turns of buffer {second.name} do not lie one after another")
        expected *= axis.extent
    is_adjacent = a[last.name] == 1 or last.extent == 1
    if len(turns) > MOST_TURNS or not is_adjacent or depth % (QUAD * count) or depth < last.extent:
        raise refused(f"terms of buffer {step.a.buffer} do not lie side by side in whole steps")
    even = even_step(rows, a)
    row, line, width = (even, 0, 0) if even is not None else (a[rows[1].name], a[rows[0].name], rows[1].extent)
    passes = "true" if registers.fetches_b else "false"
    sizes = (row, line, width, depth // (QUAD * count), second.size // layout.columns * STRIP, passes, count)
    around = [n for axis in reversed(turns) for n in (axis.extent, a[axis.name])]
    return f"korch_amx::ByteTiles<{', '.join(map(str, (*sizes, *around)))}>"
