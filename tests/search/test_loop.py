"""The search of one instance with scripted costs: plans are compared with the optimum of all true costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from korch.binary_program.problem import Status
from korch.binary_program.solve import solve
from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import enumerate_groups
from korch.costs.calibrated import ScoreTail
from korch.costs.rates import Rates
from korch.errors import InfeasibleError, UnprovidedError
from korch.limits import SearchLimits
from korch.measure.meter import SPREAD
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.provider.generated import GeneratedProvider
from korch.search.infeasible import check_every_primitive_runs
from korch.search.instance import Answers, Instance, collect_candidates
from korch.search.ledger import Ledger
from korch.search.loop import Search
from korch.search.measure import confirm
from korch.search.price import calibrated
from korch.search.propose import of_each_kind
from korch.search.recall import Solved, keep_solved, recall_solved
from korch.system.deadline import Deadline
from korch.target import Target
from tests.support.facts import Facts
from tests.support.random_graph import random_graph

EXACT = Options(search=SearchLimits(gap=0.0, patience=1000, solver_seconds=20.0, max_measured=1.0))


class ScriptedMeter(Facts):
    """Costs from a table: a true time, and a bound that is a random share of it."""

    def __init__(self, candidates: Sequence[Candidate], seed: int, broken: int = 0) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.true: dict[str, int] = {}
        self.bounds: dict[str, int] = {}
        for key in dict.fromkeys(c.key for c in candidates):
            self.true[key] = rng.randint(100, 10_000)
            self.bounds[key] = rng.randint(1, self.true[key])
        alone = {c.key for c in candidates if len(c.group.primitives) == 1}
        self.broken = set(rng.sample(sorted(set(self.true) - alone), broken))
        self.asked: list[str] = []
        self.late: set[str] = set()
        self.corrections = 0

    def bound_ns(self, candidate: Candidate) -> int:
        return self.bounds[candidate.key]

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        return [(2 * self.bounds[candidate.key], SPREAD) for candidate in candidates]

    def refused(self, candidates: Sequence[Candidate]) -> list[Failed | None]:
        return [Failed("late", "") if c.key in self.late else None for c in candidates]

    def tails(self) -> dict[str, ScoreTail]:
        return {}

    def known(self, candidate: Candidate) -> Measured | Failed | None:
        return None

    def record(self, candidate: str) -> Measured | Failed | None:
        return Measured(self.true[candidate], ()) if candidate in self.asked else None

    @property
    def database(self) -> ScriptedMeter:
        return self

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        return 0.0

    def expect_compiling(self, seconds: float) -> None:
        self.first_plan_s = seconds

    def measure(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        self.asked += [c.key for c in candidates]
        return [
            Failed("crashed", "scripted") if c.key in self.broken else Measured(self.true[c.key], ())
            for c in candidates
        ]

    def correct(self, candidate: Candidate, record: Measured | Failed) -> None:
        self.corrections += 1
        self.bounds[candidate.key] = self.true[candidate.key]


def instance(seed: int) -> tuple[PrimitiveGraph, tuple[Candidate, ...]]:
    graph = random_graph(np.random.default_rng(seed), primitives=9)
    groups, _ = enumerate_groups(graph, replace(EXACT, search=replace(EXACT.search, max_primitives=5)))
    return graph, collect_candidates(graph, groups, Answers([GeneratedProvider()], Target()))[0]


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_the_optimum_over_all_true_costs(seed: int) -> None:
    graph, candidates = instance(seed)
    meter = ScriptedMeter(candidates, seed, broken=2)
    found = Search(Instance(graph, candidates), Ledger(meter), EXACT).run()
    usable = [c for c in candidates if c.key not in meter.broken]
    whole = Instance(graph, usable).problem(lambda c: (meter.true[c.key], True))
    expected = solve(whole, seconds=20.0).certificate
    assert found.certificate.status is Status.OPTIMAL
    assert found.certificate.objective_ns == expected.objective_ns
    assert sum(found.costs_ns) == expected.objective_ns
    assert not meter.broken & {c.key for c in found.steps}
    assert len(meter.asked) == len(set(meter.asked))


def test_the_bound_never_passes_the_true_optimum() -> None:
    graph, candidates = instance(3)
    meter = ScriptedMeter(candidates, 3)
    loop = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    found = loop.run()
    bounds = [entry.bound_ns for entry in found.rounds]
    assert max(bounds) <= (found.certificate.objective_ns or 0)
    incumbents = [entry.incumbent_ns for entry in found.rounds if entry.incumbent_ns is not None]
    assert incumbents == sorted(incumbents, reverse=True)


class Predicted(ScriptedMeter):
    """Hard bounds are far below the times, and predictions are at most `above` spreads above them."""

    above = 0.5

    def __init__(self, candidates: Sequence[Candidate], seed: int, broken: int = 0) -> None:
        super().__init__(candidates, seed, broken)
        rng = random.Random(seed)
        self.bounds = {key: max(1, time_ns // 50) for key, time_ns in self.true.items()}
        self.guesses = {key: time_ns * np.exp(rng.uniform(-2, self.above) * 0.1) for key, time_ns in self.true.items()}

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        return [(int(self.guesses[candidate.key]), 0.1) for candidate in candidates]

    def tails(self) -> dict[str, ScoreTail]:
        return {"generated": ScoreTail(10_000, (0.5,) * 41)}


@pytest.mark.parametrize("seed", range(6))
def test_few_measurements_reach_a_calibrated_bound_that_no_plan_is_below(seed: int) -> None:
    graph, candidates = instance(seed)
    meter = Predicted(candidates, seed)
    search = Search(Instance(graph, candidates), Ledger(meter), replace(EXACT, search=SearchLimits()))
    search.estimate()
    search.approach()
    likely_ns, best = search.calibrated_ns(), search.best
    whole = Instance(graph, candidates).problem(lambda c: (meter.true[c.key], True))
    optimum_ns = solve(whole, seconds=20.0).certificate.objective_ns or 0
    assert best is not None and likely_ns is not None
    assert 0.97 * best.cost_ns <= likely_ns <= optimum_ns <= best.cost_ns
    assert search.end().certificate.bound_ns < likely_ns  # the hard bound needs more


def test_kernels_that_are_faster_than_their_calibrated_bounds_lower_those_of_others() -> None:
    candidates = instance(2)[1]
    meter = Predicted(candidates, 2)
    ledger = Ledger(meter)
    before = calibrated(ledger, candidates)
    faster, others = candidates[0], [c for c in candidates if c.key != candidates[0].key]
    meter.true[faster.key] //= 100  # of 10,001 kernels 20 may be as fast as that, so it changes nothing
    ledger.measure([faster])
    after = calibrated(ledger, candidates)
    assert before is not None and after is not None
    own = {c.key: costs for c, *costs in zip(candidates, before.costs_ns, after.costs_ns, strict=True)}
    assert all(own[c.key][0] == own[c.key][1] for c in others)
    meter.tails = lambda: {"generated": ScoreTail(600, (0.6, 0.5))}  # type: ignore[method-assign]
    fewer = Ledger(meter)
    fewer.measure([faster])
    lower = calibrated(fewer, candidates)
    assert lower is not None
    assert all(low <= high for low, high in zip(lower.costs_ns, before.costs_ns, strict=True))
    assert calibrated(Ledger(ScriptedMeter(candidates, 2)), candidates) is None


def test_a_time_below_its_bound_corrects_the_bounds() -> None:
    graph, candidates = instance(5)
    meter = ScriptedMeter(candidates, 5)
    for key in list(meter.bounds):
        meter.bounds[key] = meter.true[key] * 2  # a machine that was busy when calibrated
    found = Search(Instance(graph, candidates), Ledger(meter), EXACT).run()
    assert meter.corrections > 0
    assert found.certificate.bound_ns <= (found.certificate.objective_ns or 0)


def test_a_spent_budget_gives_a_plan_by_estimates() -> None:
    graph, candidates = instance(7)
    meter = ScriptedMeter(candidates, 7)
    found = Search(Instance(graph, candidates), Ledger(meter), EXACT, Deadline(0.0)).run()
    assert found.stopped_by_budget and found.steps
    assert not meter.asked and meter.first_plan_s == 0.0


def test_a_plan_by_estimates_has_no_kernel_that_its_provider_refuses() -> None:
    graph, candidates = instance(7)
    meter, options = ScriptedMeter(candidates, 7), (EXACT, Deadline(0.0))
    first = Search(Instance(graph, candidates), Ledger(meter), *options).run()
    meter.late = {step.key for step in first.steps if len(step.group.primitives) > 1}
    assert meter.late
    found = Search(Instance(graph, candidates), Ledger(meter), *options).run()
    assert found.steps and not meter.late & {step.key for step in found.steps}


def test_an_ended_search_measures_nothing_and_has_a_true_bound() -> None:
    graph, candidates = instance(8)
    meter = ScriptedMeter(candidates, 8)
    loop = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    loop.estimate()
    asked = len(meter.asked)
    found = loop.end()
    assert len(meter.asked) == asked
    whole = Instance(graph, candidates).problem(lambda c: (meter.true[c.key], True))
    best_ns = solve(whole, seconds=20.0).certificate.objective_ns or 0
    assert 0 < found.certificate.bound_ns <= best_ns <= (found.certificate.objective_ns or 0)
    assert found.stopped_by_budget


def test_what_others_measured_is_taken_over() -> None:
    graph, candidates = instance(8)
    meter = ScriptedMeter(candidates, 8)
    loop = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    loop.ledger.measure(candidates)
    asked = len(meter.asked)
    found = loop.explore()
    assert (found.unknown, found.improvements) == ((), ())
    loop.try_plan(found.kernels)
    assert loop.best is not None
    assert len(meter.asked) == asked


def test_bounds_that_another_search_corrected_are_not_believed() -> None:
    graph, candidates = instance(8)
    meter = ScriptedMeter(candidates, 8)
    loop = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    loop.run()
    assert loop.bound_ns > 0
    meter.bounds = dict.fromkeys(meter.bounds, 1)
    loop.ledger.correct([])
    assert loop.bound_ns == 0
    assert set(loop.ledger.bounds_ns(candidates)) == {1}
    assert loop.best is not None


def test_a_round_measures_few_candidates_of_one_kind() -> None:
    _, candidates = instance(8)
    ledger = Ledger(ScriptedMeter(candidates, 8), SearchLimits(same_kind=2))
    found = of_each_kind(ledger, candidates, reversed(range(len(candidates))))
    kinds, all_kinds = (
        Counter(ledger.experience.kinds_of(candidates[k])[0] for k in own) for own in (found, range(len(candidates)))
    )
    assert found == sorted(found, reverse=True) and max(all_kinds.values()) > 2
    assert kinds == {kind: min(2, count) for kind, count in all_kinds.items()}


def test_without_working_candidates_it_says_so() -> None:
    graph, candidates = instance(9)
    meter = ScriptedMeter(candidates, 9)
    meter.broken = set(meter.true)
    with pytest.raises(InfeasibleError) as info:
        Search(Instance(graph, candidates), Ledger(meter), EXACT).run()
    assert str(info.value) == (
        "value %5: every kernel that runs broadcast of type f32[17,17] (value %5), max of type f32[34,17] (value %9) "
        "failed. Kernels that failed: generated, crashed: scripted. Run `korch doctor`; `korch --verbose optimize` "
        "shows the complete messages"
    )


def test_no_more_is_measured_than_allowed() -> None:
    graph, candidates = instance(3)
    meter = ScriptedMeter(candidates, 3)
    limits = replace(EXACT.search, max_measured=0.2, free_measurements=0, round_candidates=2)
    options = replace(EXACT, search=limits)
    found = Search(Instance(graph, candidates), Ledger(meter, limits), options).run()
    # The estimates' rounds measure one whole plan at least, whatever the share.
    assert len(meter.asked) <= max(0.2 * len(meter.true), 5 * len(found.steps) + 10)
    assert found.certificate.bound_ns <= (found.certificate.objective_ns or 0)


@pytest.mark.parametrize(("seed", "most"), [(14, 10), (20, 16), (25, 6), (42, 6)])
def test_the_last_round_tells_the_best_plan_of_what_is_measured(seed: int, most: int) -> None:
    graph, candidates = instance(seed)
    meter = ScriptedMeter(candidates, seed)
    options = replace(EXACT, search=replace(EXACT.search, patience=1))
    loop = Search(Instance(graph, candidates), Ledger(meter), options)
    loop.most_measured = most
    found = loop.run()
    measured = [c for c in candidates if c.key in meter.asked]
    whole = Instance(graph, measured).problem(lambda c: (meter.true[c.key], True))
    assert found.certificate.objective_ns == solve(whole, seconds=20.0).certificate.objective_ns
    assert found.rounds[-1].incumbent_ns == found.certificate.objective_ns


class Hopeful(ScriptedMeter):
    """What is timed once seems quicker than it is."""

    def __init__(self, candidates: Sequence[Candidate], seed: int) -> None:
        super().__init__(candidates, seed)
        rng = random.Random(seed)
        self.first = {key: rng.randint(self.bounds[key], self.true[key]) for key in self.true}
        self.again: set[str] = set()

    def known(self, candidate: Candidate) -> Measured | Failed | None:
        key = candidate.key
        if key in self.again:
            return Measured(self.true[key], (), is_confirmed=True)
        return Measured(self.first[key], ()) if key in self.asked else None

    def measure(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        self.asked += [c.key for c in candidates]
        return [Measured(self.first[c.key], ()) for c in candidates]

    def confirm(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        self.again |= {c.key for c in candidates}
        return [Measured(self.true[c.key], (), is_confirmed=True) for c in candidates]


@pytest.mark.parametrize("seed", range(4))
def test_confirming_until_nothing_is_left_finds_the_optimum_that_luck_had_hidden(seed: int) -> None:
    graph, candidates = instance(seed)
    meter = Hopeful(candidates, seed)
    loop = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    first = found = loop.run()
    turns = 0
    while confirm(loop.ledger, found.steps, Deadline()):
        loop.revise(found)
        found = loop.prove()
        turns += 1
    assert turns > 0
    assert all(step.key in meter.again for step in found.steps)
    assert found.certificate.objective_ns == sum(meter.true[step.key] for step in found.steps)
    assert found.certificate.objective_ns <= sum(meter.true[step.key] for step in first.steps)
    usable = Instance(graph, candidates).problem(lambda c: (meter.true[c.key], True))
    best_ns = solve(usable, seconds=20.0).certificate.objective_ns
    assert found.certificate.objective_ns == best_ns
    assert found.certificate.status is Status.OPTIMAL


def test_a_bound_does_not_outlive_costs_that_fell() -> None:
    graph, candidates = instance(1)
    meter = Hopeful(candidates, 1)
    first = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    found = first.run()
    meter.true = {key: time_ns // 100 for key, time_ns in meter.first.items()}  # the first times were disturbed
    first.ledger.confirm([c for c in candidates if c.key in meter.asked])
    for search in (first, Search(Instance(graph, candidates), first.ledger, EXACT)):
        revised = search.revise(found)
        assert 0 < search.bound_ns <= (revised.certificate.objective_ns or 0) < found.certificate.bound_ns
        assert revised.corrections == first.ledger.corrections > found.corrections


def test_nothing_is_timed_again_without_time() -> None:
    graph, candidates = instance(1)
    meter = Hopeful(candidates, 1)
    loop = Search(Instance(graph, candidates), Ledger(meter), EXACT)
    found = loop.run()
    assert not confirm(loop.ledger, found.steps, Deadline(0.0))
    assert not meter.again


def test_a_solved_instance_is_recalled_and_a_damaged_one_is_not() -> None:
    graph, candidates = instance(11)
    memory = ScriptedMeter(candidates, 11)
    ledger = Ledger(memory)
    found = Search(Instance(graph, candidates), ledger, EXACT).run()
    solved = Solved(found, {"searched": found.steps})
    assert recall_solved(ledger, candidates, EXACT) is None
    keep_solved(ledger, candidates, EXACT, solved)
    assert recall_solved(ledger, candidates, EXACT) == solved
    assert recall_solved(ledger, candidates, replace(EXACT, search=replace(EXACT.search, gap=0.5))) is None
    assert recall_solved(ledger, candidates[:-1], EXACT) is None
    memory.rates = lambda: Rates(launch_ns=1.0)  # type: ignore[method-assign]
    assert recall_solved(ledger, candidates, EXACT) is None, "the bound is of other rates"
    del memory.rates
    assert recall_solved(ledger, candidates, EXACT) == solved
    memory.facts = {name: text[:-9] for name, text in memory.facts.items()}
    assert recall_solved(ledger, candidates, EXACT) is None


def test_an_unproven_plan_has_a_runner_up() -> None:
    graph, candidates = instance(4)
    meter = ScriptedMeter(candidates, 4)
    for key in meter.bounds:
        meter.bounds[key] = 1  # with so few measurements, nothing can be proven
    options = replace(EXACT, search=replace(EXACT.search, patience=2, max_measured=0.0))
    loop = Search(Instance(graph, candidates), Ledger(meter, SearchLimits(free_measurements=12)), options)
    loop.run()
    assert loop.best is not None
    second = loop.runner_up()
    assert second
    total_ns = sum(meter.true[c.key] for c in second)
    assert loop.best.cost_ns <= total_ns <= 1.1 * loop.best.cost_ns
    assert {id(c) for c in second} != {id(candidates[k]) for k in loop.best.kernels}


def test_a_proven_plan_has_none() -> None:
    graph, candidates = instance(4)
    loop = Search(Instance(graph, candidates), Ledger(ScriptedMeter(candidates, 4)), EXACT)
    loop.run()
    assert loop.runner_up() == ()


def test_a_primitive_that_no_provider_runs_is_named_with_the_refusals() -> None:
    graph, candidates = instance(9)
    check_every_primitive_runs(graph, candidates, {})
    output = graph.primitives[-1].output
    others = [c for c in candidates if len(graph.primitives) - 1 not in c.group.primitives]
    with pytest.raises(UnprovidedError) as info:
        check_every_primitive_runs(graph, others, {"generated: too large": 2})
    assert str(info.value) == (
        f"value %{output}: no provider runs {graph.primitives[-1].op} of type {graph.types[output]}. "
        "The providers say: generated: too large"
    )
