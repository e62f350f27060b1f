"""Prints the loop nest of a pass of a tile program."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from korch.tile.cpp.reduce import ReductionPrinter
from korch.tile.cpp.text import C_TYPE, CppWriter, loop_end
from korch.tile.ir.index import Expr, Ranges, add, constant, substitute
from korch.tile.ir.passes import turns_on
from korch.tile.ir.program import Axis, Inside, Load, Pass, Stage
from korch.tile.lower.loops import ALIASED_ELEMENTS, LINE_ELEMENTS, is_across, side_of

ALIASED_SIDE = 8
"""The maximum rows written together if they map to the same L1 sets: a number that these sets can hold."""

UNROLLED_OPERATIONS = 12
"""The maximum operations of a square whose code is unrolled."""

FAR_SQUARES = 4
"""The prefetch distance from memory, in squares."""

DENSE_AHEAD = 1024
"""The prefetch distance in elements if all the data that squares read is contiguous in memory."""

MANY_GUARDED = 8
"""With at least this many guarded loads, a pass first tests whether all guards hold."""

UNROLLED_EXTENT = 4
"""Loops of at most this extent are unrolled if a guard depends on them."""


class PassPrinter(ReductionPrinter):
    """Prints the loop nest of one pass."""

    def __init__(self, out: CppWriter, stage: Stage, pass_: Pass, given: Set[str]) -> None:
        super().__init__(out, stage, pass_, given)
        self.side = self._side(self.across) if self.across else 1

    def run(self) -> None:
        """Print the loop nest."""
        for buffer, span in self.spans.items():
            type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
            start, lines = f"{buffer}_start", f"{buffer}_lines"
            self.out.line(f"{type_}* const {start} = {buffer} + {self.out.expr(span.start)};")
            self.out.line(f"alignas(64) {type_} {lines}[{span.size + LINE_ELEMENTS}];")
            self.out.line(f"{type_}* const {buffer}_span = {lines} + korch::after_line({start});")
        outer = [a for a in self.kept if a is not self.vector and a is not self.across]
        self._where(outer, self.pass_.where, self._common())
        for buffer, span in self.spans.items():
            type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
            size = f"{span.row} * {loop_end(span.outer, span.outer.extent)}"
            self.out.line(f"korch::stream_span<{type_}, {self.out.lanes}>({buffer}_start, {buffer}_span, {size});")

    def _common(self) -> tuple[Inside, ...]:
        """Return the guards of loads, if there are many: one test that all hold replaces most single tests."""
        loads = [op for op in self.pass_.ops if isinstance(op, Load) and self._all_hold(op.guards, self.ranges) is None]
        found = tuple(dict.fromkeys(guard for op in loads for guard in op.guards))
        vectors = {self.pass_.vector, self.pass_.across}
        turns = any(guard.expr.variables & vectors for guard in found)
        return () if turns or self.pass_.is_reduction or len(loads) < MANY_GUARDED else found

    def _where(self, outer: Sequence[Axis], where: Sequence[Inside], common: Sequence[Inside]) -> None:
        """Print guards outside the loops that they do not depend on, then these loops."""
        inner = {axis.name for axis in outer} | {self.pass_.vector, self.pass_.across}
        ready = [guard for guard in where if not guard.expr.variables & inner]
        if ready:
            if self._all_hold(ready, self.ranges) is not False:
                condition = self._condition(ready, self.ranges) or "true"
                self._branch(f"if ({condition})", ready, outer, [g for g in where if g not in ready], common)
        elif common and not any(guard.expr.variables & inner for guard in common):
            if self._all_hold(common, self.ranges) is not None:  # decided where a loop is unrolled
                self._where(outer, where, ())
                return
            self._branch(f"if ({self._condition(common, self.ranges)})", common, outer, where, ())
            self._branch("else", (), outer, where, ())
        else:
            self._nest(outer, where, common)

    def _branch(
        self,
        head: str,
        known: Sequence[Inside],
        outer: Sequence[Axis],
        where: Sequence[Inside],
        common: Sequence[Inside],
    ) -> None:
        before = self.known
        self.known = before | {*known}
        self.out.open(head)
        self._where(outer, where, common)
        self.out.close()
        self.known = before

    def _nest(self, outer: Sequence[Axis], where: Sequence[Inside] = (), common: Sequence[Inside] = ()) -> None:
        """Print the kept loops, outermost first, then their body."""
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
                self._where(rest, where, common)
                self.out.close()
            self.ranges = before
            return
        if not rest and (self._is_split(axis) or self._is_reduced_in_rows(axis)):
            return
        self._loop(axis)
        self._where(rest, where, common)
        self.out.close()

    def _is_split(self, axis: Axis) -> bool:
        """Print an axis as two loops, one inside and one at the edges, if guards separate these; return whether."""
        parts = self._parts(axis) if self.clipped and axis.ragged is None else []
        if len(parts) < 2:
            return False
        name, before = axis.name, self.ranges
        low, high = max(parts, key=lambda part: part[1] - part[0])
        self.out.open(f"for (long {name} = {low}; {name} < {high}; ++{name})")
        self.ranges = {**before, name: (low, high - 1)}
        self._nest(())
        self.out.close()
        begin = "0" if low else str(high)
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
        self.out.line(f"const long limit = {loop_end(axis, axis.extent)};")
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

    def _stores(self, ranges: Ranges, variable: str) -> str:
        name = self._lambda("<int W>", f"[[maybe_unused]] long {variable or 'unused'}")
        self._compute_and_store(ranges, variable)
        self.out.close("};")
        return name

    def _square_stores(self, ranges: Ranges, variable: str) -> None:
        """Print the loads of the squares that begin at a point of the across axis, and the loop over their vectors."""
        across, live = self.pass_.across, self._live(ranges)
        for op in live:
            if not isinstance(op, Load) or self._all_hold(op.guards, ranges) is False:
                continue
            if is_across(op, variable, across, ranges):
                self._square(op, f"square{len(self.squares)}", ranges, variable)
        self.out.line(f"const long first = {across};")
        if len(live) <= UNROLLED_OPERATIONS:
            self.out.line("#pragma GCC unroll 16")
        self.out.open(f"for (int side = 0; side < {self.side}; ++side)")
        self.out.line(f"[[maybe_unused]] const long {across} = first + side;")
        self._compute_and_store(ranges, variable)
        self.out.close()
        self.squares = {}

    def _square(self, op: Load, name: str, ranges: Ranges, variable: str) -> None:
        index, type_ = substitute(op.index, {}, ranges), C_TYPE[op.dtype]
        step = index.coefficient(variable) or 0
        self.out.line(f"korch::Vec<{type_}, W> {name}[{self.side}] = {{}};")
        condition = self._condition(op.guards, ranges)
        self.out.line(
            (f"if ({condition}) " if condition else "") + f"korch::load_across<{type_}, W, {self.side}>"
            f"({name}, {op.buffer} + {self.out.expr(index)}, {step});"
        )
        self._fetch_squares(op.buffer, index, step)
        self.squares[op.name] = f"{name}[side]"

    def _fetch_squares(self, buffer: str, index: Expr, step: int) -> None:
        """Print prefetches of later squares; from memory, if results are written past the caches."""
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
            if place in self.spans:
                place, index = f"{place}_span", self.spans[place].index
            index = substitute(index, {}, ranges)
            self._store(sink.buffer, index, values[sink.value], variable, "W", store=store, place=place)

    def _fetch(self, function: str, places: Sequence[tuple[str, Expr, int]], ranges: Ranges) -> None:
        for buffer, index, step in places:
            at = self.out.expr(add(substitute(index, {}, ranges), constant(step)))
            self.out.line(f"korch::{function}<W>({buffer} + {at});")
