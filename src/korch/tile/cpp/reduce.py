"""Prints the accumulators and loops of the reductions of a pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from korch.primitive.ops.reduce import identity
from korch.tile.cpp.loops import LoopPrinter
from korch.tile.cpp.text import C_TYPE, literal, loop_end
from korch.tile.ir.index import Ranges
from korch.tile.ir.program import Accumulate, Axis
from korch.tile.lower.loops import LEAST_SIDE, SQUARE_TYPES

UNROLL = 4
"""The number of independent accumulators of a reduction."""

SHORT_REDUCTION = 64
"""The maximum points of a reduction that accumulates several vectors at once."""


class ReductionPrinter(LoopPrinter):
    """Prints reductions with several independent vector accumulators, which are combined at the end."""

    is_edge = False  # whether the loops being printed are at the edges, where guards clip windows

    def _abreast(self, axis: Axis) -> int:
        """Return how many vectors of kept elements a short reduction accumulates at once."""
        points = math.prod(a.extent for a in self.reduced)
        is_long = axis.extent >= UNROLL * self.out.lanes
        return UNROLL if is_long and points <= SHORT_REDUCTION else 1

    def _reduce_lanes(self, ranges: Ranges, variable: str) -> str:
        """Print a lambda that accumulates whole vectors of kept elements; the reduced loops are inside it."""
        abreast = self._abreast(self.vector) if self.vector is not None else 1
        name = self._lambda("<int W, int U = 1>", f"long {variable}")
        inner = self.reduced[-1] if self.reduced else None
        unroll = UNROLL if abreast == 1 and inner and inner.extent >= 2 * UNROLL else 1
        self._declare("W", max(unroll, abreast))
        outer = [axis.name for axis in self.reduced[:-1]]
        names = (*outer, inner.name if inner is not None else "unused", variable)
        body = self._accumulator(ranges, ", long ".join(names), variable, "")
        place = "place" if variable == "i" else variable  # the loops below declare their own i
        if place != variable:
            self.out.line(f"const long {place} = {variable};")
        start = f"{body}({', '.join((*outer, '{at}'))}, {place}"
        calls = [f"{start}, {{acc}});"] + [
            f"if constexpr (U > 1) {start} + {u} * W, {self._acc(u)});" for u in range(1, abreast)
        ]
        call = calls[0] if abreast == 1 else f"{{{{ {' '.join(calls)} }}}}"
        if inner is None:
            self.out.line(call.format(at=0, acc=self._acc(0)))
        else:
            self._window(ranges, lambda ends: self._reduced_loops(ends, call, unroll))
        self._finish(unroll, variable, "W")
        for u in range(1, abreast):
            self.out.open("if constexpr (U > 1)")
            self.out.line(f"const long first = {variable};")
            self.out.open("")
            self.out.line(f"const long {variable} = first + {u} * W;")
            self._finish(1, variable, "W", u)
            self.out.close()
            self.out.close()
        self.out.close("};")
        return name

    def _window(self, ranges: Ranges, loops: Callable[[Sequence[tuple[str, str]]], None]) -> None:
        """Print the loops over all reduced axes, with a version with constant bounds for where no guard clips them."""
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
        """Print the reduced loops around a call, the innermost one unrolled over several accumulators."""
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
        """Print the reductions of several elements of a kept axis at once; return whether they fit in registers.

        Each reduction leaves a vector. The lanes of all these vectors are combined together, which
        takes as many steps as for a single vector.
        """
        rows = next((n for n in (16, 8, 4) if n <= self.out.lanes and axis.extent % n == 0), 0)
        is_along = self.vector is not None and self.vector.is_reduced and self.pass_.is_reduction
        types = {self.out.program.buffer(sink.buffer).dtype for sink in self.pass_.sinks}
        width = self._reduced_width() if is_along else 1
        if not rows or width < LEAST_SIDE or types - {*SQUARE_TYPES}:
            return False
        name = axis.name
        end = str(axis.extent) if axis.ragged is None else f"rows_end / {rows} * {rows}"
        if axis.ragged is not None:
            self.out.line(f"const long rows_end = {loop_end(axis, axis.extent)};")
        self.out.open(f"for (long first = 0; first < {end}; first += {rows})")
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
        if axis.ragged is not None:
            self.out.open(f"for (long {name} = {end}; {name} < rows_end; ++{name})")
            self._reduce_scalar()
            self.out.close()
        return True

    def _reduced_width(self) -> int:
        """Return the widest vector along the reduced vector axis."""
        axis = self.vector
        parts = self._parts(axis) if axis is not None else []
        widths = [self._width(axis, low, high) for low, high in parts] if axis is not None else []
        return max(widths, default=1)

    def _reduce_scalar(self, part: str = "") -> None:
        """Print a reduction with vectors along a reduced axis, whose lanes are combined at the end.

        Args:
            part: if given, the offset in `part0` and so on at which the vectors are stored instead.
        """
        axis, width = self.vector, self._reduced_width()
        parts = self._parts(axis) if axis is not None else []
        longest = max((high - low for low, high in parts), default=0)
        has_rest = bool(self.clips) or any(
            axis is not None and (self._width(axis, *ends) < width or (ends[1] - ends[0]) % width) for ends in parts
        )
        has_rest |= axis is not None and axis.ragged is not None and _ends_inside(axis, width)
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
            self._finish(unroll, "", str(width), has_rest=has_rest)

    def _leave(self, unroll: int, width: str, part: str, has_rest: bool) -> None:
        """Combine the accumulators, but not their lanes, and store the resulting vectors into the parts."""
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
        if axis.ragged is not None:
            self.out.line(f"const long end = {end};")
            end = "end"
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
        """Return the text that combines the accumulators of a sink, from number `first` on."""
        type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
        total = f"a{k}_{first}"
        for u in range(1, unroll):
            total = f"korch::combine_{sink.op}<{type_}, {width}>({total}, a{k}_{u})"
        return total

    def _finish(self, unroll: int, variable: str, width: str, first: int = 0, has_rest: bool = True) -> None:
        """Combine the accumulators, from number `first` on, and store the results."""
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


def _ends_inside(axis: Axis, width: int) -> bool:
    """Return whether the last tile of an axis may end inside a vector."""
    total = axis.ragged[1] if axis.ragged is not None else 0
    return not isinstance(total, int) or total % width != 0
