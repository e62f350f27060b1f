"""The choice of kernels of a plan that run side by side, with scripted times."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.candidate.lane import Lane, LanePart
from korch.concurrent.lanes import measured_sizes
from korch.concurrent.plan import ConcurrentKernel, concurrent_order, first_choice, verify_concurrent, waits_for
from korch.concurrent.side_by_side import _Search, described, side_by_side
from korch.deadline import Deadline
from korch.errors import InvalidGraphError
from korch.measure.record import Failed, Measured, Record
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import parse_graph
from korch.program.problem import Plan
from korch.program.solve import Solver
from korch.provider.concurrent import ConcurrentProvider
from korch.provider.provider import Kernel
from korch.runtime.program import PlanStep, bind_steps
from korch.search.ledger import Ledger
from korch.target import Target

pytestmark = pytest.mark.usefixtures("many_cores")

CHAINS = """
graph(%0 "x": f32[8], %1 "y": f32[8]) -> (%3 "a", %5 "b")
%2: f32[8] = exp(%0)
%3: f32[8] = tanh(%2)
%4: f32[8] = neg(%1)
%5: f32[8] = abs(%4)
"""


JOINED = """
graph(%0 "x": f32[1,16], %1 "y": f32[1,16]) -> (%5 "a", %7 "b")
%2: f32[1,16] = exp(%0)
%3: f32[1,16] = neg(%1)
%4: f32[1,32] = concat(%2, %3) {axis=1}
%5: f32[1,32] = abs(%4)
%6: f32[1,16] = tanh(%2)
%7: f32[1,16] = abs(%6)
"""


class Toy:
    """Offers every group in its plain layouts."""

    name, version = "toy", "1"

    def offer(self, group: Any, target: Target) -> list[Offer]:
        return [Offer(*group.plain_layouts)]

    def build(self, group: Any, offer: Offer, target: Target) -> Any:
        raise AssertionError("nothing is built here")


class Meter:
    """Costs of kernels on all threads, and times of sets, by the operations that they run."""

    def __init__(self, costs: dict[str, int], time_ns: Callable[[list[list[str]]], Record], threads: int = 2) -> None:
        self.target = Target(threads=threads)
        self.concurrent = ConcurrentProvider([Toy()])  # type: ignore[list-item]
        self.costs = costs
        self.time_ns = time_ns
        self.records: dict[str, Record] = {}
        self.measured: list[list[list[str]]] = []

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        if candidate.provider == "toy":
            return self.costs[candidate.group.body.primitives[0].op], True
        record = self.records.get(candidate.key)
        return (record.time_ns, True) if isinstance(record, Measured) else (0, False)

    def bound_ns(self, candidate: Candidate) -> int:
        return self.cost_ns(candidate)[0]

    def guess_ns(self, candidate: Candidate) -> int:
        return self.bound_ns(candidate)

    def known(self, candidate: Candidate) -> Record | None:
        if candidate.provider == "toy":
            return Measured(self.cost_ns(candidate)[0], ())
        return self.records.get(candidate.key)

    def measure(self, candidates: Sequence[Candidate], end: object = None) -> list[Record]:
        for candidate in candidates:
            lanes = operations(candidate)
            self.measured.append(lanes)
            self.records[candidate.key] = self.time_ns(lanes)
        return [self.records[c.key] for c in candidates]


def operations(candidate: Candidate) -> list[list[str]]:
    """The operations of a set, lane by lane; each part here has one primitive."""
    maker = {p.output: p.op for p in candidate.group.body.primitives}
    names = iter(maker[value] for _, value in candidate.group.body.outputs)
    return [[next(names) for _ in lane.parts] for lane in candidate.offer.lanes]


def longest_lane(alone: dict[str, int]) -> Callable[[list[list[str]]], Record]:
    return lambda lanes: Measured(max(sum(alone[op] for op in lane) for lane in lanes), ())


class Scaled(Meter):
    """Each kernel takes the same time on a number of threads, in a lane or alone."""

    def __init__(self, alone: Callable[[str, int], Record], threads: int) -> None:
        everything = {op: alone(op, threads) for op in COSTS}
        costs = {op: r.time_ns for op, r in everything.items() if isinstance(r, Measured)}
        super().__init__(costs, lambda lanes: Failed("crashed", "unused"), threads)
        self.alone = alone

    def measure(self, candidates: Sequence[Candidate], end: object = None) -> list[Record]:
        for candidate in candidates:
            lanes = operations(candidate)
            self.measured.append(lanes)
            counts = [lane.threads for lane in candidate.offer.lanes]
            times = [[self.alone(op, n) for op in lane] for lane, n in zip(lanes, counts, strict=True)]
            failed = [r for lane in times for r in lane if isinstance(r, Failed)]
            longest_ns = max(sum(r.time_ns for r in lane if isinstance(r, Measured)) for lane in times)
            self.records[candidate.key] = failed[0] if failed else Measured(longest_ns, ())
        return [self.records[c.key] for c in candidates]


def taking(**work_ns: int) -> Callable[[str, int], Record]:
    """Kernels of so much work, which lose 600 ns by each thread."""
    return lambda op, n: Measured(round(work_ns.get(op, 1e9) / n) + 600 * n, ())


def plan_of(text: str, order: Sequence[int] = ()) -> tuple[PrimitiveGraph, list[Candidate]]:
    graph = parse_graph(text.lstrip())
    steps = []
    for p in order or range(len(graph.primitives)):
        group = make_group(graph, [p], [graph.primitives[p].output])
        steps.append(Candidate(group, "toy", Offer(*group.plain_layouts), "1"))
    return graph, steps


def found(text: str, meter: Meter, order: Sequence[int] = ()) -> list[str] | None:
    """Return the plan's kernels, the lanes of sets parted by |."""
    graph, steps = plan_of(text, order)
    plan = side_by_side(graph, steps, Ledger(meter), Deadline())  # type: ignore[arg-type]
    if plan is None:
        return None
    return [step.group.body.primitives[0].op if step.provider == "toy" else lanes_of(step) for step in plan]


