"""Index expressions are equal to plain arithmetic at every point of their ranges, and stay within bounds."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from korch.candidate.layout import Layout
from korch.tile.ir.index import (
    Choice,
    Expr,
    Quotient,
    Remainder,
    TableEntry,
    Var,
    add,
    bounds,
    breakpoints,
    choice,
    coarsened,
    constant,
    entry,
    quotient,
    remainder,
    scale,
    substitute,
    turning_point,
    var,
    vector_step,
)
from korch.tile.lower.emit import physical_offset

NAMES = ("a", "b", "c")
RANGES = st.tuples(*(st.integers(1, 6) for _ in NAMES)).map(
    lambda extents: {name: (0, n - 1) for name, n in zip(NAMES, extents, strict=True)}
)
POWERS = st.sampled_from((-24, -6, -3, -2, -1, 0, 1, 2, 3, 4, 5, 8, 12, 24))
AFFINE = st.tuples(st.integers(-7, 7), POWERS, POWERS, POWERS)


def affine(numbers):
    offset, *steps = numbers
    terms = (scale(var(name), step) for name, step in zip(NAMES, steps, strict=True))
    return add(constant(offset), *terms)


def value(expr: Expr, point: dict[str, int]) -> int:
    """The plain meaning, written apart from the interpreter."""
    return expr.constant + sum(k * atom_value(atom, point) for atom, k in expr.terms)


def atom_value(atom, point):
    match atom:
        case Var(name):
            return point[name]
        case Quotient(inner, divisor):
            return math.floor(value(inner, point) / divisor)
        case Remainder(inner, divisor):
            return value(inner, point) - divisor * math.floor(value(inner, point) / divisor)
        case TableEntry(table, inner):
            return table[value(inner, point)]
        case Choice(inner, cases, otherwise):
            at = value(inner, point)
            return value(next((p for limit, p in cases if at < limit), otherwise), point)


def points(ranges):
    names = list(ranges)
    for numbers in itertools.product(*(range(low, high + 1) for low, high in ranges.values())):
        yield dict(zip(names, numbers, strict=True))


def check(expr, ranges, expected):
    low, high = bounds(expr, ranges)
    for point in points(ranges):
        found = value(expr, point)
        assert found == expected(point), (str(expr), point)
        assert low <= found <= high


@settings(max_examples=60, deadline=None)
@given(RANGES, AFFINE, st.integers(1, 24), st.integers(1, 8))
def test_quotients_and_remainders(ranges, numbers, divisor, other):
    expr = affine(numbers)
    whole, rest = quotient(expr, divisor, ranges), remainder(expr, divisor, ranges)
    check(whole, ranges, lambda p: value(expr, p) // divisor)
    check(rest, ranges, lambda p: value(expr, p) % divisor)
    check(add(scale(whole, divisor), rest), ranges, lambda p: value(expr, p))
    check(quotient(whole, other, ranges), ranges, lambda p: value(expr, p) // divisor // other)
    check(remainder(whole, other, ranges), ranges, lambda p: value(expr, p) // divisor % other)
    check(quotient(rest, other, ranges), ranges, lambda p: value(expr, p) % divisor // other)
    check(remainder(rest, other, ranges), ranges, lambda p: value(expr, p) % divisor % other)


@settings(max_examples=100, deadline=None)
@given(RANGES, AFFINE, st.integers(-40, 40), st.integers(0, 60))
def test_a_condition_stays_true_where_what_cannot_decide_it_is_left_out(ranges, numbers, low, size):
    expr = affine(numbers)
    coarse, begin, end = coarsened(expr, low, low + size, ranges)
    for point in points(ranges):
        is_inside = low <= value(expr, point) < low + size
        assert is_inside == (begin <= value(coarse, point) < end), (str(expr), str(coarse), point)


def test_a_place_in_a_block_does_not_decide_which_block_it_is():
    ranges = {"a": (0, 1), "b": (0, 1), "c": (0, 31)}
    expr = add(scale(var("a"), 64), scale(var("b"), 32), var("c"))
    coarse, low, high = coarsened(expr, 32, 64, ranges)
    assert (str(coarse), low, high) == ("2*a + b", 1, 2)
    assert coarsened(expr, 33, 64, ranges)[0] == expr


@settings(max_examples=60, deadline=None)
@given(RANGES, AFFINE, AFFINE, st.integers(-9, 9), st.lists(st.integers(-30, 30), max_size=3))
def test_sums_and_choices(ranges, first, second, factor, limits):
    a, b = affine(first), affine(second)
    check(add(a, scale(b, factor)), ranges, lambda p: value(a, p) + factor * value(b, p))
    cases = [(limit, add(a, constant(i))) for i, limit in enumerate(sorted(limits))]

    def expected(p):
        then = next((e for limit, e in cases if value(b, p) < limit), a)
        return value(then, p)

    check(choice(b, cases, a, ranges), ranges, expected)


@settings(max_examples=60, deadline=None)
@given(RANGES, st.integers(1, 4), st.integers(0, 5), st.data())
def test_entries(ranges, step, law, data):
    expr = add(scale(var("a"), step), var("b"))
    most = bounds(expr, ranges)[1]
    tables = (
        st.just([3 - 2 * i for i in range(most + 1)]),
        st.just([5 + i // 3 for i in range(most + 1)]),
        st.just([7 + i // 2 for i in range(most + 1)]),
        st.just([0] * (most + 1)),
        st.lists(st.integers(-9, 9), min_size=most + 1, max_size=most + 1),
        st.lists(st.integers(0, 1), min_size=most + 1, max_size=most + 1),
    )
    table = data.draw(tables[law])
    check(entry(table, expr, ranges), ranges, lambda p: table[value(expr, p)])


@settings(max_examples=60, deadline=None)
@given(RANGES, AFFINE, st.integers(1, 12), st.integers(1, 12), AFFINE)
def test_substitution(ranges, numbers, divisor, tile, inside):
    """Replacing a variable means the same as computing it first."""
    extent = ranges["a"][1] + 1
    tiled = {**ranges, "o": (0, -(-extent // tile) - 1), "a": (0, tile - 1)}
    whole = add(scale(var("o"), tile), var("a"))
    reach = {**ranges, "a": bounds(whole, tiled)}
    expr = add(
        quotient(affine(numbers), divisor, reach),
        remainder(affine(inside), divisor, reach),
        choice(affine(numbers), [(3, var("a"))], var("b"), reach),
    )
    replaced = substitute(expr, {"a": whole}, tiled)
    check(replaced, tiled, lambda p: value(expr, {**p, "a": value(whole, p)}))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(-5, 5), st.integers(-9, 9), st.integers(-40, 40))
def test_turning_points_are_where_a_comparison_changes(extent, slope, offset, limit):
    expr = add(scale(var("a"), slope), constant(offset))
    changes = {a for a in range(1, extent) if (value(expr, {"a": a}) < limit) != (value(expr, {"a": a - 1}) < limit)}
    found = turning_point(expr, limit, "a")
    assert {a for a in found if 0 < a < extent} == changes
    ranges = {"a": (0, extent - 1)}
    held = choice(expr, [(limit, var("a"))], constant(-1), ranges)
    if any(isinstance(atom, Choice) for atom, _ in held.terms):
        assert changes <= breakpoints(held, "a", ranges)
    else:
        assert not changes


def test_a_turning_point_of_several_variables_is_unknown():
    assert turning_point(add(var("a"), var("b")), 3, "a") == set()


def test_simplifications_that_loops_rely_on():
    ranges = {"a": (0, 7), "b": (0, 15)}
    flat = add(scale(var("a"), 16), var("b"))
    assert quotient(flat, 16, ranges) == var("a")
    assert remainder(flat, 16, ranges) == var("b")
    split = add(scale(quotient(flat, 24, ranges), 24), remainder(flat, 24, ranges))
    assert split == flat
    assert entry([0, 0, 1, 1, 2, 2, 3, 3], var("a"), ranges) == quotient(var("a"), 2, ranges)
    assert str(entry([2, 0, 1, 3, 4, 6, 5, 7], var("a"), ranges)) == "table[2, 0, 1, 3, 4, 6, 5, 7][a]"
    assert flat.coefficient("a") == 16
    assert quotient(var("a"), 2, ranges).coefficient("a") is None


@pytest.mark.parametrize("text", ["abcd", "acdb", "dcba", "aBcd4b", "ABcd2a4b", "ABcd4b2a2b"])
def test_physical_offsets_are_those_of_packing(text):
    shape = (3, 10, 2, 3)
    layout = Layout.parse(text)
    ranges = {f"d{a}": (0, n - 1) for a, n in enumerate(shape)}
    offset = physical_offset(layout, shape, tuple(map(var, ranges)), ranges)
    packed = layout.pack(np.arange(1, math.prod(shape) + 1).reshape(shape)).reshape(-1)
    for point in points(ranges):
        place = value(offset, point)
        assert packed[place] == 1 + np.ravel_multi_index(tuple(point.values()), shape)


WIDE = {"m": (0, 4), "n": (0, 511)}


@pytest.mark.parametrize(
    ("expr", "step"),
    [
        (add(scale(var("m"), 7), var("n"), Expr(3)), 1),
        (var("m"), 0),
        (scale(var("n"), 2), 2),
        (quotient(var("n"), 64, WIDE), 0),
        (remainder(add(var("n"), scale(var("m"), 16)), 64, WIDE), 1),
        (remainder(add(var("n"), scale(var("m"), 8)), 64, WIDE), None),
        (remainder(var("n"), 24, WIDE), None),
        (entry((3, 1, 2), var("n"), {"n": (0, 2)}), None),
    ],
)
def test_steps_inside_of_whole_vectors(expr, step):
    assert vector_step(expr, "n", 16) == step
    if step is not None:
        for m, n in itertools.product(range(5), range(0, 512, 16)):
            values = [value(expr, {"m": m, "n": n + lane}) for lane in range(16)]
            assert values == [values[0] + step * lane for lane in range(16)]
