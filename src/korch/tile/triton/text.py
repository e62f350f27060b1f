"""Prints index expressions and tile operations as lines of Triton.

A kernel works on tiles of two axes: rows (axis 0) and columns (axis 1). Every loop variable of a
tile program is represented by a *coordinate*: a scalar, a column vector [rows, 1] or a row vector
[1, columns]. A value computed from coordinates has the union of their axes, by broadcasting.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from korch.primitive.types import DType
from korch.tile.ir.index import Atom, Choice, Expr, Quotient, Remainder, TableEntry, Times, Var, bounds
from korch.tile.ir.passes import is_nonpositive
from korch.tile.ir.program import Apply, Inside, Literal, Load, Select, Sink, TileOp

COMPUTE = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.F16: "tl.float32",
    DType.BF16: "tl.float32",
    DType.I64: "tl.int64",
    DType.I32: "tl.int32",
    DType.I16: "tl.int32",
    DType.I8: "tl.int32",
    DType.U64: "tl.uint64",
    DType.U32: "tl.uint32",
    DType.U16: "tl.int32",
    DType.U8: "tl.int32",
    DType.BOOL: "tl.int1",
}
"""The type in which elements are computed."""

STORED = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.I64: "tl.int64",
    DType.I32: "tl.int32",
    DType.I16: "tl.int16",
    DType.I8: "tl.int8",
    DType.U64: "tl.uint64",
    DType.U32: "tl.uint32",
    DType.U16: "tl.uint16",
    DType.U8: "tl.uint8",
    DType.BOOL: "tl.int8",
}
"""The type in which elements are stored in memory."""

_SAME = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "neg": "-{}",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "erf": "tl.erf({})",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
    "not": "({} == 0)",
    "and": "({} & {})",
    "or": "({} | {})",
    "xor": "({} ^ {})",
    "bitwise_and": "({} & {})",
    "bitwise_or": "({} | {})",
    "bitwise_xor": "({} ^ {})",
    "bitwise_not": "(~{})",
    "shift_left": "({} << {})",
    "shift_right": "({} >> {})",
    "equal": "({} == {})",
    "less": "({} < {})",
    "less_equal": "({} <= {})",
    "isnan": "({0} != {0})",
    "isinf": "(tl.abs({}) == float('inf'))",
    "where": "tl.where({}, {}, {})",
    "reciprocal": "(1.0 / {})",
    "tan": "(tl.sin({0}) / tl.cos({0}))",
    "sqrt": "f.square_root({})",
    "max": "f.larger({}, {})",
    "min": "f.smaller({}, {})",
    "sign": "f.sign({})",
    "tanh": "f.tanh({})",
    "sigmoid": "f.sigmoid({})",
    "round": "f.round_to_even({})",
    "round_tf32": "f.as_tf32({})",
    "pow": "f.power({}, {})",
}
"""Triton templates of primitives; `f` is `korch.cuda.functions`."""

_INTEGER = {"div": "f.truncated_quotient({}, {})", "mod": "f.floored_remainder({}, {})"}
_FLOAT = {"div": "({} / {})", "mod": "({} % {})"}
_WORD = re.compile(r"\w+")
_FLOAT_ONLY = frozenset(("pow", "sign", "round_tf32"))


REDUCE = {"sum": "f.added", "prod": "f.multiplied", "max": "f.larger", "min": "f.smaller"}
"""The functions that combine two elements of a reduction."""


def is_printable(op: str, dtype: DType) -> bool:
    """Return whether an elementwise primitive on elements of a type has a Triton form."""
    if op == "cast":
        return True
    return op in (_FLOAT if dtype.is_float else _INTEGER) or (op in _SAME and (dtype.is_float or op not in _FLOAT_ONLY))


def apply(op: str, dtype: DType, of: DType, arguments: Sequence[str]) -> str:
    """Return an elementwise primitive as an expression."""
    if op == "cast":
        return _cast(dtype, of, arguments[0])
    table = _FLOAT if of.is_float else _INTEGER
    return (table.get(op) or _SAME[op]).format(*arguments)


def _cast(dtype: DType, of: DType, argument: str) -> str:
    if dtype is DType.BOOL:
        return f"({argument} != 0)"
    if dtype is of:
        return argument
    if COMPUTE[dtype] == STORED[dtype]:
        return f"({argument}).to({COMPUTE[dtype]})"
    if dtype.is_float and not of.is_float:
        argument = f"({argument}).to(tl.float32)"
    return f"({argument}).to({STORED[dtype]}).to({COMPUTE[dtype]})"  # rounded or wrapped


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The Triton text of a loop variable, and the axes of a tile along which it varies."""

    text: str  # the text of the variable times `step`
    axes: frozenset[int] = frozenset()  # the axes of the tile along which it varies
    step: int = 1  # the increment of the printed loop per value of the variable

    def times(self, factor: int) -> str:
        """Return the text of the variable times a number; "" if the variable is always 0."""
        if self.text == "0":
            return ""
        if factor % self.step:
            return f"({self.text} // {self.step}) * {factor}"
        return self.text if factor == self.step else f"{self.text} * {factor // self.step}"