def lanes_of(step: Candidate) -> str:
    return "|".join(
        (f"{lane.threads}:" if lane.threads > 1 else "") + "+".join(names)
        for lane, names in zip(step.offer.lanes, operations(step), strict=True)
    )


COSTS = {"exp": 10_000, "tanh": 10_000, "neg": 10_000, "abs": 10_000}


def test_two_chains_run_side_by_side() -> None:
    plan = found(CHAINS, Meter(COSTS, longest_lane(dict.fromkeys(COSTS, 15_000))))
    assert plan is not None
    assert [sorted(step.split("|")) for step in plan] == [["exp", "neg"], ["abs", "tanh"]]


def test_sets_that_wait_for_each_other_are_not_chosen() -> None:
    # exp with abs, and neg with tanh, would save most, but each would wait for the other.
    def time_ns(lanes: list[list[str]]) -> Record:
        if len(lanes) == 1:
            return Measured(15_000, ())
        names = {op for lane in lanes for op in lane}
        return Measured(15_000 if names in ({"exp", "abs"}, {"neg", "tanh"}) else 19_000, ())

    plan = found(CHAINS, Meter(COSTS, time_ns))
    assert plan is not None
    assert sum("|" in step for step in plan) == 1  # 5 us once, not 2 us or 10 us
    assert {frozenset(step.split("|")) for step in plan if "|" in step} <= {
        frozenset({"exp", "abs"}),
        frozenset({"neg", "tanh"}),
    }


def test_no_set_without_gain() -> None:
    meter = Meter(COSTS, longest_lane(dict.fromkeys(COSTS, 20_000)))
    assert found(CHAINS, meter) is None
    assert all(len(lanes) == 1 for lanes in meter.measured)  # none was even proposed


