"""The story of a search in segments, against sums by hand."""

from __future__ import annotations

from korch.assembly.trace import Story, moving
from korch.program.problem import Certificate, Status
from korch.search.lazy import Orchestration, Round


def found(objective_ns: int, bound_ns: int, measured: int = 5) -> Orchestration:
    certificate = Certificate(Status.FEASIBLE, objective_ns, bound_ns, 9, 9, is_measured=True)
    rounds = (Round(bound_ns, objective_ns, measured, 1.0),)
    return Orchestration((), certificate, (), rounds, 9, measured, 0, stopped_by_budget=False)


def state(story: Story) -> tuple[int, int | None, int]:
    last = story.rounds[-1]
    return last.bound_ns, last.incumbent_ns, last.measured


def test_a_model_gains_what_its_blocks_gain_as_often_as_they_are_there() -> None:
    story = Story({0: 3, 1: 1})
    story.surveyed(0, {0: found(100, 40, measured=7), 1: found(90, 50)})
    assert state(story) == (3 * 40, None, 7)  # of what is not surveyed nothing is known
    story.surveyed(1, {0: found(30, 10)})
    assert state(story) == (3 * 40 + 10, None, 12)
    story.surveyed(2, {0: found(30, 20)})  # it need not run
    assert state(story) == (3 * 40 + 10, None, 12)
    both = {(0, 0): found(100, 40), (0, 1): found(90, 50), (1, 0): found(30, 10)}
    story.chose({(0, 1): 3, (1, 0): 1}, both, objective_ns=310, bound_ns=140)
    assert state(story) == (140, 310, 12)  # a choice knows of changes of layout, too
    story.heard((0, 1), Round(55, 80, 20, 1.0))
    assert state(story) == (140, 310 - 3 * 10, 25)
    story.heard((0, 0), Round(60, 60, 20, 1.0))  # not chosen: it only raises the bound
    assert state(story) == (3 * 55 + 10, 280, 25)
    story.heard((0, 1), Round(0, 85, 20, 1.0))  # a search that begins anew takes nothing back
    assert state(story) == (3 * 55 + 10, 280, 25)
    story.heard((1, 0), Round(400, 30, 20, 1.0))
    assert state(story)[0] == 280  # a bound is never above a plan


def test_searches_are_kept_by_block_without_rounds_that_brought_nothing() -> None:
    story = Story({0: 1, 1: 1})
    story.searched((1, 2), "survey", 0.5, found(3, 1), is_recalled=True)
    assert story.of_block(0) == []
    (search,) = story.of_block(1)
    assert (search["interface"], search["what"], search["recalled"]) == (2, "survey", True)
    assert search["rounds"][0]["incumbent_ns"] == 3
    same = [Round(1, None, i, float(i)) for i in range(3)]
    better = [Round(1, 9, 4, 4.0), Round(2, 9, 5, 5.0), Round(2, 9, 6, 6.0), Round(2, 9, 7, 7.0)]
    assert moving([*same, *better]) == (same[0], better[0], better[1], better[3])
    assert moving([]) == ()
