"""Parses the text form of tile programs: the inverse of `korch.tile.ir.text`."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from korch.errors import InvalidGraphError
from korch.primitive.types import DType
from korch.tile.ir.index import Atom, Choice, Expr, Quotient, Remainder, TableEntry, Times, Var
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Layout,
    Level,
    Literal,
    Load,
    Loop,
    Panels,
    Parameter,
    Pass,
    Product,
    Registers,
    Select,
    Sink,
    Size,
    Split,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
)
from korch.tile.ir.sort import Ordering, Sort, Top

_TOKEN = re.compile(r"\s*(\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d+|\w+|<=|\.\.|\+=|\S)")
_ACCUMULATE = ("sum", "prod", "max", "min")

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


def parse_program(text: str) -> TileProgram:
    """Return the program that prints as `text`.

    Raises:
        InvalidGraphError: a line can't be read; the text has its number.
    """
    return _Lines(text).program()


class _Tokens:
    """The tokens of one line, with methods that read names, integers and index expressions."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text = number, text.strip()
        self.depth = (len(text) - len(text.lstrip())) // 2
        self.tokens: list[str] = _TOKEN.findall(text)
        self.at = 0

    def error(self, expected: str) -> InvalidGraphError:
        found = repr(self.peek()) if self.peek() else "its end"
        what = f"can't read {self.text!r} at {found}"
        return InvalidGraphError(what, where=f"tile program, line {self.number}", expected=expected)

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def end(self) -> None:
        if self.peek():
            raise self.error("the end of the line")

    def take(self, *tokens: str) -> bool:
        """Consume some tokens if they come next; return whether they did."""
        is_next = self.tokens[self.at : self.at + len(tokens)] == list(tokens)
        self.at += len(tokens) * is_next
        return is_next

    def need(self, *tokens: str) -> None:
        for token in tokens:
            if not self.take(token):
                raise self.error(repr(token))

    def name(self) -> str:
        if not re.fullmatch(r"[^\W\d]\w*", self.peek()):
            raise self.error("a name")
        self.at += 1
        return self.tokens[self.at - 1]

    def integer(self) -> int:
        sign = -1 if self.take("-") else 1
        if not self.peek().isdigit():
            raise self.error("an integer")
        self.at += 1
        return sign * int(self.tokens[self.at - 1])

    def listed(self, read: Callable[[], T], end: str) -> tuple[T, ...]:
        """Return comma-separated items up to a closing token."""
        items: list[T] = []
        while not self.take(end):
            if items:
                self.need(",")
            items.append(read())
        return tuple(items)

    def expr(self) -> Expr:
        constant, terms = 0, list[tuple[Atom, int]]()
        sign = -1 if self.take("-") else 1
        while True:
            factor = sign * (self.integer() if (is_number := self.peek().isdigit()) else 1)
            if is_number and not self.take("*"):
                constant += factor
            else:
                terms.append((self._atom(), factor))
            if not self.peek() or self.peek() not in "+-":
                return Expr(constant, tuple(terms))
            sign = -1 if self.peek() == "-" else 1
            self.at += 1

    def _atom(self) -> Atom:
        atom = self._factor()
        if not self.take("*", "("):
            return atom
        inner = self.expr()
        self.need(")")
        return Times(atom, inner)

    def _factor(self) -> Atom:
        if self.take("table", "["):
            table = self.listed(self.integer, "]")
            self.need("[")
            expr = self.expr()
            self.need("]")
            return TableEntry(table, expr)
        if not self.take("("):
            return Var(self.name())
        expr = self.expr()
        if self.peek() == "<":
            return self._choice(expr)
        self.need(")")
        kind = Quotient if self.take("/") else Remainder
        self.need(*(() if kind is Quotient else ("%",)))
        if not self.peek().strip("0"):
            raise self.error("a divisor greater than 0")
        return kind(expr, self.integer())

    def _choice(self, expr: Expr) -> Choice:
        """Read the cases, each preceded by the expression that its limit is compared with, then the last one."""
        cases: list[tuple[int, Expr]] = []
        following = expr
        while following == expr and self.take("<"):
            limit = self.integer()
            self.need("?")
            cases.append((limit, self.expr()))
            self.need(":")
            following = self.expr()
        self.need(")")
        return Choice(expr, tuple(cases), following)


