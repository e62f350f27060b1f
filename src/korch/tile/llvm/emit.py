"""Prints LLVM IR in SSA form: typed values, operations, loops and branches as functions of Python.

An operation without effects is printed where all its operands are known, which may be outside the loops that are being
printed, and at most once there. Loop-invariant code and common subexpressions therefore need no passes.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from korch.tile.ir.growth import TextLimitError

MOST_CHARACTERS = 1 << 20
"""The maximum characters of a function."""

UNROLLED_TURNS = 4
"""Loops of at most this number of iterations are printed iteration by iteration if their body is short."""

SHORT_LINES = 64
"""The maximum lines of such a body."""

FLOATS = ("half", "float", "double")


class SsaValue(NamedTuple):
    """A value, or a constant."""

    text: str  # its name, or the number
    kind: str  # the type of an element: float, i32, ptr, and so on
    lanes: int = 1  # the number of elements; 1 for a scalar
    depth: int = 0  # the number of the scope from which on it is known; 0 is the function's entry

    @property
    def type(self) -> str:
        """Its type in LLVM IR."""
        return type_of(self.kind, self.lanes)

    @property
    def typed(self) -> str:
        """Its type and name."""
        return f"{type_of(self.kind, self.lanes)} {self.text}"

    @property
    def number(self) -> int | None:
        """The value of an integer constant, or None."""
        return None if self.text[0] == "%" or self.lanes > 1 else _number(self.text)


@cache
def _number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None


@cache
def type_of(kind: str, lanes: int) -> str:
    """Return the type of a vector, or of a scalar if it has one lane."""
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def constant(kind: str, value: float | int, lanes: int = 1) -> SsaValue:
    """Return a number in each lane."""
    text = _float(kind, struct.pack("d", value)) if kind in FLOATS else _integer(kind, int(value))
    return SsaValue(text if lanes == 1 else f"splat ({kind} {text})", kind, lanes)


@cache
def _float(kind: str, data: bytes) -> str:
    """Return the text of a number of 64 bits, rounded to the kind; bytes tell zeros with different signs apart."""
    (value,) = struct.unpack("d", data)
    if kind == "float" and math.isfinite(value):
        value = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}" if value == value else "0x7FF8000000000000"


@cache
def _integer(kind: str, value: int) -> str:
    bits = int(kind[1:])
    if bits == 1:
        return {0: "false", 1: "true"}[value]
    return str(((value + (1 << bits - 1)) & (1 << bits) - 1) - (1 << bits - 1))


def array(kind: str, values: Sequence[float | int]) -> SsaValue:
    """Return a constant vector."""
    items = ", ".join(constant(kind, value).typed for value in values)
    return SsaValue(f"<{items}>", kind, len(values))


@dataclass(slots=True)
class _Scope:
    """The lines of a loop, of a branch or of a function that are being printed, and what is known in it."""

    label: str
    is_conditional: bool = False
    lines: list[str] = field(default_factory=list)
    known: dict[str, SsaValue] = field(default_factory=dict)


class Emit:
    """Prints the functions of a module."""

    def __init__(self) -> None:
        self.declared: dict[str, str] = {}
        self.globals: dict[str, str] = {}
        self.functions: list[str] = []
        self._scopes: list[_Scope] = []
        self._arrays: list[str] = []
        self._count = self._characters = 0

    @property
    def text(self) -> str:
        """The module."""
        return "\n".join([*self.globals.values(), *self.declared.values(), *self.functions, ""])

    @contextmanager
    def function(self, head: str) -> Iterator[None]:
        """Print a function; the body must end with a return."""
        self._scopes, self._arrays, self._count = [_Scope("entry")], [], 0
        yield
        (scope,) = self._scopes
        body = "\n".join(("entry:", *self._arrays, *scope.lines))
        self.functions.append(f"define {head} {{\n{body}\n}}\n")
        self._scopes = []

    # Operations

    def name(self) -> str:
        """Return a new name."""
        self._count += 1
        return f"%v{self._count}"

    def pure(self, kind: str, lanes: int, text: str, *operands: SsaValue, floor: int = 0) -> SsaValue:
        """Print an operation without effects, not further outside than scope `floor`; return its result."""
        depth = floor
        for operand in operands:
            if operand.depth > depth:
                depth = operand.depth
        scope = self._scopes[depth]
        found = scope.known.get(text)
        if found is None:
            found = SsaValue(self.name(), kind, lanes, depth)
            self._line(scope, f"  {found.text} = {text}")
            scope.known[text] = found
        return found

    def effect(self, text: str) -> None:
        """Print an instruction where it stands."""
        self._line(self._scopes[-1], f"  {text}")

    def op(self, name: str, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print an operation of two values of one kind; a scalar is used in each lane."""
        a, b = self.matched(a, b)
        return self.pure(a.kind, a.lanes, f"{name} {a.typed}, {b.text}", a, b)

    def test(self, name: str, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a comparison, for example `icmp slt`."""
        a, b = self.matched(a, b)
        return self.pure("i1", a.lanes, f"{name} {a.typed}, {b.text}", a, b)

    def select(self, condition: SsaValue, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the choice of a or b, lane by lane."""
        if condition.lanes == 1:
            a, b = self.matched(a, b)
        else:
            a, b = (self.splat(value, condition.lanes) for value in (a, b))
        if a == b:
            return a
        text = f"select {condition.typed}, {a.typed}, {b.typed}"
        return self.pure(a.kind, a.lanes, text, condition, a, b)

    def convert(self, name: str, a: SsaValue, kind: str) -> SsaValue:
        """Print a conversion, for example `sext`."""
        if a.kind == kind or (name == "sext" and a.number is not None):
            return a._replace(kind=kind)
        return self.pure(kind, a.lanes, f"{name} {a.typed} to {type_of(kind, a.lanes)}", a)

    def bits(self, a: SsaValue, kind: str) -> SsaValue:
        """Return the same bits as a vector of another kind of elements of equal size."""
        return self.convert("bitcast", a, kind)

    def bits_of_mask(self, mask: SsaValue) -> SsaValue:
        """Return a vector of truth values as an integer with a bit for each."""
        kind = f"i{mask.lanes}"
        return self.pure(kind, 1, f"bitcast {mask.typed} to {kind}", mask)

    def negated(self, a: SsaValue) -> SsaValue:
        """Print a float with the opposite sign."""
        return self.pure(a.kind, a.lanes, f"fneg {a.typed}", a)

    def call(self, name: str, kind: str, lanes: int, *operands: SsaValue, floor: int = 0, flags: str = "") -> SsaValue:
        """Print the call of a function without effects; the function is declared."""
        result = type_of(kind, lanes)
        if name not in self.declared:
            self.declare(name, result, *(operand.type for operand in operands))
        given = ", ".join([operand.typed for operand in operands])
        return self.pure(kind, lanes, f"call {flags}{result} @{name}({given})", *operands, floor=floor)

    def declare(self, name: str, result: str, *types: str) -> None:
        """Declare a function."""
        self.declared.setdefault(name, f"declare {result} @{name}({', '.join(types)})")

    def splat(self, a: SsaValue, lanes: int) -> SsaValue:
        """Return a vector with the same number in each lane."""
        if a.lanes == lanes:
            return a
        if not a.text.startswith("%"):
            return SsaValue(f"splat ({a.typed})", a.kind, lanes)
        poison = f"{type_of(a.kind, lanes)} poison"
        one = self.pure(a.kind, lanes, f"insertelement {poison}, {a.typed}, i64 0", a)
        return self.pure(a.kind, lanes, f"shufflevector {one.typed}, {poison}, <{lanes} x i32> zeroinitializer", one)

    def matched(self, *values: SsaValue) -> tuple[SsaValue, ...]:
        """Return values with equal numbers of lanes."""
        lanes = max([value.lanes for value in values])
        return tuple([self.splat(value, lanes) for value in values])

    def shuffle(self, a: SsaValue, b: SsaValue | None, order: Sequence[int]) -> SsaValue:
        """Print a vector of lanes of one or two vectors."""
        if len(order) == 1:
            return self.lane(a, order[0])
        places = ", ".join(f"i32 {i}" for i in order)
        second = b.typed if b is not None else f"{a.type} poison"
        text = f"shufflevector {a.typed}, {second}, <{len(order)} x i32> <{places}>"
        return self.pure(a.kind, len(order), text, a, *([b] if b is not None else []))

    def lane(self, a: SsaValue, i: int) -> SsaValue:
        """Print one lane of a vector."""
        if a.text[0] == "<":  # a constant vector
            return SsaValue(a.text[1:-1].split(", ")[i].split()[1], a.kind)
        return a if a.lanes == 1 else self.pure(a.kind, 1, f"extractelement {a.typed}, i64 {i}", a)

    def joined(self, lanes: Sequence[SsaValue]) -> SsaValue:
        """Print a vector of scalars."""
        found = SsaValue("poison", lanes[0].kind, len(lanes))
        for i, x in enumerate(lanes):
            found = self.pure(x.kind, len(lanes), f"insertelement {found.typed}, {x.typed}, i64 {i}", found, x)
        return found

    # Integers of 64 bits

    def index(self, value: int) -> SsaValue:
        """Return an integer of 64 bits."""
        return SsaValue(str(value), "i64")

    def add(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a sum of indices."""
        x, y = a.number, b.number
        if x is not None and y is not None:
            return self.index(x + y)
        if 0 in (x, y):
            return b if x == 0 else a
        return self.op("add nsw", a, b)

    def times(self, a: SsaValue, n: int) -> SsaValue:
        """Print an index times a number."""
        if n == 1 or a.text == "0":
            return a
        x = a.number
        return self.index(x * n) if x is not None else self.op("mul nsw", a, constant(a.kind, n))

    def divided(self, a: SsaValue, n: int) -> SsaValue:
        """Print an index, which is not negative, divided by a number and rounded down."""
        x = a.number
        if x is not None:
            return constant(a.kind, x // n)
        return a if n == 1 else self.op("udiv", a, constant(a.kind, n))

    def rest(self, a: SsaValue, n: int) -> SsaValue:
        """Print the remainder of an index, which is not negative, divided by a number."""
        x = a.number
        return constant(a.kind, x % n) if x is not None else self.op("urem", a, constant(a.kind, n))

    def least(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the smaller index, lane by lane."""
        x, y = a.number, b.number
        if x is not None and y is not None:
            return self.index(min(x, y))
        return a if a == b else self._chosen("smin", a, b)

    def most(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the larger index, lane by lane."""
        x, y = a.number, b.number
        if x is not None and y is not None:
            return self.index(max(x, y))
        return a if a == b else self._chosen("smax", a, b)

    def _chosen(self, name: str, a: SsaValue, b: SsaValue) -> SsaValue:
        a, b = self.matched(a, b)
        suffix = "i64" if a.lanes == 1 else f"v{a.lanes}i64"
        return self.call(f"llvm.{name}.{suffix}", "i64", a.lanes, a, b)

    def before(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print whether an index is smaller than another one."""
        x, y = a.number, b.number
        return constant("i1", x < y) if x is not None and y is not None else self.test("icmp slt", a, b)

    # Memory

    @property
    def depth(self) -> int:
        """The number of the innermost scope."""
        return len(self._scopes) - 1

    @property
    def floor(self) -> int:
        """The number of the innermost scope whose lines may not be executed although the scope around it is."""
        return next((i for i in range(self.depth, 0, -1) if self._scopes[i].is_conditional), 0)

    def opaque(self, place: SsaValue) -> SsaValue:
        """Print an equal address, of which LLVM does not know that it is equal; loads do not move across it."""
        text = f'call ptr asm sideeffect "", "=r,0,~{{memory}}"({place.typed})'
        return self.pure("ptr", 1, text, place, floor=self.depth)

    def array(self, kind: str, count: int) -> SsaValue:
        """Reserve memory on the stack."""
        name = self.name()
        self._arrays.append(f"  {name} = alloca [{max(count, 1)} x {kind}], align 64")
        return SsaValue(name, "ptr")

    def place(self, kind: str, base: SsaValue, at: SsaValue) -> SsaValue:
        """Print the address of an element."""
        return (
            base if at.text == "0" else self.pure("ptr", 1, f"getelementptr {kind}, {base.typed}, {at.typed}", base, at)
        )

    def load(self, kind: str, lanes: int, at: SsaValue, align: int, floor: int, era: int = 0) -> SsaValue:
        """Print a load, which may be executed from scope `floor` on; loads of different eras may differ."""
        text = f"load {type_of(kind, lanes)}, {at.typed}, align {align}"
        return self.pure(kind, lanes, f"{text} ; {era}" if era else text, at, floor=floor)

    def store(self, value: SsaValue, at: SsaValue, align: int, note: str = "") -> None:
        """Print a store."""
        self.effect(f"store {value.typed}, {at.typed}, align {align}{note}")

    def prefetch(self, at: SsaValue, locality: int = 3) -> None:
        """Print the prefetch of a cache line that is read."""
        self.declare("llvm.prefetch.p0", "void", "ptr", "i32", "i32", "i32")
        self.effect(f"call void @llvm.prefetch.p0({at.typed}, i32 0, i32 {locality}, i32 1)")

    # Control flow

    def loop(
        self,
        begin: SsaValue,
        end: SsaValue,
        step: int,
        body: Callable[..., Sequence[SsaValue] | None],
        *carried: SsaValue,
        cost: int = SHORT_LINES + 1,
    ) -> tuple[SsaValue, ...]:
        """Print a loop; return what its last iteration returns.

        `body`: prints an iteration, given the index and what the iteration before returned; returns as many values.
        `cost`: the approximate number of lines of an iteration.
        """
        low, high = begin.number, end.number
        if low is None or high is None:
            runs = self.test("icmp slt", begin, end)
            return self.branch(runs, lambda: self._turns(begin, end, step, body, carried), lambda: carried)
        turns = -(-(high - low) // step)
        if turns <= 1 or (turns <= UNROLLED_TURNS and turns * cost <= SHORT_LINES):
            for i in range(low, high, step):
                carried = tuple(body(self.index(i), *carried) or ())
            return carried
        return self._turns(begin, end, step, body, carried)

    def _turns(
        self,
        begin: SsaValue,
        end: SsaValue,
        step: int,
        body: Callable[..., Sequence[SsaValue] | None],
        carried: tuple[SsaValue, ...],
    ) -> tuple[SsaValue, ...]:
        """Print a loop that has at least one iteration."""

        def turn(i: SsaValue, *own: SsaValue) -> tuple[SsaValue, ...]:
            results = tuple(body(i, *own) or ())
            following = self.pure("i64", 1, f"add nuw nsw {i.typed}, {step}", i, floor=self.depth)
            more = self.pure("i1", 1, f"icmp slt {following.typed}, {end.text}", following, floor=self.depth)
            return more, following, *results

        return self.repeat(turn, begin, *carried)[1:]

    def repeat(self, body: Callable[..., tuple[SsaValue, ...]], *carried: SsaValue) -> tuple[SsaValue, ...]:
        """Print a loop that runs at least once; return what its last iteration returns.

        `body`: prints an iteration, given what the one before returned; returns whether another one follows, then as
        many values as it gets.
        """
        outer, label = self._scopes[-1], f"l{self.name()[1:]}"
        scope = _Scope(label)
        self._scopes.append(scope)
        inner = [SsaValue(self.name(), value.kind, value.lanes, self.depth) for value in carried]
        more, *results = body(*inner)
        self._scopes.pop()
        phis = [
            f"  {own.text} = phi {own.type} [ {first.text}, %{outer.label} ], [ {last.text}, %{scope.label} ]"
            for own, first, last in zip(inner, carried, results, strict=True)
        ]
        after = f"{label}e"
        outer.lines += [
            f"  br label %{label}",
            f"{label}:",
            *phis,
            *scope.lines,
            f"  br {more.typed}, label %{label}, label %{after}",
            f"{after}:",
        ]
        outer.label = after
        return tuple(SsaValue(v.text, v.kind, v.lanes, max(self.depth, 0)) if v.text[0] == "%" else v for v in results)

    def in_halves(self, begin: SsaValue, end: SsaValue, size: int, body: Callable[[SsaValue, int], None]) -> None:
        """Print what runs a body for fewer than 2 `size` indices, in steps of `size` and of half as many each.

        `end`: the index at which it ends, known at run time only. `body`: prints the code for some indices, given the
        first one and how many they are.
        """
        if size <= 1:
            self.loop(begin, end, 1, lambda i: body(i, 1))
            return

        def run() -> tuple[SsaValue]:
            body(begin, size)
            return (self.add(begin, self.index(size)),)

        fits = self.test("icmp sge", self.add(end, self.times(begin, -1)), self.index(size))
        (following,) = self.branch(fits, run, lambda: (begin,))
        self.in_halves(following, end, size // 2, body)

    def branch(
        self,
        condition: SsaValue,
        then: Callable[[], Sequence[SsaValue] | None],
        otherwise: Callable[[], Sequence[SsaValue] | None] = lambda: (),
    ) -> tuple[SsaValue, ...]:
        """Print two branches that return equal numbers of values; return those of the one that is executed."""
        if condition.text in ("true", "false"):
            return tuple((then if condition.text == "true" else otherwise)() or ())
        outer, label = self._scopes[-1], f"b{self.name()[1:]}"
        found: list[tuple[_Scope, tuple[SsaValue, ...]]] = []
        for side, print_side in (("t", then), ("f", otherwise)):
            scope = _Scope(f"{label}{side}", is_conditional=True)
            self._scopes.append(scope)
            found.append((scope, tuple(print_side() or ())))
            self._scopes.pop()
        lines = [f"  br {condition.typed}, label %{label}t, label %{label}f"]
        for side, (scope, _) in zip("tf", found, strict=True):
            lines += [f"{label}{side}:", *scope.lines, f"  br label %{label}e"]
        results = []
        lines.append(f"{label}e:")
        (one, yes), (two, no) = found
        for a, b in zip(yes, no, strict=True):
            name = self.name()
            lines.append(f"  {name} = phi {a.type} [ {a.text}, %{one.label} ], [ {b.text}, %{two.label} ]")
            results.append(SsaValue(name, a.kind, a.lanes, self.depth))
        outer.lines += lines
        outer.label = f"{label}e"
        return tuple(results)

    def _line(self, scope: _Scope, line: str) -> None:
        scope.lines.append(line)
        self._characters += len(line)
        if self._characters > MOST_CHARACTERS:
            raise TextLimitError(f"its text would have more than {MOST_CHARACTERS >> 10} KiB")
