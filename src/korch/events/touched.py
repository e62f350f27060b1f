"""A stage of a tile program, and sets of its grid points -> the bytes that each set touches.

Loops of an access over contiguous elements are one run of bytes, and each point of the other loops and of the
grid begins a run. Guards are respected: the part of a window that is outside of its image is not touched. An
access with too many points counts as touching the whole buffer.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from korch.events.spans import NOTHING, Spans, run, runs, union
from korch.primitive.op import Array
from korch.tile.check.accesses import Access, accesses
from korch.tile.check.points import Points
from korch.tile.ir.program import Axis, Buffer, Stage, TileProgram
from korch.tile.lower.buffers import BufferPlace

MOST_POINTS = 1 << 23
"""The most points of an access, for a set of grid points, that are enumerated."""

POINTS_AT_ONCE = 1 << 18
"""The most points that are enumerated at a time."""

PortSpans = dict[tuple[int, bool], Spans]
"""By position among the kernel's buffers, and whether it is written: bytes from the buffer's begin."""


def touched_by(
    program: TileProgram, stage: Stage, sets: Sequence[Array], places: Mapping[str, BufferPlace]
) -> list[PortSpans]:
    """Return what sets of grid points touch of some buffers of a kernel.

    `sets`: int64[n], the numbers of the grid points of each set. `places`: the locations of the buffers, by name; other
    buffers are left out.
    """
    found: list[list[tuple[tuple[int, bool], Spans]]] = [[] for _ in sets]
    for access in dict.fromkeys(accesses(stage)):
        place, buffer = places.get(access.buffer), program.buffer(access.buffer)
        if place is None:
            continue
        for tasks, touched in zip(sets, found, strict=True):
            spans = _access_spans(stage, access, buffer, place, tasks)
            touched.append(((place.position, access.is_write), spans))
    return [{key: union(s for k, s in touched if k == key) for key, _ in touched} for touched in found]


def _access_spans(stage: Stage, access: Access, buffer: Buffer, place: BufferPlace, tasks: Array) -> Spans:
    """Return the bytes that an access touches for a set of grid points."""
    if not tasks.size or any(axis.extent == 0 for axis in (*stage.grid, *access.axes)):
        return NOTHING
    listed, length, low = _split(access)
    inner = math.prod(axis.extent for axis in listed)
    if buffer.layout or inner * tasks.size > MOST_POINTS:
        return run(place.offset_bytes, place.offset_bytes + buffer.size * place.element_bytes)
    fixed = {axis.name: 0 for axis in access.axes if axis not in listed}
    found = []
    for part in np.array_split(tasks, -(-inner * tasks.size // POINTS_AT_ONCE)):
        points = Points(stage.grid, listed, part, fixed)
        is_touched = points.spread(points.live & points.holds(access.guards))
        begins = points.spread(points.at(access.index))[is_touched] + low
        begins, ends = (np.clip(end, 0, buffer.size) * place.element_bytes for end in (begins, begins + length))
        found.append(runs(begins + place.offset_bytes, ends + place.offset_bytes))
    return union(found)


def _split(access: Access) -> tuple[list[Axis], int, int]:
    """Return the loops to enumerate, the length of the run that the other loops touch, and where it begins.

    Loops that are not enumerated do not occur in guards and do not end early.
    """
    names = set().union(*(guard.expr.variables for guard in access.guards))
    names |= {name for axis in access.axes if axis.ragged is not None for name in (axis.name, axis.ragged[0])}
    steps = {axis.name: access.index.coefficient(axis.name) for axis in access.axes}
    listed = [axis for axis in access.axes if axis.name in names or steps[axis.name] is None]
    length, low = 1, 0
    for axis in sorted(access.axes, key=lambda axis: abs(steps[axis.name] or 0)):
        step = steps[axis.name]
        if axis in listed or not step:
            continue
        if abs(step) > length:
            listed.append(axis)
            continue
        length += abs(step) * (axis.extent - 1)
        low += min(0, step) * (axis.extent - 1)
    return listed, length, low