class _Line(_Tokens):
    """One line, with methods that read each kind of item of a program."""

    def one_of(self, kinds: type[E]) -> E:
        found = {str(kind.value): kind for kind in kinds}
        if self.peek() not in found:
            raise self.error(f"one of {', '.join(found)}")
        self.at += 1
        return found[self.tokens[self.at - 1]]

    def size(self) -> Size:
        expr = self.expr()
        return expr if expr.terms else expr.constant

    def parameter(self) -> Parameter:
        name = self.name()
        self.need(":")
        low = self.integer()
        self.need("..")
        return Parameter(name, low, self.integer())

    def buffer(self) -> Buffer:
        name = self.name()
        self.need(":")
        level, dtype = self.one_of(Level), self.one_of(DType)
        self.need("[")
        size = self.size()
        self.need("]")
        layout: list[Layout] = []
        while self.peek():
            layout.append(self._layout())
        return Buffer(name, level, dtype, size, tuple(layout))

    def _layout(self) -> Layout:
        is_split = self.take("split")
        self.need(*(() if is_split else ("panels",)), "(")
        first = self.integer()
        self.need(",")
        if is_split:
            result: Layout = Split(first, self.one_of(DType))
        else:
            result = Panels(first, self.integer(), self.integer() if self.take(",") else 1)
        self.need(")")
        return result

    def registers(self) -> Registers | None:
        if not self.take("in"):
            return None
        rows = self.integer()
        self.need("x")
        vectors, in_tiles, fetches = self.integer(), self.take("tiles"), self.take("fetch")
        fetches_b, fetches_out, fetches_a = (fetches and self.take(name) for name in ("b", "out", "a"))
        return Registers(rows, vectors, fetches_b, fetches_out, in_tiles, fetches_a)

    def axes(self, *ends: str) -> tuple[Axis, ...]:
        """Return the loops up to the end of the line, or up to a word that ends them."""
        found: list[Axis] = []
        is_reduced = False
        while self.peek() not in ("", *ends):
            is_reduced = self.take("|") or is_reduced
            found.append(self.axis(is_reduced))
        return tuple(found)

    def axis(self, is_reduced: bool = False) -> Axis:
        name = self.name()
        self.need("<")
        if not self.take("min", "("):
            return Axis(name, self.size(), is_reduced)
        size = self.size()
        self.need(",")
        rest = self.expr()
        outer, step = rest.terms[-1] if rest.terms else (None, 0)
        if not isinstance(outer, Var) or -step != size:
            raise self.error(f"{size} times the outer variable to be taken from the whole axis")
        self.need(")")
        total = Expr(rest.constant, rest.terms[:-1])
        return Axis(name, size, is_reduced, (outer.name, total if total.terms else total.constant))

    def carried(self) -> tuple[str, ...]:
        names = [self.name()] if self.take("carries") else []
        while self.take(","):
            names.append(self.name())
        return tuple(names)

    def sort(self) -> Sort:
        rows = self.integer()
        self.need("rows", "of")
        keys = self.name()
        self.need("in")
        groups = self.integer()
        self.need("groups", "by")
        block = self.integer()
        self.need("to")
        order = self.name()
        self.need(",")
        group = self.name()
        self.need(",")
        return Sort(keys, rows, groups, block, order, group, self.name())

    def top(self) -> Top:
        count, is_largest = self.integer(), self.take("largest")
        self.need(*(() if is_largest else ("smallest",)), "of")
        size = self.integer()
        self.need("in")
        rows = self.integer()
        self.need("rows", "of")
        source = self.name()
        self.need("to")
        values = self.name() if self.take("values") else ""
        return Top(source, rows, size, count, is_largest, values, self.name() if self.take("places") else "")

    def place(self) -> At:
        buffer = self.name()
        self.need("[")
        index = self.expr()
        self.need("]")
        return At(buffer, index)

    def guards(self) -> tuple[Inside, ...]:
        found: list[Inside] = []
        while self.take("and" if found else "if"):
            low = self.integer()
            self.need("<=")
            expr = self.expr()
            self.need("<")
            found.append(Inside(expr, low, self.integer()))
        return tuple(found)

    def op(self) -> TileOp:
        name = self.name()
        self.need("=")
        dtype = self.one_of(DType)
        if self.take("load"):
            at = self.place()
            return Load(name, dtype, at.buffer, at.index, self.guards())
        if (number := self._number()) is not None:
            return Literal(name, dtype, number)
        first = self.name()
        if self.take("("):
            return Apply(name, dtype, first, self.listed(self.name, ")"))
        guards = self.guards()
        self.need("else")
        return Select(name, dtype, guards, first, self.name())

    def _number(self) -> float | int | bool | None:
        is_negative = self.take("-")
        word = self.peek()
        value: float | int | bool
        if word in ("True", "False"):
            value = word == "True"
        elif word in ("inf", "nan"):
            value = math.inf if word == "inf" else math.nan
        elif word[:1].isdigit():
            value = int(word) if word.isdigit() else float(word)
        else:
            return None
        self.at += 1
        return -value if is_negative else value

    def sink(self) -> Sink:
        verb = self.name()
        at = self.place()
        self.need("=")
        value = self.name()
        return Store(at.buffer, at.index, value) if verb == "store" else Accumulate(at.buffer, at.index, value, verb)


