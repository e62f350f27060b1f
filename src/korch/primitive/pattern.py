"""Patterns of primitives, and the search for their matches in a graph with alternatives.

A pattern is one of:

- a name, "x": any value, and the same value wherever the name is repeated;
- a number: a constant all of whose elements are that number;
- `Number("a")`: a constant all of whose elements are equal, with a name for this number;
- `op("add", "x", 1.0)`: a primitive whose operands are matched in turn, those of a commutative
  operation in either order;
- `either(p, q)`: a match of one of several patterns.

`find` tries all alternatives of each value and yields each match of a pattern; `find_at` does so for
one primitive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

import numpy as np

from korch.primitive.graph import Primitive

COMMUTATIVE = frozenset({"add", "mul", "max", "min"})


class Alternatives(Protocol):
    """A graph in which patterns are searched."""

    def producing(self, value: int, *ops: str) -> tuple[Primitive, ...]:
        """Return the alternatives of a value whose operation is in `ops`."""
        ...

    def number(self, value: int) -> float | None:
        """Return the number that all elements of a uniform constant have; None for any other value."""
        ...


@dataclass(frozen=True, slots=True)
class Number:
    """A pattern that matches a uniform constant, with the same number wherever the name is repeated."""

    name: str


@dataclass(frozen=True, slots=True)
class OpPattern:
    """A pattern that matches a primitive of one of several operations; made by `op`."""

    ops: tuple[str, ...]
    operands: tuple[Pattern, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Either:
    """A pattern that matches if one of several patterns does, tried in order; made by `either`."""

    patterns: tuple[Pattern, ...]


Pattern = str | float | Number | OpPattern | Either


def op(ops: str, *operands: Pattern, name: str = "") -> OpPattern:
    """Return the pattern of a primitive.

    Args:
        ops: its operation, or several alternatives separated by |.
        operands: the patterns of its inputs.
        name: a name for the primitive and its output; "" for none.
    """
    return OpPattern(tuple(ops.split("|")), operands, name)


def either(*patterns: Pattern) -> Either:
    """Return a pattern that matches whatever one or more of the given patterns match."""
    return Either(patterns)


SOFTPLUS = op("add", op("max", "x", 0.0), op("log", op("add", op("exp", op("neg", op("abs", "x"))), 1.0)))
"""log(1 + e^x) as max(x, 0) + log(1 + e^-|x|)."""


@dataclass(frozen=True, slots=True)
class Found:
    """A match of a pattern."""

    values: Mapping[str, int] = field(default_factory=dict, hash=False)  # the value of each name
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)  # the number of each `Number`, by name
    primitives: Mapping[str, Primitive] = field(default_factory=dict, hash=False)  # the named primitives
    used: tuple[Primitive, ...] = ()  # all matched primitives, each after those that it reads

    @property
    def root(self) -> Primitive:
        """The primitive that the outermost pattern matches."""
        return self.used[-1]

    def _with_value(self, name: str, value: int) -> Found | None:
        if self.values.get(name, value) != value:
            return None
        return replace(self, values={**self.values, name: value})


def find(graph: Alternatives, pattern: Pattern, value: int, known: Found | None = None) -> Iterator[Found]:
    """Yield each match of a pattern at a value.

    Args:
        graph: the graph.
        pattern: the pattern.
        value: the value.
        known: a match that already binds some of the pattern's names.
    """
    known = known or Found()
    match pattern:
        case str():
            found = known._with_value(pattern, value)
            if found is not None:
                yield found
        case OpPattern(ops):
            for primitive in graph.producing(value, *ops):
                yield from find_at(graph, pattern, primitive, known)
        case Either(patterns):
            for each in patterns:
                yield from find(graph, each, value, known)
        case Number(name):
            number = graph.number(value)
            if number is not None and known.numbers.get(name, number) == number:
                yield replace(known, numbers={**known.numbers, name: number})
        case float() | int():
            number = graph.number(value)
            if number is not None and _is_equal(number, pattern):
                yield known
        case _:
            assert_never(pattern)


def find_at(
    graph: Alternatives, pattern: OpPattern | Either, root: Primitive, known: Found | None = None
) -> Iterator[Found]:
    """Yield each match of a pattern at a primitive; the other arguments are those of `find`."""
    known = known or Found()
    if isinstance(pattern, Either):
        for each in pattern.patterns:
            if isinstance(each, OpPattern | Either):
                yield from find_at(graph, each, root, known)
        return
    named = known._with_value(pattern.name, root.output) if pattern.name else known
    if named is None or root.op not in pattern.ops or len(root.inputs) != len(pattern.operands):
        return
    for operands in _orders(pattern, root):
        for found in _find_all(graph, tuple(zip(operands, root.inputs, strict=True)), named):
            primitives = {**found.primitives, pattern.name: root} if pattern.name else found.primitives
            yield replace(found, primitives=primitives, used=(*found.used, root))


def _orders(pattern: OpPattern, primitive: Primitive) -> Iterator[Sequence[Pattern]]:
    yield pattern.operands
    if primitive.op in COMMUTATIVE and len(set(primitive.inputs)) > 1:
        yield pattern.operands[::-1]


def _find_all(graph: Alternatives, pairs: Sequence[tuple[Pattern, int]], known: Found) -> Iterator[Found]:
    if not pairs:
        yield known
        return
    (pattern, value), *rest = pairs
    for found in find(graph, pattern, value, known):
        yield from _find_all(graph, rest, found)


def _is_equal(number: float, wanted: float) -> bool:
    """Return whether a number is the wanted one, up to float32 rounding if the wanted one is not a float32."""
    rounded = np.float32(wanted)
    return number == wanted or (float(rounded) != wanted and abs(number - wanted) <= float(np.spacing(rounded)))
