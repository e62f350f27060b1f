"""Tile program -> C++.

One function per kernel; a parallel region around all stages, a worksharing loop per stage. A pass
is a loop nest around a generic lambda of the vector width, so that the same text serves whole
vectors and what is left. Where a pad or a concatenation turns inside of the vector axis, the loop
is split there, and each part reads straight from memory.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence

from korch.primitive.types import DType
from korch.tile.index import (
    Atom,
    Choice,
    Entry,
    Expr,
    Quotient,
    Ranges,
    Remainder,
    Var,
    bounds,
    breakpoints,
    substitute,
    turning_point,
)
from korch.tile.loops import turns_on
from korch.tile.program import (
    Accumulate,
    Apply,
    Axis,
    Inside,
    Level,
    Literal,
    Load,
    Pass,
    Select,
    Stage,
    TileOp,
    TileProgram,
    identity,
    ranges_of,
)

C_TYPE = {
    DType.F64: "double", DType.F32: "float", DType.I64: "int64_t", DType.I32: "int32_t",
    DType.I16: "int16_t", DType.I8: "int8_t", DType.U64: "uint64_t", DType.U32: "uint32_t",
    DType.U16: "uint16_t", DType.U8: "uint8_t", DType.BOOL: "uint8_t", DType.F16: "float",
    DType.BF16: "float",
}  # fmt: skip
"""The type that the printer computes in for each element type."""

NARROW_TYPE = {DType.F16: "korch::half", DType.BF16: "korch::bfloat16"}
"""Element types that inputs and outputs hold, but that nothing is computed in."""

SERIAL_POINTS = 6000
"""Programs with fewer points run in the calling thread: a parallel region would cost more."""

UNROLL = 4
"""Independent accumulators of a reduction."""

UNROLLED_EXTENT = 4
"""Loops of at most this extent are unrolled if a guard depends on them."""

INFIX = {"add": "+", "sub": "-", "mul": "*"}


def print_cpp(program: TileProgram, comment: str, lanes: int, threads: int) -> tuple[str, str, int]:
    """Return the symbol, the source and the workspace bytes of a program.

    Args:
        program: the program.
        comment: text that stands at the head of the source.
        lanes: float32 elements in a vector register.
        threads: how many run it; one needs no parallel region.
    """
    return _Printer(program, comment, lanes, threads).run()


class _Printer:
    def __init__(self, program: TileProgram, comment: str, lanes: int, threads: int) -> None:
        self.program = program
        self.comment = comment
        self.lanes = lanes
        self.is_parallel = threads > 1 and program.work >= SERIAL_POINTS
        self.lines: list[str] = []
        self.depth = 1
        self.tables: dict[tuple[int, ...], str] = {}
        self.lambdas = 0

    def run(self) -> tuple[str, str, int]:
        workspace_bytes = self._pointers()
        if self.is_parallel:
            self._open("#pragma omp parallel")
        for stage in self.program.stages:
            self._stage(stage)
        if self.is_parallel:
            self._close()
        head = "".join(f"// {line}\n" for line in self.comment.splitlines())
        tables = "".join(
            f"static const int32_t NAME_{name}[] = {{{', '.join(map(str, table))}}};\n"
            for table, name in self.tables.items()
        )
        body = "\n".join(self.lines)
        is_narrow = any(type_ in body for type_ in NARROW_TYPE.values())
        header = "korch_half.h" if is_narrow else "korch_tile.h"
        text = (
            f'{head}#include "{header}"\n\n{tables}'
            'extern "C" int NAME_run(void*, void* const* buffers) {\n'
            f"{body}\n  return 0;\n}}\n"
        )
        symbol = "k_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        return symbol, text.replace("NAME", symbol), workspace_bytes

    # Structure

    def _pointers(self) -> int:
        position = offset = 0
        memory = [b for b in self.program.buffers if b.level is not Level.TILE]
        ports = sum(b.level is not Level.WORKSPACE for b in memory)
        for buffer in memory:
            type_ = C_TYPE[buffer.dtype]
            if buffer.level is Level.WORKSPACE:
                place = f"static_cast<char*>(buffers[{ports}]) + {offset}"
                self._line(f"{type_}* const {buffer.name} = reinterpret_cast<{type_}*>({place});")
                size_bytes = 4 if buffer.dtype in NARROW_TYPE else buffer.dtype.size_bytes
                offset += -(-buffer.size * size_bytes // 64) * 64
                continue
            type_ = NARROW_TYPE.get(buffer.dtype, type_)
            const = "const " if buffer.level is Level.INPUT else ""
            self._line(
                f"{const}{type_}* const __restrict {buffer.name} = "
                f"static_cast<{const}{type_}*>(buffers[{position}]);"
            )
            position += 1
        return offset

    def _stage(self, stage: Stage) -> None:
        if self.is_parallel:
            self._line("#pragma omp for schedule(static)")
        self._open(f"for (long task = 0; task < {stage.tasks}; ++task)")
        rest, left = "task", stage.tasks
        for axis in stage.grid:
            left //= axis.extent
            value = rest if left == 1 else f"{rest} / {left}"
            self._line(f"[[maybe_unused]] const long {axis.name} = {value};")
            rest = f"task % {left}" if left > 1 else "0"
        used = {s.buffer for pass_ in stage.passes for s in pass_.sinks}
        for buffer in self.program.buffers:
            if buffer.level is Level.TILE and buffer.name in used:
                type_ = C_TYPE[buffer.dtype]
                self._line(f"alignas(64) {type_} {buffer.name}[{max(buffer.size, 1)}];")
        for pass_ in stage.passes:
            self._open("")
            _PassPrinter(self, stage, pass_).run()
            self._close()
        self._close()

    def _line(self, text: str) -> None:
        self.lines.append(text if text.startswith("#") else "  " * self.depth + text)

    def _open(self, text: str) -> None:
        if text.startswith("#"):
            self._line(text)
            text = ""
        self._line(f"{text} {{".strip())
        self.depth += 1

    def _close(self, end: str = "}") -> None:
        self.depth -= 1
        self._line(end)

    # Expressions

    def expr(self, expr: Expr) -> str:
        parts = []
        for atom, coefficient in expr.terms:
            text = self._atom(atom)
            parts.append(text if coefficient == 1 else f"{coefficient} * {text}")
        if expr.constant or not parts:
            parts.append(str(expr.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var(name):
                return name
            case Quotient(inner, divisor):
                return f"(({self.expr(inner)}) / {divisor})"
            case Remainder(inner, divisor):
                return f"(({self.expr(inner)}) % {divisor})"
            case Entry(table, inner):
                name = self.tables.setdefault(table, f"table{len(self.tables)}")
                return f"NAME_{name}[{self.expr(inner)}]"
            case Choice(inner, pieces, otherwise):
                at = self.expr(inner)
                text = "".join(f"({at}) < {n} ? ({self.expr(piece)}) : " for n, piece in pieces)
                return f"({text}({self.expr(otherwise)}))"


class _PassPrinter:
    """The loop nest of one pass."""

    def __init__(self, out: _Printer, stage: Stage, pass_: Pass) -> None:
        self.out = out
        self.pass_ = pass_
        self.ranges = dict(ranges_of(stage, pass_))
        self.kept = [a for a in pass_.axes if not a.is_reduced]
        self.reduced = [a for a in pass_.axes if a.is_reduced]
        self.vector = next((a for a in pass_.axes if a.name == pass_.vector), None)

    def run(self) -> None:
        self._nest([a for a in self.kept if a is not self.vector])

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
                self.out._open("")
                self.out._line(f"constexpr long {axis.name} = {value};")
                self.ranges = {**before, axis.name: (value, value)}
                self._nest(rest)
                self.out._close()
            self.ranges = before
            return
        self._loop(axis)
        self._nest(rest)
        self.out._close()

    def _inside(self) -> None:
        if not self.pass_.is_reduction:
            self._over(self.vector, self._stores)
        elif self.vector is None or self.vector.is_reduced:
            self._reduce_scalar()
        else:
            self._over(self.vector, self._reduce_lanes)

    # Loops along the vector axis

    def _over(self, axis: Axis | None, body: Callable[[Ranges, str], str]) -> None:
        """Run `body` (a printer of a lambda of the width) along an axis, part by part."""
        if axis is None:
            name = body(self.ranges, "")
            self.out._line(f"{name}.template operator()<1>(0);")
            return
        for low, high in self._parts(axis):
            self.out._open("")
            name = body({**self.ranges, axis.name: (low, high - 1)}, axis.name)
            width = self._width(axis, low, high)
            call = f"{name}.template operator()"
            self.out._line(f"const long end = {self._end(axis, high)};")
            self.out._line(f"long i = {low};")
            if width > 1:
                self.out._line(f"for (; i + {width} <= end; i += {width}) {call}<{width}>(i);")
            if axis.ragged is not None and width > 1:
                self.out._line(
                    f"if (i < end && end - {low} >= {width}) {{ {call}<{width}>(end - {width}); "
                    "i = end; }"
                )
            elif width > 1 and (high - low) % width:
                self.out._line(f"if (i < end) {{ {call}<{width}>(end - {width}); i = end; }}")
            if width == 1 or axis.ragged is not None:
                self.out._line(f"for (; i < end; ++i) {call}<1>(i);")
            self.out._close()

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
                if _holds(guard, ranges) is None and axis.name in guard.expr.variables:
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
        self.out._open(f"for (long {name} = 0; {name} < {self._end(axis, axis.extent)}; ++{name})")

    # Stores

    def _stores(self, ranges: Ranges, variable: str) -> str:
        name = self._lambda("<int W>", f"[[maybe_unused]] long {variable or 'unused'}")
        values = self._ops(ranges, variable, "W")
        for sink in self.pass_.sinks:
            index = substitute(sink.index, {}, ranges)
            self._store(sink.buffer, index, values[sink.value], variable, "W")
        self.out._close("};")
        return name

    def _store(self, buffer: str, index: Expr, value: str, variable: str, width: str) -> None:
        type_ = C_TYPE[self.out.program.buffer(buffer).dtype]
        at = f"{buffer} + {self.out.expr(index)}"
        slope = index.coefficient(variable) if variable else 0
        if slope == 1 or not variable:
            self.out._line(f"korch::store<{type_}, {width}>({at}, {value});")
        elif slope is not None:
            self.out._line(f"korch::scatter<{type_}, {width}>({at}, {slope}, {value});")
        else:
            self.out._open(f"for (int lane = 0; lane < {width}; ++lane)")
            self.out._line(f"const long at = [&](long {variable}) {{ return "
                           f"{self.out.expr(index)}; }}({variable} + lane);")  # fmt: skip
            self.out._line(f"{buffer}[at] = korch::lane<{type_}, {width}>({value}, lane);")
            self.out._close()

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
            self.out._line(f"{body}(0, {self._acc(0)});")
        for _ in self.reduced[:-1]:
            self.out._close()
        self._finish(unroll, ranges, variable, "W")
        self.out._close("};")
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
            self.out._line(f"{body}.template operator()<1>(0, {self._acc(0)});")
        for low, high in parts:
            self._reduce_part(axis, low, high, width, unroll)
        for _ in loops:
            self.out._close()
        self._finish(unroll, self.ranges, "", str(width))

    def _reduce_part(self, axis: Axis | None, low: int, high: int, width: int, unroll: int) -> None:
        if axis is None:
            return
        self.out._open("")
        ranges = {**self.ranges, axis.name: (low, high - 1)}
        body = self._accumulator(ranges, axis.name, axis.name, "<int W>")
        own = min(width, self._width(axis, low, high))
        tail = self._acc(0, "e") if width > 1 else self._acc(0)
        call = f"{body}.template operator()"
        self.out._line(f"long i = {low};")
        if own == width > 1:
            self._unrolled(f"{call}<{width}>({{at}}, {{acc}});", str(high), unroll, width, low)
        self.out._line(f"for (; i < {high}; ++i) {call}<1>(i, {tail});")
        self.out._close()

    def _unrolled(self, call: str, end: str, unroll: int, step: int, low: int | None = None
                  ) -> None:  # fmt: skip
        """Print the loop `i` over an axis with several independent accumulators."""
        if low is None:
            self.out._line("long i = 0;")
        if unroll > 1:
            self.out._open(f"for (; i + {unroll * step} <= {end}; i += {unroll * step})")
            for u in range(unroll):
                at = f"i + {u * step}" if u else "i"
                self.out._line(call.format(at=at, acc=self._acc(u)))
            self.out._close()
        self.out._line(
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
                self.out._line(f"s{k} = {combine}(s{k}, {values[sink.value]});")
        self.out._close("};")
        return name

    def _declare(self, width: str, unroll: int, prefix: str = "a") -> None:
        for k, sink in enumerate(self.pass_.sinks):
            if not isinstance(sink, Accumulate):
                continue
            dtype = self.out.program.buffer(sink.buffer).dtype
            start = _literal(dtype, identity(sink.op, dtype))
            value = f"korch::splat<{C_TYPE[dtype]}, {width}>({start})"
            for u in range(unroll):
                self.out._line(f"korch::Vec<{C_TYPE[dtype]}, {width}> {prefix}{k}_{u} = {value};")

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
            self.out._line(f"{sink.buffer}[{self.out.expr(sink.index)}] = {total};")

    # Operations

    def _lambda(self, template: str, parameters: str) -> str:
        name = f"body{self.out.lambdas}"
        self.out.lambdas += 1
        self.out._open(
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
            self.out._line(f"const korch::Vec<{type_}, {width}> {op.name} = {text};")
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
                    holds = _all_hold(guards, ranges)
                    needed.update(() if holds is False else (inside,))
                    needed.update(() if holds is True else (outside,))
        return found[::-1]

    def _op(self, op: TileOp, values: dict[str, str], ranges: Ranges, variable: str, width: str
            ) -> str:  # fmt: skip
        type_ = C_TYPE[op.dtype]
        match op:
            case Literal(_, dtype, value):
                return f"korch::splat<{type_}, {width}>({_literal(dtype, value)})"
            case Load():
                return self._load(op, ranges, variable, width)
            case Select(_, _, guards, inside, outside):
                holds = _all_hold(guards, ranges)
                if holds is not None:
                    return values[inside if holds else outside]
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
        type_ = C_TYPE[op.dtype]
        zero = f"korch::splat<{type_}, {width}>(0)"
        holds = _all_hold(op.guards, ranges)
        if holds is False:
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
        if holds is True:
            return text
        return f"({self._condition(op.guards, ranges)}) ? {text} : {zero}"

    def _condition(self, guards: Sequence[Inside], ranges: Ranges) -> str:
        open_guards = [guard for guard in guards if _holds(guard, ranges) is None]
        texts = []
        for guard in open_guards:
            at = self.out.expr(guard.expr)
            low, high = bounds(guard.expr, ranges)
            if low < guard.low:
                texts.append(f"{at} >= {guard.low}")
            if high >= guard.high:
                texts.append(f"{at} < {guard.high}")
        return " && ".join(texts)


def _holds(guard: Inside, ranges: Ranges) -> bool | None:
    """Return whether a guard holds for all points (True), none (False) or some (None)."""
    low, high = bounds(guard.expr, ranges)
    if guard.low <= low and high < guard.high:
        return True
    return False if high < guard.low or low >= guard.high else None


def _all_hold(guards: Sequence[Inside], ranges: Ranges) -> bool | None:
    found = [_holds(guard, ranges) for guard in guards]
    if False in found:
        return False
    return None if None in found else True


def _literal(dtype: DType, value: float | int | bool) -> str:
    if dtype is DType.BOOL:
        return "1" if value else "0"
    if not dtype.is_float:
        if value == -(1 << 63):
            return "INT64_MIN"
        return f"{int(value)}" + ("LL" if abs(value) >= 1 << 31 else "") * (value < 1 << 63) + (
            "ULL" if value >= 1 << 63 else "")  # fmt: skip
    number = float(value)
    if math.isnan(number):
        text = '__builtin_nanf("")'
    elif math.isinf(number):
        text = "__builtin_inff()" if number > 0 else "-__builtin_inff()"
    else:
        return f"{number!r}" if dtype is DType.F64 else f"{number!r}f"
    return text.replace("nanf", "nan").replace("inff", "inf") if dtype is DType.F64 else text
