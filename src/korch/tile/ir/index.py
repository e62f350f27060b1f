"""Index expressions: integers computed from loop variables.

An expression is affine in *atoms*: loop variables, and terms that are not affine themselves (a
quotient, a remainder, an entry of a table, a choice between cases, a product with a parameter).
Expressions are simplified under the ranges of the variables, so that a reshape or a blocked layout
needs no division if its sizes allow that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import assert_never

Ranges = Mapping[str, tuple[int, int]]
"""The least and the greatest value of each variable."""


@dataclass(frozen=True)
class Var:
    """A loop variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Quotient:
    """The value of `expr` divided by `divisor`, rounded down."""

    expr: Expr
    divisor: int

    def __str__(self) -> str:
        return f"({self.expr})/{self.divisor}"


@dataclass(frozen=True)
class Remainder:
    """The remainder of `expr` divided by `divisor`; it is not negative."""

    expr: Expr
    divisor: int

    def __str__(self) -> str:
        return f"({self.expr})%{self.divisor}"


@dataclass(frozen=True)
class TableEntry:
    """The entry of a constant table at position `expr`."""

    table: tuple[int, ...]
    expr: Expr

    def __str__(self) -> str:
        return f"table{list(self.table)}[{self.expr}]"


@dataclass(frozen=True)
class Choice:
    """The expression of the first case (limit, expression) with `expr` < limit, else `otherwise`."""

    expr: Expr
    cases: tuple[tuple[int, Expr], ...]
    otherwise: Expr

    def __str__(self) -> str:
        text = "".join(f"{self.expr}<{limit} ? {then} : " for limit, then in self.cases)
        return f"({text}{self.otherwise})"


@dataclass(frozen=True)
class Times:
    """An expression times an atom that depends on parameters only, which are integers known at run time only."""

    factor: Atom
    expr: Expr

    def __str__(self) -> str:
        return f"{self.factor}*({self.expr})"


Atom = Var | Quotient | Remainder | TableEntry | Choice | Times


