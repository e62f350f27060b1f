"""Chooses what the loops of a tile program prefetch.

The hardware prefetches a few lines ahead of a read, and none beyond a page, which is too late for a reduction that
reads one stream from memory. A line that is written in parts, by vectors, must first be read, and without prefetches a
core has few such reads outstanding at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from korch.tile.ir.index import Expr
from korch.tile.ir.program import Axis, Level, Load, Pass, Stage, TileProgram
from korch.tile.lower.buffers import LINE_BYTES
from korch.tile.lower.loops import LINE_ELEMENTS

FAR_BYTES = 8 << 10
"""The distance in bytes at which lines are prefetched from memory into the L2 cache."""

WRITTEN_BYTES = 1 << 10
"""The distance in bytes at which lines are prefetched for writing. At the end of a thread's part
these lines belong to another thread, so the distance is as short as possible."""

LEAST_WRITTEN_BYTES = 128 << 10
"""In smaller buffers, the cost at the ends of threads' parts exceeds the gain."""

LEAST_LAPS = 4
"""The minimum ratio of a loop's iterations to the iterations of the prefetch distance."""


@dataclass(frozen=True)
class Fetches:
    """What one pass prefetches. Distances are in elements ahead of the element that is accessed."""

    # by name of a load, the distance of its prefetch into the L2 cache
    read: Mapping[str, int] = field(default_factory=dict)
    # prefetches into the L1 cache of lines that will be written: (buffer, index, distance)
    written: tuple[tuple[str, Expr, int], ...] = ()


def fetches_of(program: TileProgram, stage: Stage, pass_: Pass, streamed: Set[str], large: Set[str]) -> Fetches:
    """Return what a pass prefetches."""
    read = _streams(pass_, large) if pass_.is_reduction else {}
    return Fetches(read, _written(program, stage, pass_, streamed))


def _written(program: TileProgram, stage: Stage, pass_: Pass, streamed: Set[str]) -> tuple[tuple[str, Expr, int], ...]:
    """Return the prefetches of lines ahead of cached vector stores; of squares, the line after each row's."""
    found: dict[str, tuple[str, Expr, int]] = {}
    for sink in () if pass_.is_reduction else pass_.sinks:
        buffer = program.buffer(sink.buffer)
        size_bytes = buffer.dtype.size_bytes
        is_kept = buffer.level is not Level.TILE and buffer.name not in streamed
        is_along = sink.index.coefficient(pass_.vector) == 1
        if not is_kept or not is_along or buffer.size * size_bytes < LEAST_WRITTEN_BYTES:
            continue
        step = LINE_ELEMENTS
        if not pass_.across:
            step = _later_step(sink.index, WRITTEN_BYTES // size_bytes, _loops(stage, pass_))
        if step:
            found[sink.buffer] = sink.buffer, sink.index, step
    return tuple(found.values())


def _loops(stage: Stage, pass_: Pass) -> list[Axis]:
    """Return the loops of a pass, innermost first."""
    return [axis for axis in (*stage.grid, *pass_.axes) if axis.extent > 1][::-1]


def _streams(pass_: Pass, large: Set[str]) -> dict[str, int]:
    """Return the loads of a reduction whose iterations read consecutive lines of a large buffer, with the distance."""
    if not pass_.axes:  # a window of one element, or a reduction of one
        return {}
    inner = pass_.axes[-1]
    width = next((axis.extent for axis in pass_.axes if axis.name == pass_.vector), 0)
    found: dict[str, int] = {}
    for op in pass_.ops if inner.is_reduced and inner.name != pass_.vector else ():
        if isinstance(op, Load) and op.buffer in large and not op.guards:
            step, along = (op.index.coefficient(name) for name in (inner.name, pass_.vector))
            if along == 1 and step == width and width * op.dtype.size_bytes >= LINE_BYTES:
                found[op.name] = FAR_BYTES // op.dtype.size_bytes
    return found


def _later_step(index: Expr, wanted: int, axes: Sequence[Axis]) -> int:
    """Return the distance from an element to the one that is accessed some iterations of a loop later.

    `wanted`: how many elements are accessed between the two.

    Returns:
        The distance in elements; 0 if it is unknown, or if the loops are too short.
    """
    met = 1
    for at, axis in enumerate(axes):
        step = index.coefficient(axis.name)
        if step is None:
            return 0
        if step == 0:
            continue
        turns, extent = -(-wanted // met), axis.extent
        for outer in axes[at + 1 :]:  # outer loops whose next iteration continues where this loop ends
            if index.coefficient(outer.name) != step * extent:
                break
            extent *= outer.extent
        if extent >= LEAST_LAPS * turns:
            return turns * step
        met *= axis.extent
    return 0
