"""Prints loops along the vector axis of a pass: whole vectors, then the remaining elements."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from korch.tile.analysis.clip import parts_of
from korch.tile.ir.index import Ranges
from korch.tile.ir.program import Apply, Axis, Load, Select, holds
from korch.tile.llvm.arithmetic import FUNCTIONS
from korch.tile.llvm.emit import SsaValue, array, constant
from korch.tile.llvm.index import Env, end_of, loop_inside
from korch.tile.llvm.points import PointPrinter, PointVector

BYTES_PER_LANE = 4
"""The bytes per lane of a vector register."""

LEAST_WIDTH = 4
"""The least lanes of a vector; fewer elements are computed one by one."""

Body = Callable[[list[PointVector]], None]


@dataclass(frozen=True)
class Span:
    """A part of the vector axis in which no guard and no choice changes, unless lanes are masked."""

    axis: Axis  # the axis
    low: int  # its first element
    high: int  # its end
    ranges: Ranges  # the ranges of all variables in it
    can_mask: bool  # whether lanes may be masked out


class SpanPrinter(PointPrinter):
    """Prints the loops over a span of the vector axis."""

    @property
    def lanes(self) -> int:
        """The elements per vector register: four bytes, two 16-bit numbers or half of a 64-bit integer per float."""
        widest = max((4 if op.dtype.is_float else op.dtype.size_bytes for op in self.pass_.ops), default=4)
        whole = self.context.lanes
        return whole if self.pass_.across else max(1, BYTES_PER_LANE * whole // widest)

    @property
    def updates(self) -> bool:
        """Whether the pass reads a buffer that it stores to: then no element may be computed twice."""
        return any(isinstance(op, Load) and op.buffer in self.written for op in self.pass_.ops)

    def over(self, axis: Axis | None, env: Env, body: Body, abreast: int = 1) -> None:
        """Print the loops along an axis, part by part; `body` prints several vectors of points."""
        if axis is None:
            body([PointVector(env, self.ranges)])
            return
        for span in self.spans(axis):
            self._part(span, env, body, abreast)

    def spans(self, axis: Axis) -> list[Span]:
        """Return the parts of an axis."""
        found = []
        for low, high in self.parts(axis):
            ranges = {**self.ranges, axis.name: (low, high - 1)}
            found.append(Span(axis, low, high, ranges, not self.pass_.across and self.can_mask(axis.name, ranges)))
        return found

    def _part(self, span: Span, env: Env, body: Body, abreast: int) -> None:
        axis, low, high, ranges, can_mask = span.axis, span.low, span.high, span.ranges, span.can_mask
        emit, end = self.emit, end_of(self.emit, axis, high, env)
        width = self.width(axis, low, high, can_mask=can_mask)

        def run(at: SsaValue, lanes: int = width, mask: SsaValue | None = None, count: int = 1) -> None:
            places = [emit.add(at, emit.index(u * lanes)) for u in range(count)]
            first = at.number if at.number is not None else low  # loops over whole vectors begin at `low`
            is_aligned = lanes > 1 and first % lanes == 0
            points = PointVector(env, ranges, axis.name, lanes, mask, is_aligned)
            body([replace(points, env={**env, axis.name: place}) for place in places])

        stop = end.number
        if stop is None or width == 1:
            self._dynamic(emit.index(low), end, width, run, can_mask=can_mask)
            return
        whole = low + (stop - low) // width * width
        at = low
        if abreast > 1 and whole - low >= abreast * width:
            at = low + (whole - low) // (abreast * width) * (abreast * width)
            emit.loop(emit.index(low), emit.index(at), abreast * width, lambda i: run(i, count=abreast))
        emit.loop(emit.index(at), emit.index(whole), width, run, cost=self.lines)
        rest = stop - whole
        if rest and stop - low >= width and not self.updates:
            run(emit.index(stop - width))
        elif rest and can_mask:
            run(emit.index(whole), mask=self.first(rest, width))
        else:
            while rest:
                lanes = 1 << (rest.bit_length() - 1)
                lanes = lanes if lanes >= LEAST_WIDTH else 1
                run(emit.index(stop - rest), lanes)
                rest -= lanes

    def _dynamic(self, begin: SsaValue, end: SsaValue, width: int, run: Callable[..., None], *, can_mask: bool) -> None:
        """Print the loops up to an end that is known at run time only."""
        emit = self.emit
        if width == 1:
            emit.loop(begin, end, 1, lambda i: run(i, 1))
            return
        whole = self.whole(begin, end, width)
        emit.loop(begin, whole, width, run)

        def singles() -> None:
            emit.loop(whole, end, 1, lambda i: run(i, 1))

        if can_mask:
            left = emit.add(end, emit.times(whole, -1))
            is_more = emit.test("icmp slt", whole, end)
            emit.branch(is_more, lambda: run(whole, mask=self.first(left, width)))
        elif not self.updates:
            last = emit.add(end, emit.index(-width))
            overlaps = emit.op("and", emit.test("icmp slt", begin, whole), emit.test("icmp slt", whole, end))
            emit.branch(overlaps, lambda: run(last), singles)
        else:
            singles()

    def whole(self, begin: SsaValue, end: SsaValue, step: int) -> SsaValue:
        """Print the end of the whole steps from `begin` to `end`, which is not before."""
        emit = self.emit
        low, high = begin.number, end.number
        if low is not None and high is not None:
            return emit.index(low + max(0, high - low) // step * step)
        count = emit.most(emit.add(end, emit.times(begin, -1)), emit.index(0))
        return emit.add(begin, emit.op("and", count, constant("i64", -step)))

    def first(self, count: int | SsaValue, lanes: int) -> SsaValue:
        """Return the mask of the first lanes."""
        if isinstance(count, int):
            return array("i1", [i < count for i in range(lanes)])
        narrow = self.emit.convert("trunc", count, "i32")
        return self.emit.test("icmp ult", array("i32", range(lanes)), narrow)

    def parts(self, axis: Axis) -> list[tuple[int, int]]:
        """Return the parts of an axis, cut where the result of a guard or a choice changes."""
        return parts_of(self.pass_, axis, self.clips, self.ranges)

    def width(self, axis: Axis, low: int, high: int, *, can_mask: bool) -> int:
        """Return the widest vector for a part; 1 if a guard still changes inside the part, unless lanes are masked."""
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        for op in self.pass_.ops:
            for guard in op.guards if isinstance(op, Load | Select) else ():
                is_clip = guard in self.clips.get(axis.name, ())
                is_open = axis.name in guard.expr.variables and not is_clip and holds(guard, ranges) is None
                if is_open and (guard in self.clipped or not can_mask):
                    return 1
        size = high - low
        if can_mask and size > 1:
            has_functions = any(isinstance(op, Apply) and op.op in FUNCTIONS for op in self.pass_.ops)
            return self.lanes if has_functions else min(self.lanes, 1 << (size - 1).bit_length())
        width = min(self.lanes, 1 << (size.bit_length() - 1))
        return width if width >= LEAST_WIDTH else 1

    def ends(self, axis: Axis, ranges: Ranges, env: Env) -> tuple[SsaValue, SsaValue]:
        """Print the bounds of the loop over a reduced axis within which its guards hold."""
        low, high = ranges[axis.name]
        whole = self.emit.index(low), end_of(self.emit, axis, min(high + 1, axis.extent), env)
        return loop_inside(self.emit, self.clips.get(axis.name, ()), axis.name, whole, ranges, env)
