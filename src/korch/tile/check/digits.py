"""Index expressions as sums of digits, whose steps may be polynomials in parameters.

An affine index is base + sum of step * digit, where each digit is a loop variable from 0 to count - 1.
If each step is greater than the largest sum of all smaller digits times their steps, the digits are
those of a number in a mixed radix: equal elements have equal digits. A quotient or remainder of a
variable becomes a digit by splitting the variable in two. Steps, counts and bases are polynomials in
parameters; every statement proved about them holds for all values in the parameters' ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from korch.tile.ir.index import Atom, Expr, Quotient, Ranges, Remainder, Times, Var, add, bounds, scale, substitute, var
from korch.tile.ir.program import Axis, Inside, Size

Monomial = tuple[str, ...]
MOST_CUTS = 16
"""The maximum number of variables of a stage that are split in two."""


@dataclass(frozen=True)
class Poly:
    """A polynomial with integer coefficients: sorted pairs (monomial, coefficient), no coefficient being 0."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    @staticmethod
    def of(terms: Iterable[tuple[Monomial, int]]) -> Poly:
        """Return the sum of some terms."""
        sums: dict[Monomial, int] = {}
        for monomial, coefficient in terms:
            sums[monomial] = sums.get(monomial, 0) + coefficient
        return Poly(tuple(sorted((m, c) for m, c in sums.items() if c)))

    def __add__(self, other: Poly) -> Poly:
        return Poly.of((*self.terms, *other.terms))

    def __sub__(self, other: Poly) -> Poly:
        return self + other * number(-1)

    def __mul__(self, other: Poly) -> Poly:
        return Poly.of(
            (tuple(sorted((*m, *n))), a * b) for (m, a), (n, b) in itertools.product(self.terms, other.terms)
        )

    def least(self, ranges: Ranges) -> int:
        """Return a lower bound for all values of the symbols.

        Each symbol is written as its minimum plus a nonnegative rest; a product of such rests is at
        least 0, and at most the product of the widths of the ranges.
        """
        shifted = Poly()
        for monomial, coefficient in self.terms:
            term = number(coefficient)
            for name in monomial:
                term *= Poly.of([((name,), 1), ((), ranges[name][0])])
            shifted += term
        total = 0
        for monomial, coefficient in shifted.terms:
            if coefficient < 0 or not monomial:
                total += coefficient * math.prod(ranges[name][1] - ranges[name][0] for name in monomial)
        return total


def number(value: int) -> Poly:
    """Return a constant polynomial."""
    return Poly.of([((), value)])


@dataclass(frozen=True)
class Digit:
    """One loop variable's part of an index."""

    step: Poly  # by how much the index grows with it; not negative
    count: Poly  # the number of values of the digit
    # how it determines the task: (grid variable, consecutive values of the digit per value of that variable, negative
    # if they are counted from the end), or None if it does not
    task: tuple[str, int] | None = None


@dataclass(frozen=True)
class Elements:
    """The elements that an access may touch: base + sum of step * digit."""

    base: Poly
    digits: tuple[Digit, ...]


@dataclass(frozen=True)
class Nest:
    """An access: its index, its guards, and the loops around it: the grid axes, then the loops inside the task."""

    index: Expr
    guards: tuple[Inside, ...]
    grid: tuple[Axis, ...]
    axes: tuple[Axis, ...]