Coordinates = Mapping[str, Coordinate]

ROWS, COLUMNS = frozenset((0,)), frozenset((1,))


@dataclass
class _Loop:
    """A loop that is being written: the line of its head, its indentation, and the variables that vary in it."""

    header: int
    depth: int
    varying: set[str]


@dataclass
class Text:
    """The lines of one kernel while they are written."""

    lines: list[str] = field(default_factory=list)  # the lines written so far
    depth: int = 1  # the level of indentation
    # the constant tables that are read, with their names
    tables: dict[tuple[int, ...], str] = field(default_factory=dict)
    arguments: dict[str, None] = field(default_factory=dict)  # the buffers that are used, in order
    # the ranges of variables; guards do not test conditions that they imply
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    # by text of an expression, the variable that already holds it; None if expressions are not shared
    known: dict[str, str] | None = None
    loops: list[_Loop] = field(default_factory=list)  # the loops that are being written, outermost first
    count: int = 0

    def line(self, text: str) -> None:
        """Add a line."""
        self.lines.append("    " * self.depth + text)

    def fresh(self, stem: str = "v") -> str:
        """Return a name that no other variable has."""
        self.count += 1
        return f"{stem}{self.count}"

    def once(self, text: str, stem: str = "i") -> str:
        """Return the variable that holds an expression; a new one is written outside all loops it does not vary in."""
        if self.known is None:
            return text
        if text not in self.known:
            name = self.known[text] = self.fresh(stem)
            words = set(_WORD.findall(text))
            outer = next((n for n, loop in enumerate(self.loops) if not words & loop.varying), None)
            if outer is None:
                self.line(f"{name} = {text}")
            else:
                self.lines.insert(self.loops[outer].header, "    " * self.loops[outer].depth + f"{name} = {text}")
                for loop in self.loops[outer:]:
                    loop.header += 1
            for loop in self.loops[:outer]:
                loop.varying.add(name)
        return self.known[text]

    def begin_loop(self, variable: str, turns: int, step: int, stages: int = 0) -> Coordinate:
        """Write the head of a loop that counts in steps; return the coordinate of its variable.

        `stages`: the pipeline stages (Triton's `num_stages`); 0 if the loop has no product.
        """
        for loop in self.loops:
            loop.varying.add(variable)
        self.loops.append(_Loop(len(self.lines), self.depth, {variable}))
        ends = f"0, {turns * step}, {step}"
        pipelined = f"tl.range({ends}, num_stages={stages}):"
        self.line(f"for {variable} in " + (pipelined if stages else f"range({ends}):"))
        self.depth += 1
        return Coordinate(variable, frozenset(), step)

    def end_loop(self) -> None:
        """End the innermost loop; expressions that vary in it are no longer known."""
        varying = self.loops.pop().varying
        self.depth -= 1
        self.known = {text: name for text, name in (self.known or {}).items() if name not in varying}

    def pointer(self, buffer: str) -> str:
        """Return the name of a buffer's pointer, and record the buffer as an argument."""
        self.arguments[buffer] = None
        return f"p_{buffer}"

    def split(self, text: str, axes: Sequence[tuple[str, int]], at: frozenset[int]) -> dict[str, Coordinate]:
        """Write the coordinates of axes, given outermost first, into which a flat number is split; return them."""
        found = {name: Coordinate("0") for name, extent in axes if extent == 1}
        axes = [axis for axis in axes if axis[1] != 1]
        step = 1
        for number, (name, extent) in enumerate(reversed(axes)):
            part = text if step == 1 else f"({text} // {step})"
            if number < len(axes) - 1:
                part = f"({part} % {extent})"
            if len(axes) > 1:
                variable = self.fresh("i")
                self.line(f"{variable} = {part}")
                part = variable
            found[name] = Coordinate(part, at)
            step *= extent
        return found

    # Expressions

    def expr(self, expr: Expr, at: Coordinates) -> str:
        """Return the text of an index expression."""
        parts = []
        # Scalars first, so that they are added before they are broadcast to blocks.
        for atom, coefficient in sorted(expr.terms, key=lambda term: len(axes_of(Expr(0, (term,)), at))):
            found = at[atom.name] if isinstance(atom, Var) else Coordinate(self._atom(atom, at))
            parts += [text] if (text := found.times(coefficient)) else []
        if expr.constant or not parts:
            parts.append(str(expr.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def _atom(self, atom: Atom, at: Coordinates) -> str:
        match atom:
            case Var(name):
                return at[name].times(1)
            case Quotient(inner, divisor):
                return self.once(f"(({self.expr(inner, at)}) // {divisor})")
            case Remainder(inner, divisor):
                return self.once(f"(({self.expr(inner, at)}) % {divisor})")
            case TableEntry(table, inner):
                name = self.tables.setdefault(table, f"c{len(self.tables)}")
                place = self.expr(inner, at)
                inside = f"({place} >= 0) & ({place} < {len(table)})"
                return f"tl.load({self.pointer(name)} + ({place}), mask={inside}, other=0)"
            case Choice(inner, cases, otherwise):
                text = f"({self.expr(otherwise, at)})"
                of = self.expr(inner, at)
                for limit, then in reversed(cases):
                    text = f"tl.where(({of}) < {limit}, ({self.expr(then, at)}), {text})"
                return text
            case Times():
                raise AssertionError("a printed program has no parameters")
            case _:
                assert_never(atom)

    def guards(self, guards: Iterable[Inside], at: Coordinates) -> list[str]:
        """Return the conditions of guards that the ranges do not imply."""
        found = []
        for guard in guards:
            text = self.expr(guard.expr, at)
            low, high = -math.inf, math.inf
            if guard.expr.variables <= self.ranges.keys():
                low, high = bounds(guard.expr, self.ranges)
            found += [self.once(f"(({text}) >= {guard.low})", "m")] if low < guard.low else []
            found += [self.once(f"(({text}) < {guard.high})", "m")] if high >= guard.high else []
        return found

    # Operations

    def load(self, op: Load, at: Coordinates, masks: Mapping[int, str], name: str) -> None:
        """Write a load.

        `masks`: per axis of the tile, the condition under which an element is in range.
        """
        axes = axes_of(op.index, at)
        place = self.expr(op.index, at)
        guard_axes = frozenset().union(*(axes_of(g.expr, at) for g in op.guards))
        for axis in sorted(guard_axes - axes):
            other = next(c.text for c in at.values() if axis in c.axes)
            place = f"{place} + {other} * 0"
        conditions = [masks[axis] for axis in sorted(axes | guard_axes) if axis in masks]
        conditions += self.guards(op.guards, at)
        mask = f", mask={_all(conditions)}, other=0" if conditions else ""
        text = f"tl.load({self.pointer(op.buffer)} + ({place}){mask})"
        self.line(f"{name} = {converted(text, op.dtype)}")

    def store(self, to: Sink, dtype: DType, value: str, at: Coordinates, masks: Mapping[int, str], shape: str) -> None:
        """Write a store of a value that is broadcast to a tile's shape."""
        place = f"({self.expr(to.index, at)}) + tl.zeros({shape}, tl.int32)"
        mask = f", mask={_all(list(masks.values()))}" if masks else ""
        kept = f"tl.broadcast_to({value}, {shape}).to({STORED[dtype]})"
        self.line(f"tl.store({self.pointer(to.buffer)} + ({place}), {kept}{mask})")

    def ops(
        self,
        ops: Sequence[TileOp],
        at: Coordinates,
        masks: Mapping[int, str],
        values: dict[str, str],
        types: dict[str, DType],
        memo: dict[str, str] | None = None,
    ) -> None:
        """Write operations in order.

        `values`: the variable that holds each operation's result; new results are added. `memo`: by text of an
        expression, the variable that holds it; new ones are added.
        """
        for op in ops:
            name = self.fresh()
            before = len(self.lines)
            match op:
                case Load():
                    if op.buffer in values:  # a value that an earlier pass left in a variable
                        values[op.name], types[op.name] = values[op.buffer], op.dtype
                        continue
                    self.load(op, at, masks, name)
                case Literal(dtype=dtype, value=number):
                    self.line(f"{name} = tl.full([1, 1], {literal(number)}, {COMPUTE[dtype]})")
                case Apply(dtype=dtype, op=function, arguments=arguments):
                    texts = [values[a] for a in arguments]
                    if function == "exp" and dtype is DType.F32 and is_nonpositive(arguments[0], ops):
                        self.line(f"{name} = {_exp(arguments[0], texts[0], ops, values)}")
                    elif (slope := _argument_of_tanh(op, ops)) is not None:
                        self.line(f"{name} = f.one_plus_tanh({values[slope]})")
                    else:
                        self.line(f"{name} = {apply(function, dtype, types[arguments[0]], texts)}")
                case Select(inside=inside, guards=()):
                    values[op.name], types[op.name] = values[inside], op.dtype
                    continue
                case Select(inside=inside, outside=outside, guards=guards):
                    conditions = self.guards(guards, at)
                    if not conditions:
                        values[op.name], types[op.name] = values[inside], op.dtype
                        continue
                    self.line(f"{name} = tl.where({_all(conditions)}, {values[inside]}, {values[outside]})")
                case _:
                    assert_never(op)
            values[op.name], types[op.name] = name, op.dtype
            if memo is not None and len(self.lines) == before + 1:
                text = self.lines[-1].partition(" = ")[2]
                if text in memo:
                    self.lines.pop()
                    values[op.name] = memo[text]
                else:
                    memo[text] = name


def _exp(argument: str, text: str, ops: Sequence[TileOp], values: Mapping[str, str]) -> str:
    """Return the text of a power of e whose argument is the minimum of a number and at most 0.

    Only a softmax subtracts one tile from another, the maxima of its rows, so there the minimum with 0 changes nothing.
    """
    by_name = {op.name: op for op in ops}
    match by_name[argument]:
        case Apply(arguments=(x, least)):
            match by_name.get(x), by_name[least]:
                case Apply(op="sub", arguments=(a, b)), Literal(value=0) if a not in by_name and b not in by_name:
                    return f"f.exp_below({values[a]}, {values[b]})"
    return f"f.exp_of_nonpositive({text})"


def _argument_of_tanh(total: Apply, ops: Sequence[TileOp]) -> str | None:
    """Return the name of x if an operation computes 1 + tanh(x), as GELU does; else None."""
    if total.op != "add" or not total.dtype.is_float:
        return None
    of = [op for op in ops if op.name in total.arguments]
    match sorted(of, key=lambda op: isinstance(op, Literal)):
        case [Apply(op="tanh", arguments=(x,)), Literal(value=1)]:
            return x
    return None


def axes_of(expr: Expr, at: Coordinates) -> frozenset[int]:
    """Return the axes of a tile along which an expression varies."""
    return frozenset().union(*(at[name].axes for name in expr.variables))


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`; tile sides are powers of two."""
    return 1 << max(0, n - 1).bit_length()


def converted(text: str, dtype: DType) -> str:
    """Return the text of a loaded value converted to the type in which it is computed."""
    if dtype is DType.BOOL:
        return f"({text} != 0)"
    return text if COMPUTE[dtype] == STORED[dtype] else f"{text}.to({COMPUTE[dtype]})"


def literal(value: float | int | bool) -> str:
    """Return a number as Triton text."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _all(conditions: Sequence[str]) -> str:
    return " & ".join(c if c.isidentifier() else f"({c})" for c in conditions)