def test_a_set_that_is_slower_than_thought_is_left() -> None:
    def time_ns(lanes: list[list[str]]) -> Record:
        return Measured(15_000 if len(lanes) == 1 else 21_000, ())

    meter = Meter(COSTS, time_ns)
    assert found(CHAINS, meter) is None
    assert any(len(lanes) == 2 for lanes in meter.measured)


def test_what_fails_is_left() -> None:
    def time_ns(lanes: list[list[str]]) -> Record:
        is_out = len(lanes) > 1 or "exp" in lanes[0]
        return Failed("crashed", "so it does") if is_out else Measured(15_000, ())

    assert found(CHAINS, Meter(COSTS, time_ns)) is None


def test_a_kernel_that_is_faster_on_one_thread_is_alone() -> None:
    alone = {"exp": 1_000, "tanh": 20_000, "neg": 20_000, "abs": 20_000}
    plan = found(
        """
graph(%0 "x": f32[8]) -> (%2 "a")
%1: f32[8] = exp(%0)
%2: f32[8] = tanh(%1)
""",
        Meter({**COSTS, "exp": 1_500}, longest_lane(alone)),
    )
    assert plan == ["exp", "tanh"]


def test_a_long_kernel_beside_two_short_ones() -> None:
    costs = {"exp": 20_000, "neg": 10_000, "abs": 10_000}
    alone = {"exp": 31_000, "neg": 15_000, "abs": 15_000}
    plan = found(
        """
graph(%0 "x": f32[8]) -> (%1 "a", %2 "b", %3 "c")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%0)
%3: f32[8] = abs(%0)
""",
        Meter(costs, longest_lane(alone)),
    )
    assert plan == ["exp|neg+abs"]


def test_as_many_lanes_as_threads() -> None:
    alone = dict.fromkeys(COSTS, 25000)
    text = """
graph(%0 "x": f32[8]) -> (%1 "a", %2 "b", %3 "c", %4 "d")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%0)
%3: f32[8] = abs(%0)
%4: f32[8] = tanh(%0)
"""
    plan = found(text, Meter(COSTS, longest_lane(alone), threads=4))
    assert plan is not None and len(plan) == 1 and plan[0].count("|") == 3
    assert found(text, Meter(COSTS, longest_lane(alone), threads=3)) != plan


def test_long_kernels_and_one_thread_are_left_alone() -> None:
    meter = Meter(dict.fromkeys(COSTS, 10_000_000), longest_lane(dict.fromkeys(COSTS, 1)))
    assert found(CHAINS, meter) is None and not meter.measured
    meter = Meter(COSTS, longest_lane(dict.fromkeys(COSTS, 1)), threads=1)
    assert found(CHAINS, meter) is None and not meter.measured


def test_nothing_is_measured_when_time_is_over() -> None:
    graph, steps = plan_of(CHAINS)
    meter, deadline = Meter(COSTS, longest_lane(dict.fromkeys(COSTS, 15_000))), Deadline()
    deadline.stop()
    assert side_by_side(graph, steps, Ledger(meter), deadline) is None  # type: ignore[arg-type]
    assert not meter.measured


def test_sets_are_not_proposed_when_time_is_over_before() -> None:
    graph, steps = plan_of(CHAINS)
    meter, deadline = Meter(COSTS, longest_lane(dict.fromkeys(COSTS, 9_000))), Deadline()
    measure = meter.measure

    def measure_until_time_is_over(candidates: Sequence[Candidate], end: object) -> list[Record]:
        records = measure(candidates)
        deadline.stop()
        return records

    meter.measure = measure_until_time_is_over  # type: ignore[method-assign]
    plan = side_by_side(graph, steps, Ledger(meter), deadline)  # type: ignore[arg-type]
    assert plan is not None
    assert [operations(step) for step in plan] == [[["exp"]], [["tanh"]], [["neg"]], [["abs"]]]


