"""A pass that writes past the caches -> what it collects first, to write whole lines.

Rows that begin inside of lines share these with the rows beside them. Where a task writes one dense
span of a buffer, its rows go into memory of its own, which stays in the core's caches, and from
there all whole lines of the span past the caches. Two tasks share a line at most.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from korch.tile.index import Expr, Var
from korch.tile.loops import LINE_ELEMENTS
from korch.tile.program import Axis, Pass, Sink

MOST_COLLECTED = 32768
"""Elements of a task's span: the second cache holds it beside what is read."""

LEAST_COLLECTED = 1024
"""Of shorter spans, too many lines are shared."""


@dataclass(frozen=True, slots=True)
class WrittenSpan:
    """What a task writes of a buffer.

    Attributes:
        start: where it begins in the buffer.
        index: where in the span a point of the loops lies.
        size: elements, if the outermost loop does not end early.
        outer: that loop.
        row: elements that each of its turns writes.
    """

    start: Expr
    index: Expr
    size: int
    outer: Axis
    row: int


def collected(pass_: Pass, streamed: Set[str]) -> dict[str, WrittenSpan]:
    """Return the buffers of which a pass collects its span."""
    if pass_.is_reduction:
        return {}
    found: dict[str, WrittenSpan] = {}
    for sink in pass_.sinks:
        span = _span(pass_, sink) if sink.buffer in streamed else None
        others = sum(other.buffer == sink.buffer for other in pass_.sinks)
        if span is not None and others == 1 and not begins_lines(pass_, sink):
            found[sink.buffer] = span
    return found


def begins_lines(pass_: Pass, sink: Sink) -> bool:
    """Return whether rows along the vector axis begin where lines do."""
    others = [c for atom, c in sink.index.terms if atom != Var(pass_.vector)]
    return all(c % LINE_ELEMENTS == 0 for c in (sink.index.constant, *others))


def _span(pass_: Pass, sink: Sink) -> WrittenSpan | None:
    """Return the dense span that a task writes, or None if it is none, or too large or small."""
    steps = {a.name: sink.index.coefficient(a.name) for a in pass_.axes if a.extent > 1}
    axes = sorted((a for a in pass_.axes if a.extent > 1), key=lambda a: steps[a.name] or 0)
    size = math.prod(axis.extent for axis in axes)
    if not LEAST_COLLECTED <= size <= MOST_COLLECTED:
        return None
    expected = 1
    for axis in axes:
        if steps[axis.name] != expected or (axis.ragged is not None and axis is not axes[-1]):
            return None
        expected *= axis.extent
    own = {Var(axis.name) for axis in pass_.axes}
    inside = tuple(term for term in sink.index.terms if term[0] in own)
    outside = tuple(term for term in sink.index.terms if term[0] not in own)
    start = Expr(sink.index.constant, outside)
    return WrittenSpan(start, Expr(0, inside), size, axes[-1], size // axes[-1].extent)
