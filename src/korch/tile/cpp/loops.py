"""Prints the loops of a pass along its vector axis, and its stores."""

from __future__ import annotations

from collections.abc import Callable, Set

from korch.tile.analysis.clip import loop_ends, parts_of
from korch.tile.analysis.collect import WrittenSpan, begins_lines, collected
from korch.tile.cpp.op import OpPrinter
from korch.tile.cpp.text import C_TYPE, CppWriter, loop_end
from korch.tile.ir.index import Expr, Ranges, constant, substitute
from korch.tile.ir.program import Accumulate, Axis, Inside, Load, Pass, Select, Sink, Stage, holds
from korch.tile.lower.loops import LINE_ELEMENTS

LONG_ROW = 256
"""The minimum elements of rows that are written past the caches even if they begin inside cache lines."""


BYTES_PER_LANE = 4
"""The bytes per lane of a vector register."""


class LoopPrinter(OpPrinter):
    """Prints loops over whole vectors and over the remaining elements, with their bounds and vector widths."""

    def __init__(self, out: CppWriter, stage: Stage, pass_: Pass, given: Set[str]) -> None:
        super().__init__(out, stage, pass_, given)
        self.kept = [a for a in pass_.axes if not a.is_reduced]
        self.reduced = [a for a in pass_.axes if a.is_reduced]
        self.across = next((a for a in pass_.axes if a.name == pass_.across), None)
        self.spans = self._spans()

    def _over(self, axis: Axis | None, body: Callable[[Ranges, str], str], abreast: int = 1) -> None:
        """Print the loops along an axis, part by part, that call the lambda that `body` prints.

        Args:
            axis: the vector axis, or None.
            body: prints a lambda, whose template arguments are the width and the number of vectors per call.
            abreast: the number of vectors per call, where enough vectors remain.
        """
        if axis is None:
            name = body(self.ranges, "")
            self.out.line(f"{name}.template operator()<1>(0);")
            return
        for low, high in self._parts(axis):
            self.out.open("")
            name = body({**self.ranges, axis.name: (low, high - 1)}, axis.name)
            width = self._width(axis, low, high)
            call = f"{name}.template operator()"
            self.out.line(f"const long end = {loop_end(axis, high)};")
            begin = str(low)
            self.out.line(f"long i = {begin};")
            head = self._head(axis, low, high) if width > 1 else ""
            if head:
                self.out.line(f"for (const long head = korch::smaller(end, i + {head}); i < head; ++i) {call}<1>(i);")
            if width > 1 and high - low >= abreast * width > width:
                step = abreast * width
                self.out.line(f"for (; i + {step} <= end; i += {step}) {call}<{width}, {abreast}>(i);")
            if width > 1:
                self.out.line(f"for (; i + {width} <= end; i += {width}) {call}<{width}>(i);")
            if head or (width > 1 and self._updates):
                self.out.line(f"for (; i < end; ++i) {call}<1>(i);")
            elif axis.ragged is not None and width > 1:
                self.out.line(
                    f"if (i < end && end - {begin} >= {width}) {{ {call}<{width}>(end - {width}); i = end; }}"
                )
            elif width > 1 and (high - low) % width:
                self.out.line(f"if (i < end) {{ {call}<{width}>(end - {width}); i = end; }}")
            if width == 1 or (axis.ragged is not None and not head and not self._updates):
                self.out.line(f"for (; i < end; ++i) {call}<1>(i);")
            self.out.close()

    def _head(self, axis: Axis, low: int, high: int) -> str:
        """Return the text of the number of elements before the first whole cache line of a streamed row.

        It is "" if rows begin at line boundaries, or if the row is short.
        """
        if self.across is not None or self.pass_.is_reduction or high - low < LONG_ROW:
            return ""
        for sink in filter(self._streams, self.pass_.sinks):
            if low % LINE_ELEMENTS or not begins_lines(self.pass_, sink):
                ranges = {**self.ranges, axis.name: (low, low)}
                at = self.out.expr(substitute(sink.index, {axis.name: constant(low)}, ranges))
                return f"korch::before_line({sink.buffer} + {at})"
        return ""

    @property
    def _updates(self) -> bool:
        """Whether the pass reads a buffer that it stores to: then no element may be computed twice."""
        read = {op.buffer for op in self.pass_.ops if isinstance(op, Load)}
        return any(sink.buffer in read for sink in self.pass_.sinks)

    @property
    def is_streamed(self) -> bool:
        """Whether anything is written past the caches."""
        return bool(self.spans) or any(map(self._streams, self.pass_.sinks))

    def _streams(self, sink: Sink) -> bool:
        """Return whether whole vectors are written past the caches, preferably as whole cache lines."""
        axis = self.vector
        if axis is None or sink.buffer not in self.out.streamed or isinstance(sink, Accumulate):
            return False
        if sink.buffer in self.spans:
            return False
        if self.across is not None and self.out.lanes < LINE_ELEMENTS:
            return False
        is_along = substitute(sink.index, {}, self.ranges).coefficient(axis.name) == 1
        is_long = axis.extent >= LONG_ROW and self.across is None
        return is_along and (is_long or begins_lines(self.pass_, sink))

    def _parts(self, axis: Axis) -> list[tuple[int, int]]:
        """Return the parts of an axis, cut where the result of a guard or a choice changes."""
        return parts_of(self.pass_, axis, self.clips, self.ranges)

    def _width(self, axis: Axis, low: int, high: int) -> int:
        """Return the widest vector for a part; 1 if a guard still changes inside the part."""
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        for op in self.pass_.ops:
            for guard in op.guards if isinstance(op, Load | Select) else ():
                is_clip = guard in self.clips.get(axis.name, ())
                if axis.name in guard.expr.variables and not is_clip and holds(guard, ranges) is None:
                    return 1
        width = min(self._lanes, 1 << ((high - low).bit_length() - 1))
        return width if width >= 4 else 1

    @property
    def _lanes(self) -> int:
        """The elements per vector register: four bytes, two 16-bit numbers or half of a 64-bit integer per float."""
        widest = max(4 if op.dtype.is_float else op.dtype.size_bytes for op in self.pass_.ops)
        return self.out.lanes if self.across is not None else max(1, BYTES_PER_LANE * self.out.lanes // widest)

    def _loop(self, axis: Axis, ranges: Ranges | None = None) -> None:
        name, begin, end = axis.name, "0", loop_end(axis, axis.extent)
        if ranges is not None:
            begin, end = self._ends(axis, ranges)
        self.out.open(f"for (long {name} = {begin}; {name} < {end}; ++{name})")

    def _ends(self, axis: Axis, ranges: Ranges) -> tuple[str, str]:
        return print_ends(self.out, axis, self.clips.get(axis.name, ()), ranges)

    def _store(
        self, buffer: str, index: Expr, value: str, variable: str, width: str, *, store: str = "store", place: str = ""
    ) -> None:
        type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
        place = place or buffer
        at = f"{place} + {self.out.expr(index)}"
        slope = self._step(index, variable)
        if slope == 1 or not variable:
            self.out.line(f"korch::{store}<{type_}, {width}>({at}, {value});")
        elif slope is not None:
            self.out.line(f"korch::scatter<{type_}, {width}>({at}, {slope}, {value});")
        else:
            self.out.open(f"for (int lane = 0; lane < {width}; ++lane)")
            self.out.line(
                f"const long at = [&](long {variable}) {{ return {self.out.expr(index)}; }}({variable} + lane);"
            )
            self.out.line(f"{place}[at] = korch::lane<{type_}, {width}>({value}, lane);")
            self.out.close()

    def _spans(self) -> dict[str, WrittenSpan]:
        """Return the spans that are collected before they are written past the caches.

        Rows that are long enough are written past the caches directly. Nothing is collected if a
        vector register holds less than half a cache line.
        """
        if self.vector is None or self.out.lanes < LINE_ELEMENTS // 2:
            return {}
        is_long = self.vector.extent >= LONG_ROW and self.across is None
        return {} if is_long else collected(self.pass_, self.out.streamed)


def print_ends(out: CppWriter, axis: Axis, guards: tuple[Inside, ...], ranges: Ranges) -> tuple[str, str]:
    """Print the bounds of the loop over a reduced axis within which its guards hold; return their texts."""

    def quotient(expr: Expr, divisor: int) -> str:
        return out.expr(expr) if divisor == 1 else f"({out.expr(expr)}) / {divisor}"

    low, high = ranges[axis.name]
    begin, end = str(low) if low else "0", loop_end(axis, min(high + 1, axis.extent))
    lows, ends = loop_ends(guards, axis.name, ranges)
    for above, step in lows:
        begin = f"korch::larger({begin}, {quotient(above, step)})"
    for above, step in ends:
        end = f"korch::smaller({end}, {quotient(above, step)})"
    if lows:
        out.line(f"const long {axis.name}_begin = {begin};")
        begin = f"{axis.name}_begin"
    if ends:
        out.line(f"const long {axis.name}_end = {end};")
        end = f"{axis.name}_end"
    return begin, end
