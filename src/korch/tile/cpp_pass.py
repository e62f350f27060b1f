"""A pass of a tile program -> the text of its loop nest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from korch.primitive.types import DType
from korch.tile.cpp_text import C_TYPE, NARROW_TYPE, Writer, all_hold, holds, literal
from korch.tile.index import (
    Expr,
    Ranges,
    bounds,
    breakpoints,
    substitute,
    turning_point,
)
from korch.tile.loops import is_across, side_of, turns_on
from korch.tile.program import (
    Accumulate,
    Apply,
    Axis,
    Inside,
    Literal,
    Load,
    Pass,
    Select,
    Stage,
    TileOp,
    identity,
    ranges_of,
)

UNROLL = 4
"""Independent accumulators of a reduction."""

ALIASED_SIDE = 8
"""Rows written together if they share sets of the first cache: as many as it surely holds."""

UNROLLED_OPERATIONS = 12
"""Vectors of a square go through at most so many operations in unrolled code."""

UNROLLED_EXTENT = 4
"""Loops of at most this extent are unrolled if a guard depends on them."""

INFIX = {"add": "+", "sub": "-", "mul": "*"}


class PassPrinter:
    """The loop nest of one pass."""

    def __init__(self, out: Writer, stage: Stage, pass_: Pass) -> None:
        self.out = out
        self.pass_ = pass_
        self.ranges = dict(ranges_of(stage, pass_))
        self.kept = [a for a in pass_.axes if not a.is_reduced]
        self.reduced = [a for a in pass_.axes if a.is_reduced]
        self.vector = next((a for a in pass_.axes if a.name == pass_.vector), None)
        self.across = next((a for a in pass_.axes if a.name == pass_.across), None)
        self.side = self._side(self.across) if self.across else 1
        self.squares: dict[str, str] = {}

    def run(self) -> None:
        """Print it."""
        self._nest([a for a in self.kept if a is not self.vector and a is not self.across])

    def _nest(self, outer: Sequence[Axis]) -> None:
        """Print the kept loops, outermost first, then what is inside of them."""
        if not outer:
            self._inside()
            return
        axis, *rest = outer
        if (
            axis.extent <= UNROLLED_EXTENT
            and axis.ragged is None
            and turns_on(self.pass_, axis.name)
        ):
            before = self.ranges
            for value in range(axis.extent):  # guards are decided for each value
                self.out.open("")
                self.out.line(f"constexpr long {axis.name} = {value};")
                self.ranges = {**before, axis.name: (value, value)}
                self._nest(rest)
                self.out.close()
            self.ranges = before
            return
        self._loop(axis)
        self._nest(rest)
        self.out.close()

    def _inside(self) -> None:
        if self.across is not None:
            self._squares(self.across)
        elif not self.pass_.is_reduction:
            self._over(self.vector, self._stores)
        elif self.vector is None or self.vector.is_reduced:
            self._reduce_scalar()
        else:
            self._over(self.vector, self._reduce_lanes)

    def _side(self, across: Axis) -> int:
        side = side_of(across.extent, self.out.lanes)
        is_aliased = self.pass_.axes[-1] is not across
        return min(side, ALIASED_SIDE) if is_aliased else side

    def _squares(self, across: Axis) -> None:
        """Print the loops over both axes of squares, in the order of the pass."""

        def inside(ranges: Ranges, variable: str) -> str:
            name = self._lambda("<int W>", f"[[maybe_unused]] long {variable}")
            self._sides(across, lambda: self._square_stores(ranges, variable),
                        lambda: self._compute_and_store(ranges, variable))  # fmt: skip
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
            self._sides(across, lambda: self._over(self.vector, square),
                        lambda: self._over(self.vector, self._stores))  # fmt: skip

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

    def _over(self, axis: Axis | None, body: Callable[[Ranges, str], str]) -> None:
        """Run `body` (a printer of a lambda of the width) along an axis, part by part."""
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
            if width > 1:
                self.out.line(f"for (; i + {width} <= end; i += {width}) {call}<{width}>(i);")
            if axis.ragged is not None and width > 1:
                self.out.line(
                    f"if (i < end && end - {low} >= {width}) {{ {call}<{width}>(end - {width}); "
                    "i = end; }"
                )
            elif width > 1 and (high - low) % width:
                self.out.line(f"if (i < end) {{ {call}<{width}>(end - {width}); i = end; }}")
            if width == 1 or axis.ragged is not None:
                self.out.line(f"for (; i < end; ++i) {call}<1>(i);")
            self.out.close()

    def _parts(self, axis: Axis) -> list[tuple[int, int]]:
        """Cut an axis where a guard or a choice turns."""
        ends = {0, axis.extent}
        for op in self.pass_.ops:
            if isinstance(op, Load):
                ends |= breakpoints(op.index, axis.name, self.ranges)
            if isinstance(op, Load | Select):
                for guard in op.guards:
                    ends |= breakpoints(guard.expr, axis.name, self.ranges)
                    ends |= turning_point(guard.expr, guard.low, axis.name)
                    ends |= turning_point(guard.expr, guard.high, axis.name)
        inside = sorted(end for end in ends if 0 <= end <= axis.extent)
        return list(itertools.pairwise(inside))

    def _width(self, axis: Axis, low: int, high: int) -> int:
        """Return the widest vector for a part; 1 if a guard still turns inside of it."""
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        for op in self.pass_.ops:
            for guard in op.guards if isinstance(op, Load | Select) else ():
                if holds(guard, ranges) is None and axis.name in guard.expr.variables:
                    return 1
        width = min(self.out.lanes, 1 << ((high - low).bit_length() - 1))
        return width if width >= 4 else 1

    def _end(self, axis: Axis, high: int) -> str:
        if axis.ragged is None:
            return str(high)
        outer, total = axis.ragged
        return f"korch::smaller({high}, {total} - {axis.extent} * {outer})"

    def _loop(self, axis: Axis) -> None:
        name = axis.name
        self.out.open(f"for (long {name} = 0; {name} < {self._end(axis, axis.extent)}; ++{name})")

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
            if not isinstance(op, Load) or all_hold(op.guards, ranges) is False:
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
            (f"if ({condition}) " if condition else "")
            + f"korch::load_across<{type_}, W, {self.side}>"
            f"({name}, {op.buffer} + {self.out.expr(index)}, {index.coefficient(variable)});"
        )
        self.squares[op.name] = f"{name}[j]"

    def _compute_and_store(self, ranges: Ranges, variable: str) -> None:
        values = self._ops(ranges, variable, "W")
        for sink in self.pass_.sinks:
            index = substitute(sink.index, {}, ranges)
            self._store(sink.buffer, index, values[sink.value], variable, "W")

    def _store(self, buffer: str, index: Expr, value: str, variable: str, width: str) -> None:
        type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
        at = f"{buffer} + {self.out.expr(index)}"
        slope = index.coefficient(variable) if variable else 0
        if slope == 1 or not variable:
            self.out.line(f"korch::store<{type_}, {width}>({at}, {value});")
        elif slope is not None:
            self.out.line(f"korch::scatter<{type_}, {width}>({at}, {slope}, {value});")
        else:
            self.out.open(f"for (int lane = 0; lane < {width}; ++lane)")
            self.out.line(f"const long at = [&](long {variable}) {{ return "
                           f"{self.out.expr(index)}; }}({variable} + lane);")  # fmt: skip
            self.out.line(f"{buffer}[at] = korch::lane<{type_}, {width}>({value}, lane);")
            self.out.close()

    # Reductions

    def _reduce_lanes(self, ranges: Ranges, variable: str) -> str:
        """Accumulate whole vectors of kept elements; the reduced loops run inside."""
        name = self._lambda("<int W>", f"long {variable}")
        inner = self.reduced[-1] if self.reduced else None
        unroll = UNROLL if inner is not None and inner.extent >= UNROLL else 1
        self._declare("W", unroll)
        for axis in self.reduced[:-1]:
            self._loop(axis)
        parameter = inner.name if inner is not None else "unused"
        body = self._accumulator(ranges, parameter, variable, "")
        if inner is not None:
            self._unrolled(f"{body}({{at}}, {{acc}});", str(inner.extent), unroll, 1)
        else:
            self.out.line(f"{body}(0, {self._acc(0)});")
        for _ in self.reduced[:-1]:
            self.out.close()
        self._finish(unroll, ranges, variable, "W")
        self.out.close("};")
        return name

    def _reduce_scalar(self) -> None:
        """Accumulate vectors along a reduced axis; their lanes are combined at the end."""
        axis = self.vector
        parts = self._parts(axis) if axis is not None else []
        widths = [self._width(axis, low, high) for low, high in parts] if axis is not None else []
        width = max(widths, default=1)
        longest = max((high - low for low, high in parts), default=0)
        unroll = UNROLL if longest >= UNROLL * width > UNROLL else 1
        self._declare(str(width), unroll)
        if width > 1:
            self._declare("1", 1, "e")
        loops = [a for a in self.reduced if a is not axis]
        for loop in loops:
            self._loop(loop)
        if axis is None:
            body = self._accumulator(self.ranges, "unused", "", "<int W>")
            self.out.line(f"{body}.template operator()<1>(0, {self._acc(0)});")
        for low, high in parts:
            self._reduce_part(axis, low, high, width, unroll)
        for _ in loops:
            self.out.close()
        self._finish(unroll, self.ranges, "", str(width))

    def _reduce_part(self, axis: Axis | None, low: int, high: int, width: int, unroll: int) -> None:
        if axis is None:
            return
        self.out.open("")
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        body = self._accumulator(ranges, axis.name, axis.name, "<int W>")
        own = min(width, self._width(axis, low, high))
        tail = self._acc(0, "e") if width > 1 else self._acc(0)
        call = f"{body}.template operator()"
        self.out.line(f"long i = {low};")
        if own == width > 1:
            self._unrolled(f"{call}<{width}>({{at}}, {{acc}});", str(high), unroll, width, low)
        self.out.line(f"for (; i < {high}; ++i) {call}<1>(i, {tail});")
        self.out.close()

    def _unrolled(self, call: str, end: str, unroll: int, step: int, low: int | None = None
                  ) -> None:  # fmt: skip
        """Print the loop `i` over an axis with several independent accumulators."""
        if low is None:
            self.out.line("long i = 0;")
        if unroll > 1:
            self.out.open(f"for (; i + {unroll * step} <= {end}; i += {unroll * step})")
            for u in range(unroll):
                at = f"i + {u * step}" if u else "i"
                self.out.line(call.format(at=at, acc=self._acc(u)))
            self.out.close()
        self.out.line(
            f"for (; i + {step} <= {end}; i += {step}) " + call.format(at="i", acc=self._acc(0))
        )

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

    def _finish(self, unroll: int, ranges: Ranges, variable: str, width: str) -> None:
        """Combine the accumulators and write the results."""
        for k, sink in enumerate(self.pass_.sinks):
            if not isinstance(sink, Accumulate):
                continue
            type_ = C_TYPE[self.out.program.buffer(sink.buffer).dtype]
            total = f"a{k}_0"
            for u in range(1, unroll):
                total = f"korch::combine_{sink.op}<{type_}, {width}>({total}, a{k}_{u})"
            if variable:
                self._store(sink.buffer, sink.index, total, variable, width)
                continue
            if width != "1":
                total = f"korch::combine_{sink.op}<{type_}, 1>(" \
                        f"korch::across_{sink.op}<{type_}, {width}>({total}), e{k}_0)"  # fmt: skip
            self.out.line(f"{sink.buffer}[{self.out.expr(sink.index)}] = {total};")

    # Operations

    def _lambda(self, template: str, parameters: str) -> str:
        name = f"body{self.out.lambdas}"
        self.out.lambdas += 1
        self.out.open(
            f"const auto {name} = [&]{template}({parameters}) __attribute__((always_inline))"
        )
        return name

    def _ops(self, ranges: Ranges, variable: str, width: str) -> dict[str, str]:
        """Print the operations under narrowed ranges; return the text of each name."""
        values: dict[str, str] = {}
        for op in self._live(ranges):
            type_ = C_TYPE[op.dtype]
            text = self._op(op, values, ranges, variable, width)
            if text in values.values():
                values[op.name] = text
                continue
            self.out.line(f"const korch::Vec<{type_}, {width}> {op.name} = {text};")
            values[op.name] = op.name
        return values

    def _live(self, ranges: Ranges) -> Sequence[TileOp]:
        """Return the operations that the sinks need once guards are decided by the ranges."""
        needed = {sink.value for sink in self.pass_.sinks}
        found: list[TileOp] = []
        for op in reversed(self.pass_.ops):
            if op.name not in needed:
                continue
            found.append(op)
            match op:
                case Apply(arguments=arguments):
                    needed.update(arguments)
                case Select(guards=guards, inside=inside, outside=outside):
                    decided = all_hold(guards, ranges)
                    needed.update(() if decided is False else (inside,))
                    needed.update(() if decided is True else (outside,))
        return found[::-1]

    def _op(self, op: TileOp, values: dict[str, str], ranges: Ranges, variable: str, width: str
            ) -> str:  # fmt: skip
        type_ = C_TYPE[op.dtype]
        match op:
            case Literal(_, dtype, value):
                return f"korch::splat<{type_}, {width}>({literal(dtype, value)})"
            case Load():
                return self._load(op, ranges, variable, width)
            case Select(_, _, guards, inside, outside):
                decided = all_hold(guards, ranges)
                if decided is not None:
                    return values[inside if decided else outside]
                condition = self._condition(guards, ranges)
                return f"({condition}) ? {values[inside]} : {values[outside]}"
            case Apply(_, dtype, name, arguments):
                given = [values[a] for a in arguments]
                if name in INFIX and dtype is not DType.BOOL:
                    return f"{given[0]} {INFIX[name]} {given[1]}"
                source = next(o.dtype for o in self.pass_.ops if o.name == arguments[-1])
                if name == "cast" and dtype in NARROW_TYPE:
                    wide = f"korch::cast<float, {C_TYPE[source]}, {width}>({given[0]})"
                    return f"korch::rounded<{NARROW_TYPE[dtype]}, {width}>({wide})"
                if name == "cast":
                    return (
                        f"korch::cast<{type_}, {C_TYPE[source]}, {width}>({given[0]})"
                        if (dtype is not DType.BOOL)
                        else f"korch::to_bool<{C_TYPE[source]}, {width}>({given[0]})"
                    )
                return f"korch::op_{name}<{C_TYPE[source]}, {width}>({', '.join(given)})"

    def _load(self, op: Load, ranges: Ranges, variable: str, width: str) -> str:
        if op.name in self.squares:
            return self.squares[op.name]
        type_ = C_TYPE[op.dtype]
        zero = f"korch::splat<{type_}, {width}>(0)"
        decided = all_hold(op.guards, ranges)
        if decided is False:
            return zero
        index = substitute(op.index, {}, ranges)
        at = f"{op.buffer} + {self.out.expr(index)}"
        slope = index.coefficient(variable) if variable else 0
        if slope == 0:
            text = f"korch::splat<{type_}, {width}>(*({at}))"
        elif slope == 1:
            text = f"korch::load<{type_}, {width}>({at})"
        elif slope is not None:
            text = f"korch::strided<{type_}, {width}>({at}, {slope})"
        else:
            text = (
                f"korch::gather<{type_}, {width}>({op.buffer}, [&](long {variable}) "
                f"{{ return {self.out.expr(index)}; }}, {variable})"
            )
        if decided is True:
            return text
        return f"({self._condition(op.guards, ranges)}) ? {text} : {zero}"

    def _condition(self, guards: Sequence[Inside], ranges: Ranges) -> str:
        open_guards = [guard for guard in guards if holds(guard, ranges) is None]
        texts = []
        for guard in open_guards:
            at = self.out.expr(guard.expr)
            low, high = bounds(guard.expr, ranges)
            if low < guard.low:
                texts.append(f"{at} >= {guard.low}")
            if high >= guard.high:
                texts.append(f"{at} < {guard.high}")
        return " && ".join(texts)