class _Lines:
    """The lines of a program, read one after another."""

    def __init__(self, text: str) -> None:
        self.lines = [_Line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        self.at = 0

    def peek(self, depth: int) -> _Line | None:
        """Return the next line if it has this indentation depth; None if it is less deep or there is none."""
        if self.at == len(self.lines) or self.lines[self.at].depth < depth:
            return None
        line = self.lines[self.at]
        if line.depth > depth:
            raise line.error(f"an indentation of {2 * depth} spaces")
        return line

    def take(self, line: _Line, read: Callable[[], T]) -> T:
        """Return the result of `read`, which must consume the whole line, and advance to the next line."""
        result = read()
        line.end()
        self.at += 1
        return result

    def program(self) -> TileProgram:
        parameters: list[Parameter] = []
        buffers: list[Buffer] = []
        stages: list[Stage] = []
        while (line := self.peek(0)) is not None:
            if line.take("parameter"):
                parameters.append(self.take(line, line.parameter))
            elif line.take("buffer"):
                buffers.append(self.take(line, line.buffer))
            elif line.take("stage"):
                stages.append(Stage(self.take(line, line.axes), sort=self.sort(), steps=self.steps(1)))
            else:
                raise line.error("parameter, buffer or stage")
        return TileProgram(tuple(buffers), tuple(stages), tuple(parameters))

    def sort(self) -> Ordering | None:
        line = self.peek(1)
        if line is not None and line.take("top"):
            return self.take(line, line.top)
        return self.take(line, line.sort) if line is not None and line.take("sort") else None

    def steps(self, depth: int) -> tuple[Step, ...]:
        found: list[Step] = []
        while (line := self.peek(depth)) is not None:
            if line.take("pass"):
                found.append(self.pass_(line, depth + 1))
            elif line.take("contract"):
                found.append(self.contract(line, depth + 1))
            elif line.take("loop"):
                axis = line.axis()
                is_nearest = line.take("nearest")
                only = line.place() if is_nearest or line.take("only") else None
                found.append(Loop(axis, self.take(line, line.carried), self.steps(depth + 1), only, is_nearest))
            else:
                raise line.error("pass, contract or loop")
        return tuple(found)

    def pass_(self, line: _Line, depth: int) -> Pass:
        axes = line.axes("vector", "across", "if")
        vector = line.name() if line.take("vector") else ""
        across = line.name() if line.take("across") else ""
        where = self.take(line, line.guards)
        ops: list[TileOp] = []
        sinks: list[Sink] = []
        while (item := self.peek(depth)) is not None:
            if item.peek() == "store" or (item.peek() in _ACCUMULATE and item.peek(1) != "="):
                sinks.append(self.take(item, item.sink))
            else:
                ops.append(self.take(item, item.op))
        return Pass(axes, vector, tuple(ops), tuple(sinks), across, where)

    def contract(self, line: _Line, depth: int) -> Contract:
        axes = line.axes("by")
        line.need("by")
        product, registers, where = self.take(line, lambda: (line.one_of(Product), line.registers(), line.guards()))
        item = self.peek(depth)
        if item is None:
            raise line.error("a line below that says what is added to what")
        return replace(self.take(item, lambda: _sum(item, axes, product, registers)), where=where)


def _sum(line: _Line, axes: tuple[Axis, ...], product: Product, registers: Registers | None) -> Contract:
    out = line.place()
    line.need("+=")
    a = line.place()
    line.need("*")
    b = line.place()
    part = line.name() if line.take("part") else ""
    factor = line.place() if line.take("*") else None
    rescale = line.place() if line.take("rescale") else None
    return Contract(axes, out, a, b, product, rescale, factor, registers, part=part)