@dataclass
class Symbols:
    """The ranges of the parameters, and of subexpressions that depend on parameters only."""

    ranges: dict[str, tuple[int, int]]

    def poly(self, size: Size) -> Poly | None:
        """Return a size, or an expression of parameters, as a polynomial."""
        found = (number(size), {}) if isinstance(size, int) else self.linear(size)
        return None if found is None or found[1] else found[0]

    def linear(self, expr: Expr) -> tuple[Poly, dict[str, Poly]] | None:
        """Return the base of an expression and its step along each loop variable; None if it is not affine."""
        base, steps = number(expr.constant), dict[str, Poly]()
        for atom, coefficient in expr.terms:
            factor = number(coefficient)
            if isinstance(atom, Var) and atom.name not in self.ranges:
                steps[atom.name] = steps.get(atom.name, Poly()) + factor
            elif Expr(0, ((atom, 1),)).variables <= self.ranges.keys():
                base += factor * self._symbol(atom)
            elif isinstance(atom, Times) and (inner := self.linear(atom.expr)) is not None:
                factor *= self._symbol(atom.factor)
                base += factor * inner[0]
                for name, step in inner[1].items():
                    steps[name] = steps.get(name, Poly()) + factor * step
            else:
                return None
        return base, {name: step for name, step in steps.items() if step.terms}

    def _symbol(self, atom: Atom) -> Poly:
        if isinstance(atom, Times):
            inner = self.linear(atom.expr)
            assert inner is not None, "an atom of parameters is a polynomial"
            return self._symbol(atom.factor) * inner[0]
        name = str(atom)
        if name not in self.ranges:
            self.ranges[name] = bounds(Expr(0, ((atom, 1),)), self.ranges)
        return Poly.of([((name,), 1)])

    def where(self, *places: Elements) -> Symbols:
        """Return the parameters narrowed to values for which elements exist: no digit has 0 values."""
        names = [m[0] for p in places for d in p.digits for m, c in d.count.terms if len(d.count.terms) == c == len(m)]
        ranges = {name: (max(self.ranges[name][0], 1), self.ranges[name][1]) for name in names}
        return Symbols({**self.ranges, **ranges})

    def at_most(self, low: Poly, high: Poly) -> bool:
        """Return whether it can be proved that `low` is at most `high`."""
        return (high - low).least(self.ranges) >= 0


# Splitting variables at quotients and remainders


def cut_variables(nests: Sequence[Nest], parameters: Ranges) -> list[Nest]:
    """Return the accesses with loop variables split so that quotients and remainders become variables, if possible.

    The two parts of a split variable may cover more values than before; a grid variable is split for all accesses.
    """
    found = list(nests)
    for _ in range(MOST_CUTS):
        cuts = ((nest, cut) for nest in found if (cut := _cut_of(nest, parameters)) is not None)
        nest, cut = next(cuts, (None, None))
        if nest is None or cut is None:
            break
        is_shared = any(axis.name == cut[0] for axis in nest.grid)
        found = [_cut(n, *cut, parameters) if is_shared or n is nest else n for n in found]
    return found


