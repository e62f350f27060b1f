"""A pass of a tile program -> the text of its loop nest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence, Set

from korch.tile.clip import loop_ends
from korch.tile.collect import Piece, begins_lines, collected
from korch.tile.cpp_op import OpPrinter
from korch.tile.cpp_text import C_TYPE, Writer, literal
from korch.tile.index import Expr, Ranges, add, bounds, breakpoints, constant, scale, substitute, turning_point, var
from korch.tile.loops import ALIASED_ELEMENTS, LEAST_SIDE, LINE_ELEMENTS, SQUARE_TYPES, is_across, side_of, turns_on
from korch.tile.program import Accumulate, Axis, Load, Pass, Select, Sink, Stage, holds, identity

UNROLL = 4
"""Independent accumulators of a reduction."""

SHORT_REDUCTION = 64
"""Largest number of points of a reduction that processes several vectors at once."""

ALIASED_SIDE = 8
"""Rows written together if they share sets of the first cache: as many as it surely holds."""

UNROLLED_OPERATIONS = 12
"""Largest number of operations on a vector of a square in unrolled code."""

LONG_ROW = 256
"""Elements of rows that are written past the caches though they begin inside of lines."""

FAR_SQUARES = 4
"""Squares that are fetched ahead from memory."""

DENSE_AHEAD = 1024
"""Elements that squares are fetched ahead where all that they read is one piece of memory."""

UNROLLED_EXTENT = 4
"""Loops of at most this extent are unrolled if a guard depends on them."""


class PassPrinter(OpPrinter):
    """The loop nest of one pass."""

    def __init__(self, out: Writer, stage: Stage, pass_: Pass, given: Set[str]) -> None:
        super().__init__(out, stage, pass_, given)
        self.kept = [a for a in pass_.axes if not a.is_reduced]
        self.reduced = [a for a in pass_.axes if a.is_reduced]
        self.across = next((a for a in pass_.axes if a.name == pass_.across), None)
        self.pieces = self._pieces()
        self.side = self._side(self.across) if self.across else 1
        self.is_edge = False

    def run(self) -> None:
        """Print it."""
        for buffer, piece in self.pieces.items():
            type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
            start, lines = f"{buffer}_start", f"{buffer}_lines"
            self.out.line(f"{type_}* const {start} = {buffer} + {self.out.expr(piece.start)};")
            self.out.line(f"alignas(64) {type_} {lines}[{piece.size + LINE_ELEMENTS}];")
            self.out.line(f"{type_}* const {buffer}_piece = {lines} + korch::after_line({start});")
        self._nest([a for a in self.kept if a is not self.vector and a is not self.across])
        for buffer, piece in self.pieces.items():
            type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
            end = self._end(piece.outer, piece.outer.extent)
            self.out.line(
                f"korch::stream_piece<{type_}, {self.out.lanes}>({buffer}_start, {buffer}_piece, {piece.row} * {end});"
            )

    def _pieces(self) -> dict[str, Piece]:
        """Return what is collected before it is written past the caches.

        Rows that are long enough to be written so at once are not, nor is anything where registers
        hold less than half a line.
        """
        if self.vector is None or self.out.lanes < LINE_ELEMENTS // 2:
            return {}
        is_long = self.vector.extent >= LONG_ROW and self.across is None
        return {} if is_long else collected(self.pass_, self.out.streamed)

    def _nest(self, outer: Sequence[Axis]) -> None:
        """Print the kept loops, outermost first, then what is inside of them."""
        if not outer:
            self._inside()
            return
        axis, *rest = outer
        if axis.extent <= UNROLLED_EXTENT and axis.ragged is None and turns_on(self.pass_, axis.name):
            before = self.ranges
            for value in range(axis.extent):  # guards are decided for each value
                self.out.open("")
                self.out.line(f"constexpr long {axis.name} = {value};")
                self.ranges = {**before, axis.name: (value, value)}
                self._nest(rest)
                self.out.close()
            self.ranges = before
            return
        if not rest and (self._is_split(axis) or self._is_reduced_in_rows(axis)):
            return
        self._loop(axis)
        self._nest(rest)
        self.out.close()

    def _is_split(self, axis: Axis) -> bool:
        """Print an axis as two loops, inside and at the edges, if guards tell them apart."""
        parts = self._parts(axis) if self.clipped and axis.ragged is None else []
        if len(parts) < 2:
            return False
        name, before = axis.name, self.ranges
        low, high = max(parts, key=lambda part: part[1] - part[0])
        self.out.open(f"for (long {name} = {low}; {name} < {high}; ++{name})")
        self.ranges = {**before, name: (low, high - 1)}
        self._nest(())
        self.out.close()
        begin = 0 if low else high
        step = f"{name} = {name} + 1 == {low} ? {high} : {name} + 1"
        self.out.open(f"for (long {name} = {begin}; {name} < {axis.extent}; {step})")
        self.ranges, self.is_edge = before, True
        self._nest(())
        self.is_edge = False
        self.out.close()
        return True

    def _inside(self) -> None:
        if self.across is not None:
            self._squares(self.across)
        elif not self.pass_.is_reduction:
            self._over(self.vector, self._stores)
        elif self.vector is None or self.vector.is_reduced:
            self._reduce_scalar()
        else:
            self._over(self.vector, self._reduce_lanes, self._abreast(self.vector))

    def _side(self, across: Axis) -> int:
        side = side_of(across.extent, self.out.lanes)
        steps = [sink.index.coefficient(across.name) or 0 for sink in self.pass_.sinks]
        is_aliased = self.pass_.axes[-1] is not across and not any(s % ALIASED_ELEMENTS for s in steps)
        return min(side, ALIASED_SIDE) if is_aliased and not self.is_streamed else side

    def _squares(self, across: Axis) -> None:
        """Print the loops over both axes of squares, in the order of the pass."""

        def inside(ranges: Ranges, variable: str) -> str:
            name = self._lambda("<int W>", f"[[maybe_unused]] long {variable}")
            self._sides(
                across, lambda: self._square_stores(ranges, variable), lambda: self._compute_and_store(ranges, variable)
            )
            self.out.close("};")
            return name

        def square(ranges: Ranges, variable: str) -> str:
            name = self._lambda("<int W>", f"[[maybe_unused]] long {variable}")
            self._square_stores(ranges, variable)
            self.out.close("};")
            return name

        if self.pass_.axes[-1] is across:
            self._over(self.vector, inside)
        else:
            self._sides(across, lambda: self._over(self.vector, square), lambda: self._over(self.vector, self._stores))

    def _sides(self, axis: Axis, square: Callable[[], None], single: Callable[[], None]) -> None:
        """Print the loop over an axis in steps of a square's side; the last step may overlap."""
        name, side = axis.name, self.side
        self.out.line(f"const long limit = {self._end(axis, axis.extent)};")
        if side > 1:
            self.out.open(f"if (limit >= {side}) for (long at = 0; at < limit; at += {side})")
            self.out.line(f"const long {name} = korch::smaller(at, limit - {side});")
            square()
            self.out.close()
        if side == 1 or axis.ragged is not None:
            otherwise = "else " if side > 1 else ""
            self.out.open(f"{otherwise}for (long {name} = 0; {name} < limit; ++{name})")
            single()
            self.out.close()

    # Loops along the vector axis

    def _over(self, axis: Axis | None, body: Callable[[Ranges, str], str], abreast: int = 1) -> None:
        """Run `body` (a printer of a lambda of the width) along an axis, part by part.

        Args:
            axis: the vector axis, or None.
            body: prints a lambda of the width and of how many vectors it takes at once.
            abreast: how many vectors the lambda takes at once where there are as many.
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
            self.out.line(f"const long end = {self._end(axis, high)};")
            self.out.line(f"long i = {low};")
            head = self._head(axis, low, high) if width > 1 else ""
            if head:
                self.out.line(f"for (const long head = korch::smaller(end, i + {head}); i < head; ++i) {call}<1>(i);")
            if width > 1 and high - low >= abreast * width > width:
                step = abreast * width
                self.out.line(f"for (; i + {step} <= end; i += {step}) {call}<{width}, {abreast}>(i);")
            if width > 1:
                self.out.line(f"for (; i + {width} <= end; i += {width}) {call}<{width}>(i);")
            if head:
                self.out.line(f"for (; i < end; ++i) {call}<1>(i);")
            elif axis.ragged is not None and width > 1:
                self.out.line(f"if (i < end && end - {low} >= {width}) {{ {call}<{width}>(end - {width}); i = end; }}")
            elif width > 1 and (high - low) % width:
                self.out.line(f"if (i < end) {{ {call}<{width}>(end - {width}); i = end; }}")
            if width == 1 or (axis.ragged is not None and not head):
                self.out.line(f"for (; i < end; ++i) {call}<1>(i);")
            self.out.close()

    def _head(self, axis: Axis, low: int, high: int) -> str:
        """Return how many elements lie before the first line of a row that is streamed, as text.

        It is "" if there are none, or if the row is short.
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
    def is_streamed(self) -> bool:
        """Whether anything is written past the caches."""
        return bool(self.pieces) or any(map(self._streams, self.pass_.sinks))

    def _streams(self, sink: Sink) -> bool:
        """Return whether whole vectors are written past the caches, at best whole lines of them."""
        axis = self.vector
        if axis is None or sink.buffer not in self.out.streamed or isinstance(sink, Accumulate):
            return False
        if sink.buffer in self.pieces:
            return False
        if self.across is not None and self.out.lanes < LINE_ELEMENTS:
            return False
        is_along = substitute(sink.index, {}, self.ranges).coefficient(axis.name) == 1
        is_long = axis.extent >= LONG_ROW and self.across is None
        return is_along and (is_long or begins_lines(self.pass_, sink))

    def _parts(self, axis: Axis) -> list[tuple[int, int]]:
        """Cut an axis where a guard or a choice turns."""
        ends = {0, axis.extent}
        for op in self.pass_.ops:
            if isinstance(op, Load):
                ends |= breakpoints(op.index, axis.name, self.ranges)
            if isinstance(op, Load | Select):
                for guard in op.guards:
                    if guard in self.clips.get(axis.name, ()):
                        continue
                    ends |= breakpoints(guard.expr, axis.name, self.ranges)
                    least, most = self._extremes(guard.expr, axis)
                    ends |= turning_point(least, guard.low, axis.name)
                    ends |= turning_point(most, guard.high, axis.name)
        inside = sorted(end for end in ends if 0 <= end <= axis.extent)
        return list(itertools.pairwise(inside))

    def _extremes(self, expr: Expr, axis: Axis) -> tuple[Expr, Expr]:
        """Return an expression with the reduced variables at their ends, if it is of no others.

        Between the points where these turn, a guard of a window holds for all of the window.
        """
        slope = expr.coefficient(axis.name)
        inner = {a.name for a in self.reduced} - {axis.name}
        if slope is None or not expr.variables & inner or expr.variables - inner != {axis.name}:
            return expr, expr
        own = scale(var(axis.name), slope)
        least, most = bounds(add(expr, scale(own, -1)), self.ranges)
        return add(own, constant(least)), add(own, constant(most))

    def _width(self, axis: Axis, low: int, high: int) -> int:
        """Return the widest vector for a part; 1 if a guard still turns inside of it."""
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        for op in self.pass_.ops:
            for guard in op.guards if isinstance(op, Load | Select) else ():
                is_clip = guard in self.clips.get(axis.name, ())
                if axis.name in guard.expr.variables and not is_clip and holds(guard, ranges) is None:
                    return 1
        width = min(self.out.lanes, 1 << ((high - low).bit_length() - 1))
        return width if width >= 4 else 1

    def _end(self, axis: Axis, high: int) -> str:
        if axis.ragged is None:
            return str(high)
        outer, total = axis.ragged
        return f"korch::smaller({high}, {total} - {axis.extent} * {outer})"

    def _loop(self, axis: Axis, ranges: Ranges | None = None) -> None:
        name, begin, end = axis.name, "0", self._end(axis, axis.extent)
        if ranges is not None:
            begin, end = self._ends(axis, ranges)
        self.out.open(f"for (long {name} = {begin}; {name} < {end}; ++{name})")

    def _ends(self, axis: Axis, ranges: Ranges) -> tuple[str, str]:
        """Print where the loop over a reduced axis begins and ends; return their texts."""
        low, high = ranges[axis.name]
        begin, end = str(low), str(min(high + 1, axis.extent))
        lows, ends = loop_ends(self.clips.get(axis.name, ()), axis.name, ranges)
        for above, step in lows:
            begin = f"korch::larger({begin}, {self._quotient(above, step)})"
        for above, step in ends:
            end = f"korch::smaller({end}, {self._quotient(above, step)})"
        if lows:
            self.out.line(f"const long {axis.name}_begin = {begin};")
            begin = f"{axis.name}_begin"
        if ends:
            self.out.line(f"const long {axis.name}_end = {end};")
            end = f"{axis.name}_end"
        return begin, end

    def _quotient(self, expr: Expr, divisor: int) -> str:
        text = self.out.expr(expr)
        return text if divisor == 1 else f"({text}) / {divisor}"

    # Stores

    def _stores(self, ranges: Ranges, variable: str) -> str:
        name = self._lambda("<int W>", f"[[maybe_unused]] long {variable or 'unused'}")
        self._compute_and_store(ranges, variable)
        self.out.close("};")
        return name

    def _square_stores(self, ranges: Ranges, variable: str) -> None:
        """Read the squares that begin at a point of the across axis; go through their vectors."""
        across, live = self.pass_.across, self._live(ranges)
        for op in live:
            if not isinstance(op, Load) or self._all_hold(op.guards, ranges) is False:
                continue
            if is_across(op, variable, across, ranges):
                self._square(op, f"square{len(self.squares)}", ranges, variable)
        self.out.line(f"const long first = {across};")
        if len(live) <= UNROLLED_OPERATIONS:
            self.out.line("#pragma GCC unroll 16")
        self.out.open(f"for (int j = 0; j < {self.side}; ++j)")
        self.out.line(f"[[maybe_unused]] const long {across} = first + j;")
        self._compute_and_store(ranges, variable)
        self.out.close()
        self.squares = {}

    def _square(self, op: Load, name: str, ranges: Ranges, variable: str) -> None:
        index, type_ = substitute(op.index, {}, ranges), C_TYPE[op.dtype]
        self.out.line(f"korch::Vec<{type_}, W> {name}[{self.side}] = {{}};")
        condition = self._condition(op.guards, ranges)
        self.out.line(
            (f"if ({condition}) " if condition else "") + f"korch::load_across<{type_}, W, {self.side}>"
            f"({name}, {op.buffer} + {self.out.expr(index)}, {index.coefficient(variable)});"
        )
        self._fetch_squares(op.buffer, index, index.coefficient(variable) or 0)
        self.squares[op.name] = f"{name}[j]"

    def _fetch_squares(self, buffer: str, index: Expr, step: int) -> None:
        """Fetch the squares to come: from memory where these are written past the caches."""
        if self.across is None or not (self.is_streamed or self.fetches.written):
            return
        places = [("fetch_across", self.side), ("fetch_far_across", FAR_SQUARES * self.side)]
        if not self.is_streamed:
            places = places[:1] if self.across.extent > self.side else []
        elif step == self.across.extent:
            places = [("fetch_far_across", DENSE_AHEAD)]
        for function, ahead in places:
            at = self.out.expr(add(index, constant(ahead)))
            self.out.line(f"korch::{function}<W>({buffer} + {at}, {step});")

    def _compute_and_store(self, ranges: Ranges, variable: str) -> None:
        values = self._ops(ranges, variable, "W")
        if variable:
            self._fetch("fetch", self.fetches.beside, ranges)
            self._fetch("fetch_to_write", self.fetches.written, ranges)
        for sink in self.pass_.sinks:
            store = "stream" if self._streams(sink) else "store"
            place, index = sink.buffer, sink.index
            if place in self.pieces:
                place, index = f"{place}_piece", self.pieces[place].index
            index = substitute(index, {}, ranges)
            self._store(sink.buffer, index, values[sink.value], variable, "W", store, place)

    def _fetch(self, function: str, places: Sequence[tuple[str, Expr, int]], ranges: Ranges) -> None:
        for buffer, index, step in places:
            at = self.out.expr(add(substitute(index, {}, ranges), constant(step)))
            self.out.line(f"korch::{function}<W>({buffer} + {at});")

    def _store(
        self, buffer: str, index: Expr, value: str, variable: str, width: str, store: str = "store", place: str = ""
    ) -> None:
        type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
        place = place or buffer
        at = f"{place} + {self.out.expr(index)}"
        slope = index.coefficient(variable) if variable else 0
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

    # Reductions

    def _abreast(self, axis: Axis) -> int:
        """Return how many vectors of kept elements a short reduction accumulates at once."""
        points = math.prod(a.extent for a in self.reduced)
        is_long = axis.extent >= UNROLL * self.out.lanes
        return UNROLL if is_long and points <= SHORT_REDUCTION else 1

    def _reduce_lanes(self, ranges: Ranges, variable: str) -> str:
        """Accumulate whole vectors of kept elements; the reduced loops run inside."""
        abreast = self._abreast(self.vector) if self.vector is not None else 1
        name = self._lambda("<int W, int U = 1>", f"long {variable}")
        inner = self.reduced[-1] if self.reduced else None
        unroll = UNROLL if abreast == 1 and inner and inner.extent >= 2 * UNROLL else 1
        self._declare("W", max(unroll, abreast))
        outer = [axis.name for axis in self.reduced[:-1]]
        names = (*outer, inner.name if inner is not None else "unused", variable)
        body = self._accumulator(ranges, ", long ".join(names), variable, "")
        start = f"{body}({', '.join((*outer, '{at}'))}, {variable}"
        calls = [f"{start}, {{acc}});"] + [
            f"if constexpr (U > 1) {start} + {u} * W, {self._acc(u)});" for u in range(1, abreast)
        ]
        call = calls[0] if abreast == 1 else f"{{{{ {' '.join(calls)} }}}}"
        if inner is None:
            self.out.line(call.format(at=0, acc=self._acc(0)))
        else:
            self._window(ranges, lambda ends: self._reduced_loops(ends, call, unroll))
        self._finish(unroll, ranges, variable, "W")
        for u in range(1, abreast):
            self.out.open("if constexpr (U > 1)")
            self.out.line(f"const long first = {variable};")
            self.out.open("")
            self.out.line(f"const long {variable} = first + {u} * W;")
            self._finish(1, ranges, variable, "W", u)
            self.out.close()
            self.out.close()
        self.out.close("};")
        return name

    def _window(self, ranges: Ranges, loops: Callable[[Sequence[tuple[str, str]]], None]) -> None:
        """Print the loops over all reduced axes: with constant ends where no guard clips them."""
        whole = [("0", str(axis.extent)) for axis in self.reduced]
        ends = [self._ends(axis, ranges) for axis in self.reduced]
        if ends == whole or self.is_edge:
            loops(ends)
            return
        pairs = zip(itertools.chain(*ends), itertools.chain(*whole), strict=True)
        self.out.open(f"if ({' && '.join(f'{a} == {b}' for a, b in pairs if a != b)})")
        loops(whole)
        self.out.close("} else {")
        loops(ends)
        self.out.line("}")

    def _reduced_loops(self, ends: Sequence[tuple[str, str]], call: str, unroll: int) -> None:
        """Print the reduced loops around a call, the innermost with some accumulators."""
        for axis, (begin, end) in zip(self.reduced[:-1], ends[:-1], strict=True):
            name = axis.name
            self.out.open(f"for (long {name} = {begin}; {name} < {end}; ++{name})")
        begin, end = ends[-1]
        self.out.open("")
        self._unrolled(call, end, unroll, 1, begin)
        self.out.close()
        for _ in self.reduced[:-1]:
            self.out.close()

    def _is_reduced_in_rows(self, axis: Axis) -> bool:
        """Print reductions for several elements of a kept axis at once, if they suit registers.

        Each leaves a vector; their lanes are combined together, which takes as many steps for all
        as for one.
        """
        rows = next((n for n in (16, 8, 4) if n <= self.out.lanes and axis.extent % n == 0), 0)
        is_along = self.vector is not None and self.vector.is_reduced and self.pass_.is_reduction
        types = {self.out.program.buffer(sink.buffer).dtype for sink in self.pass_.sinks}
        width = self._reduced_width() if is_along else 1
        if not rows or width < LEAST_SIDE or axis.ragged is not None or types - {*SQUARE_TYPES}:
            return False
        name = axis.name
        self.out.open(f"for (long first = 0; first < {axis.extent}; first += {rows})")
        for k, sink in enumerate(self.pass_.sinks):
            type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
            self.out.line(f"alignas(64) {type_} part{k}[{rows * width}];")
        self.out.open(f"for (long {name} = first; {name} < first + {rows}; ++{name})")
        self._reduce_scalar(f"{width} * ({name} - first)")
        self.out.close()
        self.out.line(f"const long {name} = first;")
        for k, sink in enumerate(self.pass_.sinks):
            if isinstance(sink, Accumulate):
                type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
                total = (
                    f"korch::fold<{type_}, {rows}, {width}>(part{k}, [](auto a, auto b) "
                    f"{{ return korch::combine_{sink.op}<{type_}, {rows}>(a, b); }})"
                )
                self._store(sink.buffer, sink.index, total, name, str(rows))
        self.out.close()
        return True

    def _reduced_width(self) -> int:
        """Return the widest vector along the reduced vector axis."""
        axis = self.vector
        parts = self._parts(axis) if axis is not None else []
        widths = [self._width(axis, low, high) for low, high in parts] if axis is not None else []
        return max(widths, default=1)

    def _reduce_scalar(self, part: str = "") -> None:
        """Accumulate vectors along a reduced axis; their lanes are combined at the end.

        Args:
            part: where the accumulated vector goes instead, as a place in `part0` and so on.
        """
        axis, width = self.vector, self._reduced_width()
        parts = self._parts(axis) if axis is not None else []
        longest = max((high - low for low, high in parts), default=0)
        has_rest = bool(self.clips) or any(
            axis is not None and (self._width(axis, *ends) < width or (ends[1] - ends[0]) % width) for ends in parts
        )
        unroll = UNROLL if longest >= UNROLL * width > UNROLL else 1
        self._declare(str(width), unroll)
        if width > 1:
            self._declare("1", 1, "e")
        loops = [a for a in self.reduced if a is not axis]
        for loop in loops:
            self._loop(loop, self.ranges)
        if axis is None:
            body = self._accumulator(self.ranges, "unused", "", "<int W>")
            self.out.line(f"{body}.template operator()<1>(0, {self._acc(0)});")
        for low, high in parts:
            self._reduce_part(axis, low, high, width, unroll)
        for _ in loops:
            self.out.close()
        if part:
            self._leave(unroll, str(width), part, has_rest)
        else:
            self._finish(unroll, self.ranges, "", str(width), has_rest=has_rest)

    def _leave(self, unroll: int, width: str, part: str, has_rest: bool) -> None:
        """Combine the accumulators but for their lanes, and write the vectors into parts."""
        for k, sink in enumerate(self.pass_.sinks):
            if isinstance(sink, Accumulate):
                type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
                self.out.line(f"auto total{k} = {self._total(sink, k, 0, unroll, width)};")
                if has_rest:
                    combine = f"korch::combine_{sink.op}<{type_}, 1>"
                    self.out.line(f"total{k}[0] = {combine}(total{k}[0], e{k}_0);")
                self.out.line(f"korch::store<{type_}, {width}>(part{k} + {part}, total{k});")

    def _reduce_part(self, axis: Axis | None, low: int, high: int, width: int, unroll: int) -> None:
        if axis is None:
            return
        self.out.open("")
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        body = self._accumulator(ranges, axis.name, axis.name, "<int W>")
        own = min(width, self._width(axis, low, high))
        tail = self._acc(0, "e") if width > 1 else self._acc(0)
        call = f"{body}.template operator()"
        begin, end = self._ends(axis, ranges)
        self.out.line(f"long i = {begin};")
        if own == width > 1:
            self._unrolled(f"{call}<{width}>({{at}}, {{acc}});", end, unroll, width)
        self.out.line(f"for (; i < {end}; ++i) {call}<1>(i, {tail});")
        self.out.close()

    def _unrolled(self, call: str, end: str, unroll: int, step: int, begin: str = "") -> None:
        """Print the loop `i` over an axis with several independent accumulators."""
        if begin:
            self.out.line(f"long i = {begin};")
        if unroll > 1:
            self.out.open(f"for (; i + {unroll * step} <= {end}; i += {unroll * step})")
            for u in range(unroll):
                at = f"i + {u * step}" if u else "i"
                self.out.line(call.format(at=at, acc=self._acc(u)))
            self.out.close()
        self.out.line(f"for (; i + {step} <= {end}; i += {step}) " + call.format(at="i", acc=self._acc(0)))

    def _accumulator(self, ranges: Ranges, parameter: str, variable: str, template: str) -> str:
        """Print a lambda that adds one point (or one vector of points) to the accumulators."""
        targets = ", ".join(f"auto& s{k}" for k in range(len(self.pass_.sinks)))
        name = self._lambda(template, f"[[maybe_unused]] long {parameter}, {targets}")
        width = "W" if variable else "1"
        values = self._ops(ranges, variable, width)
        for k, sink in enumerate(self.pass_.sinks):
            if isinstance(sink, Accumulate):
                type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
                combine = f"korch::combine_{sink.op}<{type_}, {width}>"
                self.out.line(f"s{k} = {combine}(s{k}, {values[sink.value]});")
        self.out.close("};")
        return name

    def _declare(self, width: str, unroll: int, prefix: str = "a") -> None:
        for k, sink in enumerate(self.pass_.sinks):
            if not isinstance(sink, Accumulate):
                continue
            dtype = self.out.program.buffer(sink.buffer).dtype
            start = literal(dtype, identity(sink.op, dtype))
            value = f"korch::splat<{C_TYPE[dtype]}, {width}>({start})"
            for u in range(unroll):
                self.out.line(f"korch::Vec<{C_TYPE[dtype]}, {width}> {prefix}{k}_{u} = {value};")

    def _acc(self, u: int, prefix: str = "a") -> str:
        return ", ".join(f"{prefix}{k}_{u}" for k in range(len(self.pass_.sinks)))

    def _total(self, sink: Accumulate, k: int, first: int, unroll: int, width: str) -> str:
        """Return the text of the accumulators of a sink, from the first on, combined."""
        type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
        total = f"a{k}_{first}"
        for u in range(1, unroll):
            total = f"korch::combine_{sink.op}<{type_}, {width}>({total}, a{k}_{u})"
        return total

    def _finish(
        self, unroll: int, ranges: Ranges, variable: str, width: str, first: int = 0, has_rest: bool = True
    ) -> None:
        """Combine the accumulators, from the first on, and write the results."""
        for k, sink in enumerate(self.pass_.sinks):
            if not isinstance(sink, Accumulate):
                continue
            type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
            total = self._total(sink, k, first, unroll, width)
            if variable:
                self._store(sink.buffer, sink.index, total, variable, width)
                continue
            if width != "1":
                total = f"korch::across_{sink.op}<{type_}, {width}>({total})"
                if has_rest:
                    total = f"korch::combine_{sink.op}<{type_}, 1>({total}, e{k}_0)"
            self.out.line(f"{sink.buffer}[{self.out.expr(sink.index)}] = {total};")
