"""Prints the operations of a pass at one point, or at a vector of points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from typing import assert_never

from korch.primitive.types import DType
from korch.tile.analysis.clip import clipping_guards
from korch.tile.analysis.fetch import fetches_of
from korch.tile.analysis.tables import BITS as TABLE_BITS
from korch.tile.analysis.tables import live_ops, tables_of
from korch.tile.cpp.text import C_TYPE, NARROW_TYPE, CppWriter, literal
from korch.tile.ir.index import Expr, Ranges, add, bounds, constant, scale, substitute
from korch.tile.ir.passes import is_nonpositive
from korch.tile.ir.program import Apply, Inside, Literal, Load, Pass, Select, Stage, TileOp, holds, ranges_of
from korch.tile.lower.loops import SQUARE_TYPES

LONGEST_TABLE = 4096
"""The maximum number of entries of a table of indices along a vector axis."""

INFIX = {"add": "+", "sub": "-", "mul": "*"}

TESTS = {"isnan": "{0} != {0}", "equal": "{0} == {1}", "less": "{0} < {1}", "less_equal": "{0} <= {1}"}
"""Comparisons that can select lanes of vectors directly; a stored truth value would be a byte per lane."""


def applied(op: Apply, source: DType, arguments: Sequence[str], width: str) -> str:
    """Return an elementwise operation of vectors as an expression.

    Args:
        op: the operation.
        source: the element type of its last argument.
        arguments: the texts of its arguments.
        width: the text of the number of lanes.
    """
    type_, from_type = C_TYPE[op.dtype], C_TYPE[source]
    if op.op in INFIX and op.dtype is not DType.BOOL:
        return f"{arguments[0]} {INFIX[op.op]} {arguments[1]}"
    if op.op != "cast":
        return f"korch::op_{op.op}<{from_type}, {width}>({', '.join(arguments)})"
    if op.dtype in NARROW_TYPE:
        wide = f"korch::cast<float, {from_type}, {width}>({arguments[0]})"
        return f"korch::rounded<{NARROW_TYPE[op.dtype]}, {width}>({wide})"
    if op.dtype is DType.BOOL:
        return f"korch::to_bool<{from_type}, {width}>({arguments[0]})"
    return f"korch::cast<{type_}, {from_type}, {width}>({arguments[0]})"


class OpPrinter:
    """Prints the operations inside the loops of one pass."""

    def __init__(self, out: CppWriter, stage: Stage, pass_: Pass, given: Set[str]) -> None:
        """Begin with nothing printed; `given` names the buffers that the kernel only reads."""
        self.out = out
        self.pass_ = pass_
        self.given = given
        self.ranges = {**out.program.parameter_ranges, **ranges_of(stage, pass_)}
        self.vector = next((a for a in pass_.axes if a.name == pass_.vector), None)
        self.squares: dict[str, str] = {}
        self.fetches = fetches_of(out.program, stage, pass_, out.streamed, out.large)
        self.clips = clipping_guards(pass_)
        self.clipped = frozenset(guard for guards in self.clips.values() for guard in guards)
        self.known: frozenset[Inside] = frozenset()
        self.tables = tables_of(pass_.ops) if out.lanes == 1 << TABLE_BITS else {}

    def _lambda(self, template: str, parameters: str) -> str:
        name = f"body{self.out.lambdas}"
        self.out.lambdas += 1
        self.out.open(f"const auto {name} = [&]{template}({parameters}) __attribute__((always_inline))")
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
        """Return the operations that the sinks need, given the guards that the ranges decide."""
        return live_ops(self.pass_, self.tables, lambda guards: self._all_hold(guards, ranges))

    def _op(self, op: TileOp, values: dict[str, str], ranges: Ranges, variable: str, width: str) -> str:
        type_, table = C_TYPE[op.dtype], self.tables.get(op.name)
        if table is not None:
            entries = ", ".join(map(str, table.bits))
            return f"korch::looked_up<{width}, {table.shift}, {entries}>({values[table.byte]})"
        match op:
            case Literal(_, dtype, value):
                return f"korch::splat<{type_}, {width}>({literal(dtype, value)})"
            case Load():
                return self._load(op, ranges, variable, width)
            case Select(_, _, guards, inside, outside):
                decided = self._all_hold(guards, ranges)
                if decided is not None:
                    return values[inside if decided else outside]
                condition = self._condition(guards, ranges)
                return f"({condition}) ? {values[inside]} : {values[outside]}"
            case Apply(_, dtype, name, arguments):
                given = [values[a] for a in arguments]
                source = self._named(arguments[-1]).dtype
                bits = self._power(arguments[-1]) if name == "div" else None
                if bits is not None:
                    return f"korch::div_by_power<{type_}, {width}, {bits}>({given[0]})"
                if name == "div" and variable and width == "W" and self._is_uniform(arguments[1], ranges, variable):
                    divisor = f"korch::lane<{type_}, {width}>({given[1]}, 0)"
                    # Values computed by the kernel are rounded already: an error in the last bit is acceptable.
                    is_exact = any(self._is_given(argument) for argument in arguments)
                    function = "div_by" if is_exact else "div_nearly_by"
                    return f"korch::{function}<{type_}, {width}>({given[0]}, {divisor})"
                if name == "exp" and source is DType.F32 and is_nonpositive(arguments[0], self.pass_.ops):
                    return f"korch::exp_of_nonpositive<{width}>({given[0]})"
                test = self._test(arguments[0], values, type_) if name == "where" else None
                if test is not None:
                    return f"({test}) ? {given[1]} : {given[2]}"
                return applied(op, source, given, width)
            case _:
                assert_never(op)

    def _named(self, name: str) -> TileOp:
        return next(op for op in self.pass_.ops if op.name == name)

    def _test(self, name: str, values: dict[str, str], type_: str) -> str | None:
        """Return the text of a truth value as a comparison; None if it is not a comparison of numbers of `type_`."""
        op = self._named(name)
        if not isinstance(op, Apply) or op.op not in TESTS or C_TYPE[self._named(op.arguments[0]).dtype] != type_:
            return None
        return TESTS[op.op].format(*(values[argument] for argument in op.arguments))

    def _power(self, name: str) -> int | None:
        """Return the base-2 logarithm of an integer literal that is a power of two; None for anything else."""
        op = self._named(name)
        if not isinstance(op, Literal) or op.dtype.is_float or op.dtype is DType.BOOL or op.value < 1:
            return None
        return int(op.value).bit_length() - 1 if int(op.value) & (int(op.value) - 1) == 0 else None

    def _is_uniform(self, name: str, ranges: Ranges, variable: str) -> bool:
        """Return whether all lanes along a variable hold the same number."""
        op = next(op for op in self.pass_.ops if op.name == name)
        match op:
            case Literal():
                return True
            case Load():
                return substitute(op.index, {}, ranges).coefficient(variable) == 0
            case Apply(arguments=arguments):
                return all(self._is_uniform(a, ranges, variable) for a in arguments)
            case Select(guards=guards, inside=inside, outside=outside):
                turns = any(variable in guard.expr.variables for guard in guards)
                return not turns and all(self._is_uniform(a, ranges, variable) for a in (inside, outside))
            case _:
                assert_never(op)

    def _is_given(self, name: str) -> bool:
        """Return whether a value is computed only from loads of the kernel's inputs and literals."""
        op = next(op for op in self.pass_.ops if op.name == name)
        match op:
            case Literal():
                return True
            case Load(buffer=buffer):
                return buffer in self.given
            case Apply(arguments=arguments):
                return all(self._is_given(a) for a in arguments)
            case Select(inside=inside, outside=outside):
                return self._is_given(inside) and self._is_given(outside)
            case _:
                assert_never(op)

    def _step(self, index: Expr, variable: str) -> int | None:
        """Return the step between adjacent elements of a vector; None if it varies."""
        return index.coefficient(variable) if variable else 0

    def _load(self, op: Load, ranges: Ranges, variable: str, width: str) -> str:
        if op.name in self.squares:
            return self.squares[op.name]
        type_ = C_TYPE[op.dtype]
        zero = f"korch::splat<{type_}, {width}>(0)"
        decided = self._all_hold(op.guards, ranges)
        if decided is False:
            return zero
        index = substitute(op.index, {}, ranges)
        at = f"{op.buffer} + {self.out.expr(index)}"
        slope = self._step(index, variable)
        if slope == 0:
            text = f"korch::splat<{type_}, {width}>(*({at}))"
        elif slope == 1 and op.name in self.fetches.near:
            text = f"korch::load_ahead<{type_}, {width}>({at}, {self.fetches.near[op.name]})"
        elif slope == 1 and op.name in self.fetches.far:
            text = f"korch::load_far<{type_}, {width}>({at}, {self.fetches.far[op.name]})"
        elif slope == 1:
            text = f"korch::load<{type_}, {width}>({at})"
        elif slope is not None:
            text = f"korch::strided<{type_}, {width}>({at}, {slope})"
        else:
            text = self._spread(op, index, variable, width) or (
                f"korch::gather<{type_}, {width}>({op.buffer}, [&](long {variable}) "
                f"{{ return {self.out.expr(index)}; }}, {variable})"
            )
        if decided is True:
            return text
        return f"({self._condition(op.guards, ranges)}) ? {text} : {zero}"

    def _holds(self, guard: Inside, ranges: Ranges) -> bool | None:
        """Return whether a guard holds for all points of the loops (True), for none (False), or may vary (None)."""
        return True if guard in self.clipped or guard in self.known else holds(guard, ranges)

    def _all_hold(self, guards: Sequence[Inside], ranges: Ranges) -> bool | None:
        """Return True if all guards hold for all points, False if one of them holds for no point, and else None."""
        found = [self._holds(guard, ranges) for guard in guards]
        if False in found:
            return False
        return None if None in found else True

    def _spread(self, op: Load, index: Expr, variable: str, width: str) -> str:
        """Return the text of a load through a table of indices that grow by 0 or 1; "" if it is not such a load."""
        axis, size = self.vector, self.out.program.buffer(op.buffer).size
        own = Expr(0, tuple(t for t in index.terms if variable in Expr(0, (t,)).variables))
        rest = add(index, scale(own, -1))
        is_long = axis is not None and axis.extent > LONGEST_TABLE
        is_alone = axis is not None and axis.name == variable and own.variables == {variable}
        if not is_alone or is_long or op.dtype not in SQUARE_TYPES or size < self.out.lanes:
            return ""
        points = (constant(i) for i in range(axis.extent if axis is not None else 0))
        table = tuple(substitute(own, {variable: i}, self.ranges).constant for i in points)
        if any(b - a not in (0, 1) for a, b in itertools.pairwise(table)):
            return ""
        name = self.out.tables.setdefault(table, f"table{len(self.out.tables)}")
        return (
            f"korch::spread<{C_TYPE[op.dtype]}, {width}>({op.buffer}, {size}, "
            f"{self.out.expr(rest)}, NAME_{name} + {variable})"
        )

    def _condition(self, guards: Sequence[Inside], ranges: Ranges) -> str:
        open_guards = [guard for guard in guards if self._holds(guard, ranges) is None]
        return condition_of(self.out, open_guards, ranges)


def condition_of(out: CppWriter, guards: Sequence[Inside], ranges: Ranges) -> str:
    """Return the condition that guards hold, without the parts that ranges imply; "" if nothing remains."""
    texts = []
    for guard in guards:
        at = out.expr(guard.expr)
        low, high = bounds(guard.expr, ranges)
        if low < guard.low:
            texts.append(f"{at} >= {guard.low}")
        if high >= guard.high:
            texts.append(f"{at} < {guard.high}")
    return " && ".join(texts)