@dataclass(frozen=True)
class Expr:
    """A constant plus a sum of coefficients times atoms, no coefficient being 0."""

    constant: int
    terms: tuple[tuple[Atom, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Expr], tuple[int, tuple[tuple[Atom, int], ...]]]:
        """Pickle no hash: another process computes other ones."""
        return Expr, (self.constant, self.terms)

    @cached_property
    def _hash(self) -> int:
        return hash((self.constant, self.terms))

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of all variables in the expression."""
        found: set[str] = set()
        for atom, _ in self.terms:
            found |= _atom_variables(atom)
        return frozenset(found)

    def coefficient(self, name: str) -> int | None:
        """Return by how much the expression grows with a variable; None if that is not constant."""
        total = 0
        for atom, coefficient in self.terms:
            if isinstance(atom, Var):
                total += coefficient if atom.name == name else 0
            elif name in _atom_variables(atom):
                return None
        return total

    def __str__(self) -> str:
        parts = [str(atom) if coefficient == 1 else f"{coefficient}*{atom}" for atom, coefficient in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


ZERO = Expr(0)

ROWS = (0, 2, 1 << 20)
"""A placeholder for the table of row positions, which a kernel computes from the sizes at run time; its first is 0."""


def constant(value: int) -> Expr:
    """Return a number as an expression."""
    return Expr(value)


@cache
def var(name: str) -> Expr:
    """Return a variable as an expression."""
    return Expr(0, ((Var(name), 1),))


def add(*parts: Expr) -> Expr:
    """Return the sum of some expressions."""
    total = sum(part.constant for part in parts)
    varying = [part.terms for part in parts if part.terms]
    terms = list(varying[0]) if varying else []
    if len(varying) > 1:
        sums: dict[Atom, int] = {}
        for atom, coefficient in itertools.chain(*varying):
            sums[atom] = sums.get(atom, 0) + coefficient
        terms = [(atom, coefficient) for atom, coefficient in sums.items() if coefficient]
    if len(terms) > 1:
        terms.sort(key=lambda term: str(term[0]))
    return _recompose(Expr(total, tuple(terms)))


def scale(expr: Expr, factor: int) -> Expr:
    """Return an expression times a number."""
    if factor == 1:
        return expr
    return Expr(expr.constant * factor, tuple((a, c * factor) for a, c in expr.terms)) if factor else ZERO


def times(expr: Expr, factor: Expr) -> Expr:
    """Return an expression times `factor`, an expression that depends on parameters only."""
    parts = [scale(expr, factor.constant)]
    for atom, step in factor.terms:
        parts.append(Expr(0, ((atom, step * expr.constant),)) if expr.constant else ZERO)
        parts += [Expr(0, ((Times(atom, Expr(0, ((a, 1),))), step * c),)) for a, c in expr.terms]
    return add(*parts)


def bounds(expr: Expr, ranges: Ranges) -> tuple[int, int]:
    """Return the least and the greatest value that an expression can have."""
    low = high = expr.constant
    for atom, coefficient in expr.terms:
        ends = [coefficient * end for end in _atom_bounds(atom, ranges)]
        low, high = low + min(ends), high + max(ends)
    return low, high


def quotient(expr: Expr, divisor: int, ranges: Ranges) -> Expr:
    """Return `expr` divided by a positive number, rounded down."""
    if divisor == 1:
        return expr
    whole, rest = _split(expr, divisor, ranges)
    low, high = bounds(rest, ranges)
    if low // divisor == high // divisor:
        return add(whole, Expr(low // divisor))
    if len(rest.terms) == 1 and rest.constant == 0 and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Quotient):
            return add(whole, quotient(atom.expr, atom.divisor * divisor, ranges))
    if coarse := _coarse(rest, divisor, ranges):
        return add(whole, quotient(coarse[0], divisor // coarse[2], ranges))
    return add(whole, Expr(0, ((Quotient(rest, divisor), 1),)))


def remainder(expr: Expr, divisor: int, ranges: Ranges) -> Expr:
    """Return the nonnegative remainder of `expr` divided by a positive number."""
    if divisor == 1:
        return ZERO
    _, rest = _split(expr, divisor, ranges)
    low, high = bounds(rest, ranges)
    if low // divisor == high // divisor:
        return add(rest, Expr(-(low // divisor) * divisor))
    if coarse := _coarse(rest, divisor, ranges):
        return add(scale(remainder(coarse[0], divisor // coarse[2], ranges), coarse[2]), coarse[1])
    return Expr(0, ((Remainder(rest, divisor), 1),))


def entry(table: Sequence[int], expr: Expr, ranges: Ranges) -> Expr:
    """Return the entry of a table at `expr`, as arithmetic if the entries follow a simple formula.

    Under guards, `expr` may be outside the table; any entry may then be returned.
    """
    entries = tuple(table)
    if entries == ROWS:
        return Expr(0, ((TableEntry(entries, expr), 1),)) if expr != ZERO else ZERO
    low, high = bounds(expr, ranges)
    if low == high or len(entries) == 1:
        return Expr(entries[min(max(low, 0), len(entries) - 1)])
    step = entries[1] - entries[0]
    if all(b - a == step for a, b in itertools.pairwise(entries)):
        return add(Expr(entries[0]), scale(expr, step))
    for repeat in range(2, len(entries)):
        if entries[repeat] != entries[0]:
            first = entries[0]
            if all(e == first + i // repeat for i, e in enumerate(entries)):
                return add(Expr(first), quotient(expr, repeat, ranges))
            break
    return Expr(0, ((TableEntry(entries, expr), 1),))


def choice(expr: Expr, cases: Sequence[tuple[int, Expr]], otherwise: Expr, ranges: Ranges) -> Expr:
    """Return the first case whose limit is greater than `expr`, without the cases that the ranges rule out."""
    low, high = bounds(expr, ranges)
    open_cases = []
    for limit, then in cases:
        if low >= limit:
            continue
        if high < limit:
            otherwise = then
            break
        open_cases.append((limit, then))
    if not open_cases or all(then == otherwise for _, then in open_cases):
        return otherwise
    return Expr(0, ((Choice(expr, tuple(open_cases), otherwise), 1),))


def substitute(expr: Expr, values: Mapping[str, Expr], ranges: Ranges) -> Expr:
    """Return an expression with variables replaced, simplified under `ranges`."""
    if not expr.variables & values.keys() and not any(not isinstance(atom, Var) for atom, _ in expr.terms):
        return expr
    parts = [Expr(expr.constant)]
    for atom, coefficient in expr.terms:
        parts.append(scale(_substitute_atom(atom, values, ranges), coefficient))
    return add(*parts)


def coarsened(expr: Expr, low: int, high: int, ranges: Ranges) -> tuple[Expr, int, int]:
    """Return the condition low <= expr < high without terms that are too small to affect it.

    With expr = g*q + r and r in [0, g), the comparison with a multiple of g depends on q only: whether
    a channel is in one of four blocks of 32 does not depend on its position in the block.
    """
    least, most = bounds(expr, ranges)
    for g in sorted({abs(c) for _, c in expr.terms if abs(c) > 1}, reverse=True):
        whole, rest = _split(expr, g, ranges)
        begin, end = bounds(rest, ranges)
        is_low, is_high = low <= least or low % g == 0, most < high or high % g == 0
        if begin >= 0 and end < g and is_low and is_high:
            return coarsened(whole, low // g, -(-high // g), ranges)
    return expr, low, high


def breakpoints(expr: Expr, name: str, ranges: Ranges) -> set[int]:
    """Return the values of a variable from which on a choice inside `expr` takes another case."""
    found: set[int] = set()
    for atom, _ in expr.terms:
        for inner in parts_of_atom(atom):
            found |= breakpoints(inner, name, ranges)
        if isinstance(atom, Choice):
            for limit, _ in atom.cases:
                found |= turning_point(atom.expr, limit, name)
    return found


def vector_step(expr: Expr, name: str, lanes: int) -> int | None:
    """Return the step between adjacent lanes of a whole vector along a variable; None if it varies.

    Whole vectors begin at multiples of `lanes`: with 16 lanes, n/64 is constant within a vector, and
    n%64 grows by 1.
    """
    total = 0
    for atom, coefficient in expr.terms:
        if isinstance(atom, Var):
            total += coefficient if atom.name == name else 0
        elif name in _atom_variables(atom):
            if not isinstance(atom, Quotient | Remainder) or atom.divisor % lanes:
                return None
            rest = add(atom.expr, scale(var(name), -1))
            numbers = (rest.constant, *(number for _, number in rest.terms))
            if name in rest.variables or any(number % lanes for number in numbers):
                return None
            total += coefficient if isinstance(atom, Remainder) else 0
    return total


def turning_point(expr: Expr, limit: int, name: str) -> set[int]:
    """Return the value of a variable from which on `expr < limit` differs; empty if `expr` has other variables."""
    slope = expr.coefficient(name)
    if not slope or expr.variables != {name}:
        return set()
    if slope > 0:
        return {-(-(limit - expr.constant) // slope)}
    return {(expr.constant - limit) // -slope + 1}


def _split(expr: Expr, divisor: int, ranges: Ranges) -> tuple[Expr, Expr]:
    """Return a and b, b not negative, with expr = a*divisor + b.

    Printed divisions round towards 0, so a dividend must never be negative, not even if a constant that
    was split off would compensate for it.
    """
    whole = Expr(expr.constant // divisor, tuple((a, c // divisor) for a, c in expr.terms if c % divisor == 0))
    rest = Expr(expr.constant % divisor, tuple((a, c) for a, c in expr.terms if c % divisor))
    low, _ = bounds(rest, ranges)
    if low < 0:
        steps = -(low // divisor)
        whole, rest = add(whole, Expr(-steps)), add(rest, Expr(steps * divisor))
    return whole, rest


def _coarse(expr: Expr, divisor: int, ranges: Ranges) -> tuple[Expr, Expr, int] | None:
    """Return q, r and g > 1 with expr = q*g + r, r in [0, g) and g a divisor of `divisor`, the largest g; else None.

    With 48 columns, row (48*e + j)/1920 of a reshape is e/40.
    """
    for g in sorted({math.gcd(c, divisor) for _, c in expr.terms} - {1}, reverse=True):
        whole, rest = _split(expr, g, ranges)
        low, high = bounds(rest, ranges)
        if whole.terms and low >= 0 and high < g:
            return whole, rest, g
    return None


def _recompose(expr: Expr) -> Expr:
    """Replace k*(e/k) + e%k by e."""
    remainders = [(atom, coefficient) for atom, coefficient in expr.terms if isinstance(atom, Remainder)]
    if len(expr.terms) > 1 and remainders:
        coefficients = dict(expr.terms)
        for atom, coefficient in remainders:
            partner = Quotient(atom.expr, atom.divisor)
            if coefficients.get(partner) == coefficient * atom.divisor:
                rest = tuple((a, c) for a, c in expr.terms if a not in (atom, partner))
                return add(Expr(expr.constant, rest), scale(atom.expr, coefficient))
    return expr


def parts_of_atom(atom: Atom) -> tuple[Expr, ...]:
    """Return the expressions that an atom is computed from."""
    match atom:
        case Var():
            return ()
        case Choice(expr, cases, otherwise):
            return (expr, otherwise, *(then for _, then in cases))
        case Times(factor, expr):
            return (expr, Expr(0, ((factor, 1),)))
        case _:
            return (atom.expr,)


def _atom_variables(atom: Atom) -> frozenset[str]:
    if isinstance(atom, Var):
        return frozenset((atom.name,))
    first, *rest = parts_of_atom(atom)
    return first.variables.union(*(part.variables for part in rest)) if rest else first.variables


def _atom_bounds(atom: Atom, ranges: Ranges) -> tuple[int, int]:
    match atom:
        case Var(name):
            return ranges[name]
        case Quotient(inner, divisor):
            low, high = bounds(inner, ranges)
            return low // divisor, high // divisor
        case Remainder(_, divisor):
            return 0, divisor - 1
        case TableEntry(table, inner):
            low, high = bounds(inner, ranges)
            seen = table[max(low, 0) : high + 1] or table
            return min(seen), max(seen)
        case Choice(_, cases, otherwise):
            ends = [bounds(then, ranges) for then in (otherwise, *(p for _, p in cases))]
            return min(low for low, _ in ends), max(high for _, high in ends)
        case Times(factor, inner):
            corners = [a * b for a in _atom_bounds(factor, ranges) for b in bounds(inner, ranges)]
            return min(corners), max(corners)
        case _:
            assert_never(atom)


def _substitute_atom(atom: Atom, values: Mapping[str, Expr], ranges: Ranges) -> Expr:
    match atom:
        case Var(name):
            return values.get(name, Expr(0, ((atom, 1),)))
        case Quotient(inner, divisor):
            return quotient(substitute(inner, values, ranges), divisor, ranges)
        case Remainder(inner, divisor):
            return remainder(substitute(inner, values, ranges), divisor, ranges)
        case TableEntry(table, inner):
            return entry(table, substitute(inner, values, ranges), ranges)
        case Choice(inner, cases, otherwise):
            replaced = [(limit, substitute(then, values, ranges)) for limit, then in cases]
            return choice(substitute(inner, values, ranges), replaced, substitute(otherwise, values, ranges), ranges)
        case Times(factor, inner):
            return times(substitute(inner, values, ranges), _substitute_atom(factor, values, ranges))
        case _:
            assert_never(atom)
