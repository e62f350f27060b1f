"""Chooses what the loops of a tile program prefetch.

The hardware prefetches a few lines ahead of a read, and none beyond a page. That is too late if a task
has several passes of which only the first reads from memory, and too little if whole lines are written
past the caches at the same time. A line that is written in parts, by vectors, must first be read, and
without prefetches a core has few such reads outstanding at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from korch.tile.ir.index import Expr
from korch.tile.ir.program import Axis, Level, Load, Pass, Sink, Stage, TileProgram, read_by
from korch.tile.lower.buffers import LINE_BYTES
from korch.tile.lower.loops import LINE_ELEMENTS

MOST_AHEAD = 4096
"""The maximum distance in elements from a task's data to the next task's that is prefetched: L1 holds both."""

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

    # by name of a load, the distance of its prefetch into the L1 cache
    near: Mapping[str, int] = field(default_factory=dict)
    # by name of a load, the distance of its prefetch into the L2 cache
    far: Mapping[str, int] = field(default_factory=dict)
    # prefetches into the L1 cache that accompany the stores: (buffer, index, distance)
    beside: tuple[tuple[str, Expr, int], ...] = ()
    written: tuple[tuple[str, Expr, int], ...] = ()  # the same for lines that will be written


def fetches_of(program: TileProgram, stage: Stage, pass_: Pass, streamed: Set[str], large: Set[str]) -> Fetches:
    """Return what a pass prefetches.

    If the last pass of a task writes past the caches, it prefetches what the next task reads, so that
    memory reads and writes overlap. Otherwise the second pass that reads a buffer does this: the first
    one waits for memory, and afterwards memory is idle. A pass that is the first to read a large input
    and writes past the caches prefetches from memory for itself.
    """
    at = next(i for i, other in enumerate(stage.passes) if other is pass_)
    last = stage.passes[-1]
    beside = _beside(stage, last) if _stores(last, streamed) else ()
    left_out = {buffer for buffer, *_ in beside}
    far: dict[str, int] = {}
    if _stores(pass_, streamed):
        before = read_by(stage.passes[:at])
        far = _far(stage, pass_, large - before - left_out)
    elif pass_.is_reduction:
        far = _streams(pass_, large)
    return Fetches(
        near=_near(stage, at, left_out),
        far=far,
        beside=beside if pass_ is last else (),
        written=_written(program, stage, pass_, streamed),
    )


def _stores(pass_: Pass, streamed: Set[str]) -> bool:
    """Return whether a pass is no reduction and writes past the caches."""
    return not pass_.is_reduction and any(s.buffer in streamed for s in pass_.sinks)


def _next_step(stage: Stage, index: Expr) -> int:
    """Return the distance from an element to the one that the next task reads; 0 if it is too short or too long."""
    step = (index.coefficient(stage.grid[-1].name) or 0) if stage.grid else 0
    return step if LINE_ELEMENTS <= step <= MOST_AHEAD else 0


def _near(stage: Stage, at: int, left_out: Set[str]) -> dict[str, int]:
    """Return the loads with which a pass, the second one that reads their buffer, prefetches for the next task."""
    before = [read_by((p,)) for p in stage.passes[:at]]
    found: dict[str, int] = {}
    seen = set(left_out)
    for op in stage.passes[at].ops:
        if not isinstance(op, Load) or op.buffer in seen:
            continue
        seen.add(op.buffer)
        step = _next_step(stage, op.index)
        if sum(op.buffer in read for read in before) == 1 and not op.guards and step:
            found[op.name] = step
    return found


def _beside(stage: Stage, last: Pass) -> tuple[tuple[str, Expr, int], ...]:
    """Return what the last pass prefetches of the next task: elements that earlier passes read at the same points."""
    extents = {axis.name: axis.extent for axis in (*stage.grid, *last.axes)}
    first = read_by(stage.passes[:-1])
    found: dict[str, tuple[str, Expr, int]] = {}
    for pass_ in stage.passes:
        own = {axis.name: axis.extent for axis in (*stage.grid, *pass_.axes)}
        for op in pass_.ops:
            if not isinstance(op, Load) or op.guards or op.buffer not in first - {*found}:
                continue
            is_same = all(extents.get(v) == own[v] for v in op.index.variables)
            step = _next_step(stage, op.index)
            if is_same and step and op.index.coefficient(last.vector) == 1:
                found[op.buffer] = op.buffer, op.index, step
    return tuple(found.values())


def _written(program: TileProgram, stage: Stage, pass_: Pass, streamed: Set[str]) -> tuple[tuple[str, Expr, int], ...]:
    """Return the prefetches of cached vector stores, each in the first pass that runs over the store's points.

    An earlier pass prefetches the very lines that a later pass will write. A pass that stores itself
    prefetches lines ahead of its own stores; where it writes squares, the line after each row's.
    """
    found: dict[str, tuple[str, Expr, int]] = {}
    for other in stage.passes:
        for sink in () if other.is_reduction else other.sinks:
            buffer = program.buffer(sink.buffer)
            size_bytes = buffer.dtype.size_bytes
            is_kept = buffer.level is not Level.TILE and buffer.name not in streamed
            is_along = sink.index.coefficient(other.vector) == 1
            if not is_kept or not is_along or buffer.size * size_bytes < LEAST_WRITTEN_BYTES:
                continue
            first = next(p for p in stage.passes if p is other or _has_points(stage, p, other, sink))
            if first is not pass_:
                continue
            step = LINE_ELEMENTS
            if not other.across:
                step = _later_step(sink.index, WRITTEN_BYTES // size_bytes, _loops(stage, other))
            if step or first is not other:
                found[sink.buffer] = sink.buffer, sink.index, step if first is other else 0
    return tuple(found.values())


def _has_points(stage: Stage, pass_: Pass, other: Pass, sink: Sink) -> bool:
    """Return whether a pass of stores runs over the points at which another pass writes, with the same vectors."""
    own = {axis.name: axis.extent for axis in (*stage.grid, *pass_.axes)}
    extents = {axis.name: axis.extent for axis in (*stage.grid, *other.axes)}
    is_same = all(own.get(name) == extents[name] for name in sink.index.variables)
    is_plain = not pass_.is_reduction and not pass_.across
    return is_plain and is_same and sink.index.coefficient(pass_.vector) == 1


def _loops(stage: Stage, pass_: Pass) -> list[Axis]:
    """Return the loops of a pass, innermost first."""
    return [axis for axis in (*stage.grid, *pass_.axes) if axis.extent > 1][::-1]


def _far(stage: Stage, pass_: Pass, large: Set[str]) -> dict[str, int]:
    """Return the distances at which loads of a pass from `large` buffers prefetch from memory."""
    axes = _loops(stage, pass_)
    found: dict[str, int] = {}
    seen: set[str] = set()
    for op in pass_.ops:
        if isinstance(op, Load) and op.buffer in large - seen:
            seen.add(op.buffer)
            step = _later_step(op.index, FAR_BYTES // op.dtype.size_bytes, axes)
            if step:
                found[op.name] = step
    return found


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
