"""The plan with the least fitted cost at each size, read from a table and computed."""

import itertools
from dataclasses import replace

import pytest

from korch.ranges.cost import Cost, Term
from korch.ranges.form import Dimension
from korch.ranges.plan import AtSizes, RangePlan
from korch.runtime import choice
from korch.runtime.choice import PlanChoice

DIMENSIONS = (Dimension("batch", None, 2, 9), Dimension("length", None, 1, 40))


def plan(sizes: tuple[int, int], *costs: tuple[float, float, int]) -> RangePlan:
    """A plan whose kernels take a constant time and one for each element of the rounded length."""
    made = (Cost((1, 1), (Term((0, 0), start), Term((0, 1), rise)), step=step) for start, rise, step in costs)
    return RangePlan(sizes, (), (), costs=tuple(made))


PLANS = (plan((4, 16), (5.0, 1.0, 1)), plan((9, 40), (1.0, 2.0, 1), (1.0, 1.0, 1)), plan((9, 40), (3.0, 1.5, 16)))


@pytest.mark.parametrize("most", [choice.MOST_ENTRIES, 10], ids=["table", "computed"])
def test_the_cheapest_plan_that_is_large_enough_is_taken(monkeypatch, most: int) -> None:
    monkeypatch.setattr(choice, "MOST_ENTRIES", most)
    found, taken = PlanChoice(DIMENSIONS, PLANS), set()
    for sizes in itertools.product(range(2, 10), range(1, 41)):
        able = [i for i, p in enumerate(PLANS) if p.sizes[0] >= sizes[0] and p.sizes[1] >= sizes[1]]
        best = min(able, key=lambda i: PLANS[i].cost_ns(sizes))
        assert found.number(sizes) == best
        taken.add(best)
    assert taken == {0, 1, 2}


def test_a_plan_without_costs_is_not_the_cheapest_everywhere() -> None:
    found = PlanChoice(DIMENSIONS, [plan((4, 16), (5.0, 1.0, 1)), plan((9, 40))])
    assert [found.number(sizes) for sizes in ((4, 16), (5, 16), (4, 17))] == [0, 1, 1]


def test_without_costs_the_first_plan_that_is_large_enough_is_taken() -> None:
    found = PlanChoice(DIMENSIONS, [plan((4, 16)), plan((9, 40))])
    assert [found.number(sizes) for sizes in ((4, 16), (5, 16), (4, 17))] == [0, 1, 1]


@pytest.mark.parametrize("most", [choice.MOST_ENTRIES, 10], ids=["table", "computed"])
def test_at_a_measured_size_a_plan_is_taken_that_is_among_the_best_there(monkeypatch, most: int) -> None:
    monkeypatch.setattr(choice, "MOST_ENTRIES", most)
    fast, slow = plan((9, 40), (1.0, 1.0, 1)), plan((9, 40), (2.0, 1.0, 1))
    fast = replace(fast, measured=(AtSizes((2, 5), 110, 100, 50), AtSizes((2, 6), 104, 100, 50)))
    slow = replace(slow, measured=(AtSizes((2, 5), 100, 100, 50), AtSizes((2, 6), 100, 100, 50)))
    found = PlanChoice(DIMENSIONS, [plan((4, 16), (9.0, 9.0, 1)), fast, slow])
    assert [found.number(sizes) for sizes in ((2, 4), (2, 5), (2, 6), (3, 5))] == [1, 2, 1, 1]


@pytest.mark.parametrize("most", [choice.MOST_ENTRIES, 10], ids=["table", "computed"])
def test_runs_are_those_of_all_sizes(monkeypatch, most: int) -> None:
    monkeypatch.setattr(choice, "MOST_ENTRIES", most)
    measured = replace(PLANS[2], measured=(AtSizes((2, 5), 110, 100, 50),))
    found = PlanChoice(DIMENSIONS, [PLANS[0], replace(PLANS[1], measured=(AtSizes((2, 5), 50, 100, 50),)), measured])
    listed: list[int] = []
    for (begin, number), (end, _) in itertools.pairwise([*found.runs(), (320, 0)]):
        listed += [number] * (end - begin)
    assert listed == [found.number(sizes) for sizes in itertools.product(range(2, 10), range(1, 41))]
    assert PlanChoice(DIMENSIONS, PLANS[1:2]).runs() == [(0, 0)]
    monkeypatch.setattr(choice, "MOST_LISTED", 100)
    assert found.runs() == [(0, 2)]