def _cut_of(nest: Nest, parameters: Ranges) -> tuple[str, int] | None:
    """Return a variable to split because of a quotient or remainder, and the size of its inner part."""
    extents = {axis.name: axis.size for axis in (*nest.grid, *nest.axes)}
    for inner, divisor in _divisions(nest.index):
        for atom, step in sorted(inner.terms, key=lambda term: -abs(term[1])):
            if isinstance(atom, Var) and atom.name in extents and divisor % step == 0:
                size, part = extents[atom.name], abs(divisor // step)
                high = size if isinstance(size, int) else bounds(size, parameters)[1]
                if 1 < part < high:
                    return atom.name, part
    return None


def _divisions(expr: Expr) -> Iterable[tuple[Expr, int]]:
    for atom, _ in expr.terms:
        if isinstance(atom, Quotient | Remainder | Times):
            yield from _divisions(atom.expr)
        if isinstance(atom, Quotient | Remainder):
            yield atom.expr, atom.divisor


def _cut(nest: Nest, name: str, part: int, parameters: Ranges) -> Nest:
    axes: list[Axis] = []
    for axis in (*nest.grid, *nest.axes):
        if axis.ragged is not None and name in (axis.name, axis.ragged[0]):
            axis = replace(axis, ragged=None)
        if axis.name != name:
            axes.append(axis)
            continue
        size = axis.size if isinstance(axis.size, int) else bounds(axis.size, parameters)[1]
        whole: Size = -(-size // part)
        if isinstance(axis.size, Expr):
            whole = Expr(0, ((Quotient(add(axis.size, Expr(part - 1)), part), 1),))
        axes += [Axis(f"{name}/{part}", whole), Axis(f"{name}%{part}", part)]
    ranges = {**parameters, **ranges_of_axes(axes, parameters)}
    values = {name: add(scale(var(f"{name}/{part}"), part), var(f"{name}%{part}"))}
    guards = tuple(replace(guard, expr=substitute(guard.expr, values, ranges)) for guard in nest.guards)
    length = len(nest.grid) + any(axis.name == name for axis in nest.grid)
    return Nest(substitute(nest.index, values, ranges), guards, tuple(axes[:length]), tuple(axes[length:]))


def ranges_of_axes(axes: Iterable[Axis], parameters: Ranges) -> dict[str, tuple[int, int]]:
    """Return the range of each loop variable when its size is the largest that the parameters allow."""
    sizes = {a.name: a.size if isinstance(a.size, int) else bounds(a.size, parameters)[1] for a in axes}
    return {name: (0, max(size - 1, 0)) for name, size in sizes.items()}


# Digits


def place_of(nest: Nest, symbols: Symbols, narrow: bool = False) -> Elements | None:
    """Return the elements that an access may touch; None if its index is not affine.

    `narrow`: let guards narrow the set of elements; digits made from guards then do not determine the task.
    """
    linear = symbols.linear(nest.index)
    if linear is None:
        return None
    base, steps = linear
    digits: list[Digit] = []
    for guard in sorted(nest.guards, key=lambda g: g.high - g.low) if narrow else ():
        base = _narrowed(guard, base, steps, digits, symbols)
    grid = {axis.name for axis in nest.grid}
    for axis in (*nest.grid, *nest.axes):
        if axis.ragged is None or axis.name not in steps:
            continue
        outer, size = axis.ragged
        total, part = symbols.poly(size), symbols.poly(axis.size)
        if total is not None and part is not None and steps.get(outer) == steps[axis.name] * part:
            digits.append(Digit(steps.pop(axis.name), total, (outer, axis.extent) if outer in grid else None))
            del steps[outer]
    for axis in (*nest.grid, *nest.axes):
        if axis.name in steps:
            count = symbols.poly(axis.size)
            if count is None:
                return None
            digits.append(Digit(steps[axis.name], count, (axis.name, 1) if axis.name in grid else None))
    return _positive(base, digits, symbols)


def _positive(base: Poly, digits: Iterable[Digit], symbols: Symbols) -> Elements | None:
    """Return base and digits as elements whose steps are not negative; None if the sign of a step is unknown."""
    found: list[Digit] = []
    for digit in digits:
        if not symbols.at_most(number(0), digit.step):
            if not symbols.at_most(digit.step, number(0)):
                return None
            base += digit.step * (digit.count - number(1))
            task = digit.task and (digit.task[0], -digit.task[1])
            digit = replace(digit, step=digit.step * number(-1), task=task)
        if digit.count != number(1):
            found.append(digit)
    return Elements(base, tuple(found))


def _narrowed(guard: Inside, base: Poly, steps: dict[str, Poly], digits: list[Digit], symbols: Symbols) -> Poly:
    """Replace the variables of a guard by one digit, if the index grows with the guard's expression."""
    linear = symbols.linear(guard.expr)
    if linear is None or not linear[1].keys() <= steps.keys() or not linear[1]:
        return base
    name, step = next(iter(linear[1].items()))
    unit = step.terms[0][1] if step.terms[0][0] == () else 0
    if not unit or any(c % unit for _, c in steps[name].terms):
        return base
    factor = Poly(tuple((m, c // unit) for m, c in steps[name].terms))
    if any(steps[n] != factor * s for n, s in linear[1].items()):
        return base
    for n in linear[1]:
        del steps[n]
    digits.append(Digit(factor, number(guard.high - guard.low)))
    return base + factor * (number(guard.low) - linear[0])


def is_inside(place: Elements, size: Poly, symbols: Symbols) -> bool:
    """Return whether it can be proved that all elements are inside a buffer of `size` elements."""
    symbols, high = symbols.where(place), place.base
    for digit in place.digits:
        high += digit.step * (digit.count - number(1))
    return symbols.at_most(number(0), place.base) and symbols.at_most(high, size - number(1))


def keeps_to_tasks(write: Elements, other: Elements, grid: Sequence[Axis], symbols: Symbols) -> bool:
    """Return whether it can be proved that no two tasks touch the same element, one of them writing.

    The elements of both accesses are written as numbers in one mixed radix. If their digits are unique,
    the accesses meet only where all digits are equal. They never meet if the ranges of one digit are
    disjoint; otherwise they meet within one task if the digits determine every grid variable.
    """
    symbols, offset = symbols.where(write, other), other.base - write.base
    parts = {Poly.of(d.step.terms) for d in (*write.digits, *other.digits)} | ({number(1)} if offset.terms else set())
    steps = _ascending(parts, symbols)
    if steps is None:
        return False
    least = Poly()  # the largest sum of all smaller digits times their steps
    told: set[str] = set()
    disjoint = False
    shifts = _shifts(offset, steps)
    if shifts is None:
        return False
    for step, shift in zip(steps, shifts, strict=True):
        if not symbols.at_most(least + number(1), step):
            return False
        (mine, own), (theirs, foreign) = (_digit(place, step) for place in (write, other))
        ends = _widest(mine, theirs + shift, symbols), _widest(number(0), shift * number(-1), symbols)
        if ends[0] is None or ends[1] is None:
            return False
        least += step * (ends[0] + ends[1])
        disjoint |= symbols.at_most(mine + number(1), shift) or symbols.at_most(theirs + shift + number(1), Poly())
        if own is not None and own == foreign and not shift.terms and (own[1] > 0 or mine == theirs):
            told.add(own[0])
    counts = {axis.name: symbols.poly(axis.size) for axis in grid}
    single = {name for name, count in counts.items() if count and symbols.at_most(count, number(1))}
    return disjoint or counts.keys() <= told | single


def _digit(place: Elements, step: Poly) -> tuple[Poly, tuple[str, int] | None]:
    """Return the greatest value of the digit with a step, and its `task` entry if it is a single digit."""
    found = [digit for digit in place.digits if digit.step == step]
    total = Poly()
    for digit in found:
        total += digit.count - number(1)
    return total, found[0].task if len(found) == 1 else None


def _widest(a: Poly, b: Poly, symbols: Symbols) -> Poly | None:
    if symbols.at_most(a, b):
        return b
    return a if symbols.at_most(b, a) else None


def _ascending(steps: Iterable[Poly], symbols: Symbols) -> list[Poly] | None:
    """Return steps in ascending order; None if two can't be compared."""
    ordered: list[Poly] = []
    for step in steps:
        at = 0
        while at < len(ordered) and symbols.at_most(ordered[at], step):
            at += 1
        if at < len(ordered) and not symbols.at_most(step, ordered[at]):
            return None
        ordered.insert(at, step)
    return ordered


def _shifts(offset: Poly, steps: Sequence[Poly]) -> list[Poly] | None:
    """Return an offset as one digit per step, dividing by the largest step first; None if a rest remains."""
    found: list[Poly] = []
    for step in reversed(steps):
        shift = Poly()
        if len(step.terms) == 1:
            ((monomial, unit),) = step.terms
            coefficient = dict(offset.terms).get(monomial, 0)
            shift = number(int(coefficient / unit))
        offset -= step * shift
        found.append(shift)
    return None if offset.terms else found[::-1]
