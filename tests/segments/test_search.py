"""Plans of models in segments: they are correct, cost what is expected, and each block is searched once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.models import build
from benchmarks.models.transformer_block import build_transformer_block
from korch.binary_program.problem import Status
from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.costs.calibrated import ScoreTail
from korch.equivalence.saturate import saturate
from korch.errors import OptionError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.limits import SEGMENT_PRIMITIVES, WHOLE_PRIMITIVES, SearchLimits
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import ConcatAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.in_place import InPlaceProvider
from korch.provider.provider import Kernel
from korch.runtime.bind import PlanStep, bind_steps
from korch.search import loop, questions
from korch.search.instance import Answers
from korch.search.ledger import Ledger
from korch.segments import block_search
from korch.segments.block import Partition, Rewrite, find_blocks
from korch.segments.block_task import BlockTask, prepare, prepare_all
from korch.segments.explore import BATCH_SECONDS
from korch.segments.join import Joined, join, with_constants_of
from korch.segments.search import Outcome, Segmented, search_segments
from korch.segments.trace import SearchTrace
from korch.segments.with_alternatives import split_segments
from korch.system.deadline import Deadline
from tests.partition_oracle import FakeMeter, run_steps
from tests.support.arena import simulate
from tests.support.random_graph import random_graph, random_inputs

REWRITE = partial(saturate, strict=False)
AS_IT_IS = partial(saturate, strict=False, rules=())
LIMITS = SearchLimits(max_primitives=6, solver_seconds=5.0, solver_workers=1, groupings=0)
OPTIONS = Options(threads=1, search=LIMITS)


def search(
    graph: PrimitiveGraph, limit: int, meter: FakeMeter, options: Options = OPTIONS, rewrite: Rewrite = REWRITE
) -> tuple[Partition, Joined, list[BlockTask], Outcome]:
    partition = find_blocks(graph, split_segments(graph, limit), rewrite)
    known = cast(Any, meter)
    joined = join(partition)
    tasks = prepare_all(partition, joined, known, options)
    outcome = search_segments(Segmented(partition, joined, tasks), Ledger(known, options.search), options, Deadline())
    return partition, joined, tasks, outcome


class InPlaceMeter(FakeMeter):
    """The same with concatenations in place, at no cost."""

    def __init__(self) -> None:
        super().__init__()
        self.providers = (*self.providers, InPlaceProvider())  # type: ignore[assignment]

    def true_ns(self, candidate: Candidate) -> int:
        return 0 if candidate.offer.is_in_place else super().true_ns(candidate)


def concatenations(seed: int) -> PrimitiveGraph:
    """Layers whose values several concatenations read, some of them across a cut."""
    rng, builder = random.Random(seed), GraphBuilder()
    values = [builder.input("x", ValueType((1, 16, 2, 2), DType.F32))]
    read: set[int] = set()
    for _ in range(16):
        parts = rng.sample(values[-5:], min(len(values[-5:]), rng.choice((1, 1, 2, 3))))
        if len(parts) > 1 and sum(builder.type(v).shape[1] for v in parts) <= 256:
            values.append(builder.add("concat", parts, ConcatAttributes(1)))
        else:
            parts = parts[:1]
            values.append(builder.add(rng.choice(("neg", "abs", "tanh")), parts))
        read.update(parts)
    for i, value in enumerate(dict.fromkeys(values[1:])):
        if value not in read:
            builder.output(f"y{i}", value)
    return builder.freeze()


def test_concatenations_in_place_across_cuts_share_no_memory_with_others() -> None:
    inside = crossing = 0
    for seed in range(5):
        graph = concatenations(seed)
        _, joined, tasks, outcome = search(graph, 5, InPlaceMeter())
        check_plans(graph, joined, outcome, seed)
        inputs = random_inputs(graph, np.random.default_rng(seed))
        expected = reference.run(graph, inputs)
        edges = {
            joined.values[i][value]
            for task in tasks
            for i in task.block.instances
            for _, value in (*task.block.graph.inputs, *task.block.graph.outputs)
        }
        for plan in outcome.plans.values():
            steps = [
                PlanStep(c, Kernel("" if c.offer.is_in_place else f"k{i}", "", workspace_bytes=0))
                for i, c in enumerate(plan)
            ]
            arrays = [inputs[name] for name, _ in graph.inputs]
            found = simulate(joined.graph, steps, bind_steps(joined.graph, steps), arrays)
            for (name, _), array in zip(graph.outputs, found, strict=True):
                np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)
            parts = [v for c in plan if c.offer.is_in_place for v in c.group.inputs]
            inside += len(parts)
            crossing += len(edges.intersection(parts))
    assert inside > 20 and crossing > 3


def check_plans(graph: PrimitiveGraph, joined: Joined, outcome: Outcome, seed: int) -> None:
    inputs = random_inputs(graph, np.random.default_rng(seed))
    expected = reference.run(graph, inputs)
    whole = with_constants_of(joined.graph, outcome.plans.values())
    for steps in outcome.plans.values():
        actual = run_steps(whole, steps, inputs)
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-4, atol=1e-5)


class Calibrated(FakeMeter):
    """Hard bounds are low, and no kernel is faster than its prediction."""

    def bound_ns(self, candidate: Candidate) -> int:
        return self.true_ns(candidate) // 20

    def tails(self) -> dict[str, ScoreTail]:
        return dict.fromkeys(("generated", "linear"), ScoreTail(10_000, (0.0,) * 41))


def test_bounds_of_other_blocks_are_proven_again_when_costs_fall() -> None:
    graph = random_graph(np.random.default_rng(0), primitives=12, linear=True)
    tasks = search(graph, 5, FakeMeter())[2]
    meter = cast(Any, FakeMeter())
    ledger = Ledger(meter, OPTIONS.search)
    trace = SearchTrace({})
    blocks = block_search.BlockSearch(tasks, ledger, OPTIONS, Deadline(), block_search.unheard, trace)
    blocks.find_first()
    before = [one.result.certificate.bound_ns for one in blocks.planned]
    for key, record in meter.records.items():
        meter.records[key] = replace(record, time_ns=record.time_ns // 10)
    meter.bound_ns = lambda candidate: 1
    ledger.confirm([c for task in tasks for c in task.candidates if c.key in meter.records])
    ledger.correct([])
    blocks.refine({})
    assert len(before) > 1 and ledger.corrections > 0
    for one, bound_ns in zip(blocks.planned, before, strict=True):
        assert one.result.certificate.bound_ns <= one.objective_ns < bound_ns


def test_segments_have_a_calibrated_bound_above_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCK_MEASUREMENTS", "INTERFACE_MEASUREMENTS", "REFINE_MEASUREMENTS"):
        monkeypatch.setattr(block_search, name, 5)
    monkeypatch.setattr("korch.segments.explore.INTERFACES", 0)
    bounds: list[tuple[int, int]] = []
    for seed in range(4):
        graph = random_graph(np.random.default_rng(seed), primitives=24, linear=True)
        found = search(graph, 12, Calibrated())[3].found.certificate
        assert found.objective_ns and found.calibrated_ns
        assert found.bound_ns <= found.calibrated_ns <= found.objective_ns
        bounds.append((found.bound_ns, found.calibrated_ns))
        assert search(graph, 5, FakeMeter())[3].found.certificate.calibrated_ns is None
    # What is measured, and so how far the hard bound rises, depends on the time that solving takes.
    assert sum(hard for hard, _ in bounds) < sum(calibrated for _, calibrated in bounds)


def test_plans_of_random_graphs_compute_what_the_graphs_do() -> None:
    for seed in range(8):
        graph = random_graph(np.random.default_rng(seed), primitives=14, linear=True)
        meter = FakeMeter()
        _, joined, _, outcome = search(graph, 5, meter)
        check_plans(graph, joined, outcome, seed)
        cost_ns = sum(meter.true_ns(step) for step in outcome.plans["searched"])
        assert outcome.found.certificate.objective_ns == cost_ns
        assert outcome.found.certificate.bound_ns <= cost_ns


class Hopeful(FakeMeter):
    """What is timed once seems quicker than it is, by another share for each kernel."""

    def bound_ns(self, candidate: Candidate) -> int:
        return self.true_ns(candidate) // 2

    def measure(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        new = {c.key for c in candidates} - self.records.keys()
        super().measure([c for c in candidates if c.key in new])
        for c in candidates:
            if c.key in new:
                time_ns = self.true_ns(c) * (90 + int(c.key, 16) % 10) // 100
                self.records[c.key] = Measured(time_ns, ())
        return [self.records[c.key] for c in candidates]

    def confirm(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        for c in candidates:
            self.records[c.key] = Measured(self.true_ns(c), (), is_confirmed=True)
        return [self.records[c.key] for c in candidates]


def test_a_plan_is_held_to_what_its_kernels_take_a_second_time() -> None:
    meter = Hopeful()
    graph = convolutions(1)
    _, joined, _, outcome = search(graph, 8, meter, rewrite=AS_IT_IS)
    check_plans(graph, joined, outcome, 3)
    steps = outcome.plans["searched"]
    known = [meter.known(step) for step in steps]
    again = [isinstance(record, Measured) and record.is_confirmed for record in known]
    assert all(again)
    assert outcome.found.certificate.objective_ns == sum(map(meter.true_ns, steps))
    recalled = search(graph, 8, meter, rewrite=AS_IT_IS)[3]
    assert recalled.plans["searched"] == steps


def convolutions(blocks: int) -> PrimitiveGraph:
    model = build("candy", size=16, channels=(16, 16, 16), blocks=blocks)
    return fission(load_model(model, {}))


class LovesChannelsLast(FakeMeter):
    """Kernels that read or write plain images cost more."""

    def true_ns(self, candidate: Candidate) -> int:
        ports = (*candidate.input_ports, *candidate.output_ports)
        plain = sum(layout == Layout.plain(4) for _, layout in ports)
        return super().true_ns(candidate) + 3000 * plain


def test_segments_hand_on_the_layout_that_is_best_for_the_whole() -> None:
    graph = convolutions(1)
    meter = LovesChannelsLast()
    _, joined, _, outcome = search(graph, 60, meter, OPTIONS, AS_IT_IS)
    assert outcome.partition is not None
    used = {row.layouts for block in outcome.partition.blocks for row in block.interfaces if row.used}
    assert any("acdb" in layouts for layouts in used)
    check_plans(graph, joined, outcome, 0)
    cost_ns = sum(meter.true_ns(step) for step in outcome.plans["searched"])
    plain_ns = sum((block.interfaces[0].objective_ns or 0) * len(block.instances) for block in outcome.partition.blocks)
    assert outcome.found.certificate.objective_ns == cost_ns < plain_ns


def transformer(depth: int) -> PrimitiveGraph:
    model = build_transformer_block(sequence=8, width=16, heads=2, depth=depth)
    return fission(load_model(model, {}))


PATIENT = {
    loop: ("ROUND_SECONDS",),
    questions: ("COMBINE_SECONDS", "RELAX_SECONDS"),
    block_search: ("BLOCK_SECONDS", "REFINE_SECONDS"),
}


def test_depth_costs_no_further_candidates_programs_or_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, measured = [], []
    for module, names in PATIENT.items():  # on a busy machine, a solve that ends early would ask for other kernels
        for name in names:
            monkeypatch.setattr(module, name, 600.0)
    options = replace(OPTIONS, search=replace(OPTIONS.search, max_primitives=4, solver_seconds=600.0))
    for depth in (3, 6):
        meter = FakeMeter()
        _, _, tasks, outcome = search(transformer(depth), SEGMENT_PRIMITIVES, meter, options, AS_IT_IS)
        assert outcome.partition is not None
        keys = {c.key for task in tasks for c in task.candidates}
        counts.append((len(tasks), sum(len(task.candidates) for task in tasks), len(keys), outcome.partition.programs))
        measured.append(len(meter.records))
    assert counts[0] == counts[1]
    assert measured[1] <= 1.1 * measured[0]  # the block of most gain is searched first


def test_a_model_of_one_segment_is_searched_once() -> None:
    meter = FakeMeter()
    first = search(convolutions(1), 1000, meter, rewrite=AS_IT_IS)[3]
    measured = len(meter.records)
    second = search(convolutions(1), 1000, meter, rewrite=AS_IT_IS)[3]
    assert first.partition is None and measured
    assert (first.is_recalled, second.is_recalled) == (False, True)
    assert second.plans == first.plans and second.found == first.found
    assert len(meter.records) == measured


def test_a_second_model_with_the_same_blocks_needs_no_search() -> None:
    meter = FakeMeter()
    options = replace(OPTIONS, search=replace(OPTIONS.search, max_primitives=3))
    first = search(transformer(3), SEGMENT_PRIMITIVES, meter, options, AS_IT_IS)[3]
    searches, measured = meter.searches, len(meter.records)
    second = search(transformer(4), SEGMENT_PRIMITIVES, meter, options, AS_IT_IS)[3]
    assert (meter.searches, len(meter.records)) == (searches, measured)
    assert second.found.certificate.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert len(second.plans["searched"]) > len(first.plans["searched"])


@pytest.mark.parametrize(
    ("partition", "primitives", "limit"),
    [
        ("auto", WHOLE_PRIMITIVES, None),
        ("auto", WHOLE_PRIMITIVES + 1, SEGMENT_PRIMITIVES),
        ("off", 10_000, None),
        (40, 10, 40),
    ],
)
def test_the_option_says_how_large_segments_are(partition: str | int, primitives: int, limit: int | None) -> None:
    assert SearchLimits(partition=partition).segment_limit(primitives) == limit


def in_segments(deadline: Deadline, meter: FakeMeter) -> tuple[PrimitiveGraph, Joined, Outcome]:
    graph = fission(load_model(build("conv_bn_relu")))
    partition = find_blocks(graph, split_segments(graph, 8), REWRITE)
    answers = Answers(meter.providers, meter.target)
    tasks = [prepare(partition, b, answers, OPTIONS) for b in partition.blocks]
    joined = join(partition)
    outcome = search_segments(Segmented(partition, joined, tasks), Ledger(meter), OPTIONS, deadline)
    return graph, joined, outcome


@pytest.fixture(scope="module")
def whole() -> tuple[FakeMeter, Outcome]:
    """The outcome of a search that is given its time, and the meter that it used."""
    meter = FakeMeter()
    return meter, in_segments(Deadline(), meter)[2]


def test_a_spent_budget_gives_the_plan_of_the_preferred_interfaces_only(whole: tuple[FakeMeter, Outcome]) -> None:
    hurried = FakeMeter()
    graph, joined, outcome = in_segments(Deadline(0.0), hurried)
    meter, best = whole
    check_plans(graph, joined, outcome, 2)
    assert outcome.partition is not None
    assert best.partition is not None
    for block in outcome.partition.blocks:
        assert len(block.interfaces) == 1  # so there are no other plans to compare with
    assert list(outcome.plans) == ["searched"]
    assert outcome.found.stopped_by_budget
    assert 0 < outcome.found.certificate.bound_ns <= (best.found.certificate.objective_ns or 0)
    assert len(hurried.records) < len(meter.records)


class AlmostOver(Deadline):
    """There is time for a batch, not for a round."""

    @property
    def left_s(self) -> float:
        return BATCH_SECONDS

    def less(self, share: float) -> Deadline:
        return self


def test_the_last_seconds_are_spent_on_blocks_and_not_on_a_survey() -> None:
    hurried, spent = FakeMeter(), FakeMeter()
    graph, joined, outcome = in_segments(AlmostOver(), hurried)
    rest = in_segments(Deadline(0.0), spent)[2]
    check_plans(graph, joined, outcome, 2)
    assert len(hurried.records) > len(spent.records)
    true_ns = [sum(map(hurried.true_ns, found.plans["searched"])) for found in (outcome, rest)]
    assert true_ns[0] <= true_ns[1]
    assert not spent.records and not rest.found.certificate.is_measured
    assert outcome.partition is not None
    assert all(len(block.interfaces) == 1 for block in outcome.partition.blocks)


def test_what_will_be_measured_is_built_ahead_and_nothing_after_the_scouting(whole: tuple[FakeMeter, Outcome]) -> None:
    hurried = FakeMeter()
    for meter, outcome in (whole, (hurried, in_segments(Deadline(0.0), hurried)[2])):
        assert {c.key for c in outcome.plans["searched"]} & set(meter.begun)
        assert not meter.in_vain
        assert meter.is_quiet


class FailsUnlessPlain(FakeMeter):
    """Kernels have low estimates in other layouts, but fail there."""

    def guess_ns(self, candidate: Candidate) -> int:
        return 1 if is_other(candidate) else super().guess_ns(candidate)

    def measure(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        self.broken |= {c.key for c in candidates if is_other(c) and c.group.primitives}
        return super().measure(candidates)


def is_other(candidate: Candidate) -> bool:
    ports = (*candidate.input_ports, *candidate.output_ports)
    return not all(layout.is_plain for _, layout in ports)


@pytest.mark.parametrize("deadline", [Deadline(), Deadline(0.0)])
def test_layouts_in_which_no_kernel_works_do_not_end_the_search(deadline: Deadline) -> None:
    graph, joined, outcome = in_segments(deadline, FailsUnlessPlain())
    check_plans(graph, joined, outcome, 2)


def test_layouts_are_chosen_by_estimates_before_anything_is_measured(whole: tuple[FakeMeter, Outcome]) -> None:
    """A guess that is true leads to the best plan: a block is measured in one layout only."""
    meter = FakeMeter()
    meter.guess_ns = meter.true_ns  # type: ignore[method-assign]
    found = in_segments(Deadline(0.0), meter)[2]
    best = whole[1]
    assert found.found.certificate.objective_ns == pytest.approx(best.found.certificate.objective_ns, rel=0.05)


@pytest.mark.parametrize("partition", ["", "some", "0", "-3", "1.5", 0])
def test_a_wrong_size_is_refused(partition: str | int) -> None:
    with pytest.raises(OptionError, match="option partition: the value"):
        SearchLimits(partition=partition)  # type: ignore[arg-type]


@pytest.mark.parametrize("allowed", ["any", "last", "plain"])
def test_fewer_layouts_are_searched_if_asked_for(allowed: Any) -> None:
    graph = fission(load_model(build("conv_bn_relu")))
    meter = FakeMeter()
    partition = find_blocks(graph, split_segments(graph, 20), REWRITE)
    options = replace(OPTIONS, ablation=replace(OPTIONS.ablation, layouts=allowed))
    answers = Answers(meter.providers, meter.target)
    tasks = [prepare(partition, b, answers, options) for b in partition.blocks]
    found = {
        layout
        for task in tasks
        for candidate in task.candidates
        for _, layout in (*candidate.input_ports, *candidate.output_ports)
    }
    found |= {layout for task in tasks for i in task.interfaces for layout in i.layouts.values()}
    has_last = any(not layout.is_plain and not layout.blocks for layout in found)
    has_blocked = any(layout.blocks for layout in found)
    assert (has_last, has_blocked) == {"any": (True, True), "last": (True, False), "plain": (False, False)}[allowed]
    outcome = search_segments(Segmented(partition, join(partition), tasks), Ledger(meter), options, Deadline())
    check_plans(graph, join(partition), outcome, 1)