@pytest.mark.parametrize(("left_s", "seconds"), [(None, 8.0), (100.0, 8.0), (10.0, 2.0), (3.0, 1.0), (0.0, 1.0)])
def test_a_choice_leaves_time_to_measure_sets(
    left_s: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    graph, steps = plan_of(CHAINS)
    meter: Any = Meter(COSTS, longest_lane(COSTS))
    deadline = Deadline() if left_s is None else Deadline(1000.0 + left_s)
    search = _Search(graph, steps, Ledger(meter), deadline)
    assert search._solve_seconds() == seconds


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 3, 0, 1)])
def test_the_order_is_kept_and_sets_come_where_their_last_part_did(order: tuple[int, ...]) -> None:
    def time_ns(lanes: list[list[str]]) -> Record:
        names = {op for lane in lanes for op in lane}
        is_good = len(lanes) == 1 or names == {"exp", "neg"}
        return Measured(15_000 if is_good else 30_000, ())

    plan = found(CHAINS, Meter(COSTS, time_ns), order)
    assert plan is not None
    assert sorted(plan[0].split("|")) == ["exp", "neg"]
    names = ["exp", "tanh", "neg", "abs"]
    assert plan[1:] == [names[p] for p in order if names[p] in ("tanh", "abs")]


def test_sets_are_taken_in_turn_if_they_go_with_those_before() -> None:
    # 0 -> 1 and 2 -> 3: sets across the chains would wait for each other.
    assert first_choice(BEFORE, [(0, 3), (1, 2)]) == [0]
    assert first_choice(BEFORE, [(1, 2), (0, 3)]) == [0]
    assert first_choice(BEFORE, [(0, 2), (0, 3), (1, 3)]) == [0, 2]
    assert first_choice(BEFORE, [(0, 1), (2,), (3, 2)]) == [1]
    chains = [0, 0b1, 0b11, 0, 0b1000, 0b11000, 0, 0b1000000, 0b11000000]
    # Through a third set: 0 before 1 with 4, 4 before 5 with 7, 7 before 8 with 0.
    assert first_choice(chains, [(1, 4), (5, 7), (8, 0), (2, 8)]) == [0, 1, 3]


def test_what_is_taken_in_turn_has_an_order(rng: np.random.Generator) -> None:
    refused = 0
    for _ in range(40):
        before: list[int] = []
        for i in range(12):
            direct = [k for k in range(i) if rng.random() < 0.15]
            before.append(sum(1 << k for k in direct) | sum_of(before[k] for k in direct))
        sets = [tuple(map(int, rng.choice(12, 2, replace=False))) for _ in range(20)]
        kept = first_choice(before, sets)
        for s in range(len(sets)):
            own = [sets[n] for n in kept if n < s] + [sets[s]]
            assert (s in kept) == has_order(before, own)
            refused += s not in kept
    assert refused


