"""A pass with non-temporal stores -> the spans that it collects first, to write whole cache lines.

Rows that do not begin at a cache line boundary share lines with adjacent rows. Where a task writes one
dense span of a buffer, its rows are first collected in private memory, which stays in the core's
caches; from there all whole lines of the span are written past the caches. At most two tasks share a
line.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from korch.tile.ir.index import Expr, Var
from korch.tile.ir.program import Axis, Pass, Sink
from korch.tile.lower.loops import LINE_ELEMENTS

MOST_COLLECTED = 32768
"""The maximum elements of a task's span: the L2 cache holds them together with the data that is read."""

LEAST_COLLECTED = 1024
"""The minimum elements of a span: of shorter ones, too large a share of the lines is shared between tasks."""


@dataclass(frozen=True, slots=True)
class WrittenSpan:
    """The contiguous part of a buffer that a task writes."""

    start: Expr  # the index of its first element in the buffer
    index: Expr  # the offset in the span of the element that a point of the loops writes
    size: int  # the number of elements, if the outermost loop does not end early
    outer: Axis  # that outermost loop
    row: int  # the elements that each iteration of it writes


def collected(pass_: Pass, streamed: Set[str]) -> dict[str, WrittenSpan]:
    """Return, by buffer, the spans that a pass collects; `streamed` are the buffers written past the caches."""
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
    """Return whether all rows along the vector axis begin at cache line boundaries."""
    others = [c for atom, c in sink.index.terms if atom != Var(pass_.vector)]
    return all(c % LINE_ELEMENTS == 0 for c in (sink.index.constant, *others))


def _span(pass_: Pass, sink: Sink) -> WrittenSpan | None:
    """Return the dense span that a task writes; None if it is not dense, or is too large or too small."""
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
