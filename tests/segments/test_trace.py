"""The trace of a search in segments, compared with sums that are computed by hand."""

from korch.binary_program.problem import Certificate, Status
from korch.search.result import Orchestration, Round
from korch.segments.trace import SearchTrace, changed_rounds


def found(objective_ns: int, bound_ns: int, measured: int = 5) -> Orchestration:
    certificate = Certificate(Status.FEASIBLE, objective_ns, bound_ns, 9, 9, is_measured=True)
    rounds = (Round(bound_ns, objective_ns, measured, 1.0),)
    return Orchestration((), certificate, (), rounds, measured, 0, stopped_by_budget=False)


def state(trace: SearchTrace) -> tuple[int, int | None, int]:
    last = trace.rounds[-1]
    return last.bound_ns, last.incumbent_ns, last.measured


def test_a_model_gains_what_its_blocks_gain_as_often_as_they_are_there() -> None:
    trace = SearchTrace({0: 3, 1: 1})
    trace.record_block(0, {0: found(100, 40, measured=7), 1: found(90, 50)})
    assert state(trace) == (3 * 40, None, 7)  # nothing is known of what was not explored
    trace.record_block(1, {0: found(30, 10)})
    assert state(trace) == (3 * 40 + 10, None, 12)
    trace.record_block(2, {0: found(30, 20)})  # it need not run
    assert state(trace) == (3 * 40 + 10, None, 12)
    both = {(0, 0): found(100, 40), (0, 1): found(90, 50), (1, 0): found(30, 10)}
    trace.record_choice({(0, 1): 3, (1, 0): 1}, both, objective_ns=310, bound_ns=140)
    assert state(trace) == (140, 310, 12)  # a choice knows of changes of layout, too
    trace.record_round((0, 1), Round(55, 80, 20, 1.0))
    assert state(trace) == (140, 310 - 3 * 10, 25)
    trace.record_round((0, 0), Round(60, 60, 20, 1.0))  # not chosen: it only raises the bound
    assert state(trace) == (3 * 55 + 10, 280, 25)
    trace.record_round((0, 1), Round(0, 85, 20, 1.0))  # a search that begins anew takes nothing back
    assert state(trace) == (3 * 55 + 10, 280, 25)
    trace.record_round((1, 0), Round(400, 30, 20, 1.0))
    assert state(trace)[0] == 280  # a bound is never above a plan


def test_a_search_expects_what_estimates_say_between_bound_and_plan() -> None:
    trace = SearchTrace({0: 1})
    trace.record_estimate(None, expected_ns=70)
    assert (trace.rounds[-1].incumbent_ns, trace.rounds[-1].expected_ns) == (None, 70)
    trace.record_estimate(90, expected_ns=120)
    assert (trace.rounds[-1].incumbent_ns, trace.rounds[-1].expected_ns) == (90, 90)
    trace.record_block(0, {0: found(95, 60)})
    trace.record_estimate(95, expected_ns=50)  # the plan of before is still there
    assert (trace.rounds[-1].incumbent_ns, trace.rounds[-1].expected_ns) == (90, 60)


def test_searches_are_kept_by_block_without_rounds_that_brought_nothing() -> None:
    trace = SearchTrace({0: 1, 1: 1})
    trace.record_search((1, 2), "first", 0.5, found(3, 1), is_recalled=True)
    assert trace.of_block(0) == ()
    (search,) = trace.of_block(1)
    assert (search.interface, search.what, search.is_recalled) == (2, "first", True)
    assert search.rounds[0].incumbent_ns == 3
    same = [Round(1, None, i, float(i)) for i in range(3)]
    better = [Round(1, 9, 4, 4.0), Round(2, 9, 5, 5.0), Round(2, 9, 6, 6.0), Round(2, 9, 7, 7.0)]
    assert changed_rounds([*same, *better]) == (same[0], better[0], better[1], better[3])
    assert changed_rounds([]) == ()