def sum_of(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def has_order(before: Sequence[int], sets: Sequence[tuple[int, ...]]) -> bool:
    """Whether sets have no kernel in common, none waits for another of its own, and all have an order."""
    gone = [i for places in sets for i in places]
    if len(set(gone)) < len(gone) or any(before[i] >> k & 1 for places in sets for i in places for k in places):
        return False
    try:
        concurrent_order(before, [*((i,) for i in range(len(before)) if i not in gone), *sets])
    except InvalidGraphError:
        return False
    return True


def test_the_solver_begins_with_sets_taken_in_turn() -> None:
    graph, steps = plan_of(CHAINS)
    meter: Any = Meter(COSTS, longest_lane(dict.fromkeys(COSTS, 15_000)))
    search, hints = _Search(graph, steps, Ledger(meter), Deadline()), []

    class Solved(Ledger):
        def solve(self, solver: Solver, costs_ns: Sequence[int], **limits: Any) -> Plan:
            hints.append(len(limits["hint"]))
            return super().solve(solver, costs_ns, **limits)

    search.ledger = Solved(meter)
    search.kernels.ledger = search.ledger
    search.choose()
    assert hints and all(count < len(steps) for count in hints)  # not the plan without sets


def test_waiting_goes_over_others() -> None:
    graph, steps = plan_of(CHAINS, (0, 2, 1, 3))
    assert waits_for(graph, steps) == [0, 0, 0b1, 0b10]
    graph, steps = plan_of("""
graph(%0 "x": f32[8]) -> (%3 "a")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%1)
%3: f32[8] = abs(%2)
""")
    assert waits_for(graph, steps) == [0, 0b1, 0b11]


def test_what_a_plan_has_of_sets_is_described() -> None:
    part = LanePart("toy", "", 1)
    step = SimpleNamespace(offer=SimpleNamespace(lanes=(Lane((part,), 3), Lane((part, part)))))
    other = SimpleNamespace(offer=SimpleNamespace(lanes=()))
    assert described([step, other, step]) == (2, 6)  # type: ignore[list-item]


def test_who_reads_a_concatenation_in_place_waits_for_those_who_write_its_parts() -> None:
    graph, steps = plan_of(JOINED)
    joined = replace(steps[2], provider="in place", offer=replace(steps[2].offer, is_in_place=True))
    steps[2] = joined
    assert waits_for(graph, steps) == [0, 0, 0b11, 0b111, 0b1, 0b10001]
    costs = dict.fromkeys(("exp", "neg", "concat", "abs", "tanh"), 10_000)
    meter = Meter(costs, longest_lane(dict.fromkeys(costs, 6000)))
    meter.records[joined.key] = Measured(0, ())
    found = side_by_side(graph, steps, Ledger(meter), Deadline())  # type: ignore[arg-type]
    assert found is not None and joined in found
    assert not any("concat" in op for lanes in meter.measured for lane in lanes for op in lane)
    place = found.index(joined)
    written = {value for step in found[:place] for value in step.group.outputs}
    assert written.issuperset(joined.group.inputs)
    program = bind_steps(
        graph,
        [
            PlanStep(c, Kernel("" if c is joined else f"k{i}", "", workspace_bytes=64 * (c is not joined)))
            for i, c in enumerate(found)
        ],
    )
    assert program.arena.size_bytes > 0


TWO = """
graph(%0 "x": f32[8]) -> (%1 "a", %2 "b")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%0)
"""


@pytest.mark.parametrize(
    ("threads", "exp_ns", "neg_ns", "plan"),
    [
        (8, 90_000, 30_000, "6:exp|2:neg"),
        (8, 60_000, 60_000, "4:exp|4:neg"),
        (8, 30_000, 90_000, "6:neg|2:exp"),
        (8, 140_000, 20_000, "7:exp|neg"),
        (4, 90_000, 30_000, "3:exp|neg"),
        (4, 60_000, 60_000, "2:exp|2:neg"),
        (3, 60_000, 30_000, "2:exp|neg"),
        (2, 30_000, 30_000, "exp|neg"),
        (16, 90_000, 30_000, "12:exp|4:neg"),
    ],
)
def test_threads_are_shared_by_work(threads: int, exp_ns: int, neg_ns: int, plan: str) -> None:
    meter = Scaled(taking(exp=exp_ns, neg=neg_ns), threads)
    assert [sorted(step.split("|")) for step in found(TWO, meter) or []] == [sorted(plan.split("|"))]
    assert sum(len(lanes) == 1 for lanes in meter.measured) == 2 * len(measured_sizes(threads))
    assert sum(len(lanes) > 1 for lanes in meter.measured) <= 3


def test_a_kernel_that_gains_nothing_by_threads_has_one() -> None:
    def alone(op: str, threads: int) -> Record:
        return Measured(12_000 if op == "neg" else round(84_000 / threads), ())

    assert found(TWO, Scaled(alone, 8)) in (["7:exp|neg"], ["neg|7:exp"])


def test_a_kernel_that_is_fastest_on_half_of_the_threads_leaves_the_others_idle() -> None:
    def alone(op: str, threads: int) -> Record:
        return Measured({1: 30_000, 4: 10_000}.get(threads, 20_000), ())

    text = """
graph(%0 "x": f32[8]) -> (%2 "a")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%1)
"""
    assert found(text, Scaled(alone, 8)) == ["4:exp", "4:neg"]


def test_kernels_that_fail_on_several_threads_have_one() -> None:
    def alone(op: str, threads: int) -> Record:
        if 1 < threads < 8:
            return Failed("refused", "it calls a library")
        return Measured(15_000 if threads == 1 else 10_000, ())

    meter = Scaled(alone, 8)
    assert found(TWO, meter) in (["exp|neg"], ["neg|exp"])
    assert all(lanes == 1 for each in meter.measured for lanes in map(len, each))


def test_a_kernel_of_one_thread_beside_others_in_turn_on_the_rest() -> None:
    def alone(op: str, threads: int) -> Record:
        return Measured(30_000 if op == "exp" else round(98_000 / threads), ())

    text = """
graph(%0 "x": f32[8]) -> (%1 "a", %2 "b", %3 "c")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%0)
%3: f32[8] = abs(%0)
"""
    assert found(text, Scaled(alone, 8)) in (["exp|7:neg+abs"], ["exp|7:abs+neg"])


def test_four_branches_have_a_quarter_each() -> None:
    text = """
graph(%0 "x": f32[8]) -> (%1 "a", %2 "b", %3 "c", %4 "d")
%1: f32[8] = exp(%0)
%2: f32[8] = neg(%0)
%3: f32[8] = abs(%0)
%4: f32[8] = tanh(%0)
"""
    meter = Scaled(taking(**dict.fromkeys(COSTS, 40_000)), 8)
    plan = found(text, meter)
    assert plan is not None and len(plan) == 1
    assert [lane[:2] for lane in plan[0].split("|")] == ["2:"] * 4


GOOD = (ConcurrentKernel(((0,), (2,)), (1, 1)), ConcurrentKernel(((1,), (3,)), (1, 1)))
BEFORE = [0, 0b1, 0, 0b100]
"""Two chains of two kernels: 0, 1 and 2, 3."""


def test_a_concurrent_plan_is_verified() -> None:
    verify_concurrent(BEFORE, GOOD, threads=2)
    verify_concurrent(BEFORE, [ConcurrentKernel(((0, 1), (2, 3)), (1, 1))], threads=2)


@pytest.mark.parametrize(
    ("kernels", "threads", "message"),
    [
        (GOOD[::-1], 2, "kernel 1 needs kernel 0"),
        (GOOD, 1, "threads of 1"),
        ([replace(GOOD[0], threads=(2, 0)), GOOD[1]], 2, "threads of 2"),
        ([replace(GOOD[0], threads=(2,)), GOOD[1]], 2, "no number of threads"),
        ([replace(GOOD[0], lanes=((0,), ())), GOOD[1]], 2, "a lane has no kernels"),
        (GOOD[:1], 2, r"kernels \[1, 3\] of the plan do not run"),
        ([*GOOD, GOOD[0]], 2, "kernel 0 runs twice"),
        ([ConcurrentKernel(((0,), (1,)), (1, 1)), ConcurrentKernel(((2, 3),), (2,))], 2, "kernel 1 needs kernel 0"),
        ([ConcurrentKernel(((1, 0), (2, 3)), (1, 1))], 2, "kernel 1 needs kernel 0"),
    ],
)
def test_a_wrong_concurrent_plan_is_refused(kernels: Sequence[ConcurrentKernel], threads: int, message: str) -> None:
    with pytest.raises(InvalidGraphError, match=message):
        verify_concurrent(BEFORE, kernels, threads)
