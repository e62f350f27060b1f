"""Scripted costs, an interpreter of plans and a check of values, for models in segments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from korch.candidate.candidate import Candidate, Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last, layout_choices
from korch.costs.calibrated import ScoreTail
from korch.measure.meter import SPREAD
from korch.measure.record import Failed, Measured
from korch.primitive import reference
from korch.primitive.check import check_graph
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.types import ValueType
from korch.provider.faults import Faults
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel
from korch.segments.block import Partition
from korch.segments.join import join
from korch.target import Target
from tests.support.facts import Facts
from tests.support.random_graph import random_inputs


def assert_computes(partition: Partition, graph: PrimitiveGraph, rng: np.random.Generator) -> None:
    """Check that a graph's segments are sound, and joined compute what it does."""
    for instance in partition.instances:
        check_graph(instance.graph)
    inputs = random_inputs(graph, rng)
    expected = reference.run(graph, inputs)
    actual = reference.run(join(partition).graph, inputs)
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=1e-6)


class LinearProvider:
    """Offers to run products, all values in plain layouts or all images channels-last."""

    name, version = "linear", "1"

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        if not any(p.row.category is Category.LINEAR for p in group.body.primitives):
            return Refusal("nothing linear")
        offers = []
        for is_last in (False, True):
            inputs = [
                _layout(type_, is_last and i not in group.constant_inputs) for i, type_ in enumerate(group.input_types)
            ]
            outputs = [_layout(type_, is_last) for type_ in group.output_types]
            offers.append(Offer(tuple(inputs), tuple(outputs)))
        return tuple(dict.fromkeys(offers))

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        return Refusal("it is only for plans")


def _layout(type_: ValueType, is_last: bool) -> Layout:
    last = channels_last(type_.rank) if type_.rank == 4 else None
    choices = layout_choices(type_, 16)
    return last if is_last and last in choices else Layout.plain(type_.rank)


class FakeMeter(Facts):
    """Costs by hash of a candidate's key; it keeps facts, as the database does."""

    def __init__(self) -> None:
        super().__init__()
        self.providers = (GeneratedProvider(), LinearProvider())
        self.target = Target()
        self.faults = Faults()
        self.records: dict[str, Measured | Failed] = {}
        self.broken: set[str] = set()
        self.late: set[str] = set()
        self.searches = 0
        self.begun: list[str] = []
        self.in_vain: set[str] = set()  # begun after it was measured
        self.is_quiet = True

    @property
    def database(self) -> FakeMeter:
        return self

    def put_fact(self, name: str, value: str) -> None:
        super().put_fact(name, value)
        self.searches += 1

    def record(self, candidate: str) -> Measured | Failed | None:
        return self.records.get(candidate)

    def known(self, candidate: Candidate) -> Measured | Failed | None:
        return self.records.get(candidate.key)

    def true_ns(self, candidate: Candidate) -> int:
        digest = hashlib.sha256(candidate.key.encode()).digest()
        return 1000 + digest[0] + candidate.size_bytes // 64

    def bound_ns(self, candidate: Candidate) -> int:
        return self.true_ns(candidate) * 3 // 4

    def guess_ns(self, candidate: Candidate) -> int:
        return self.true_ns(candidate) * 7 // 8

    def refused(self, candidates: Sequence[Candidate]) -> list[Failed | None]:
        return [Failed("late", "") if c.key in self.late else None for c in candidates]

    def tails(self) -> Mapping[str, ScoreTail]:
        return {}

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        return [(self.guess_ns(candidate), SPREAD) for candidate in candidates]

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        record = self.known(candidate)
        if isinstance(record, Measured):
            return record.time_ns, True
        return self.bound_ns(candidate), False

    def begin(self, candidates: Sequence[Candidate]) -> None:
        self.begun += (c.key for c in candidates)
        self.in_vain |= {c.key for c in candidates} & self.records.keys()
        self.is_quiet = False

    def rest(self) -> None:
        self.is_quiet = True

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        return 0.0

    def expect_compiling(self, seconds: float) -> None:
        self.first_plan_s = seconds

    def measure(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        for candidate in candidates:
            record: Measured | Failed = Measured(self.true_ns(candidate), ())
            if candidate.key in self.broken:
                record = Failed("crashed", "scripted")
            self.records[candidate.key] = record
        self.rest()
        return [self.records[candidate.key] for candidate in candidates]

    def confirm(self, candidates: Sequence[Candidate], deadline: object = None) -> list[Measured | Failed]:
        for candidate in candidates:
            record = self.records[candidate.key]
            if isinstance(record, Measured):
                self.records[candidate.key] = replace(record, is_confirmed=True)
        return [self.records[candidate.key] for candidate in candidates]

    def correct(self, candidate: Candidate, record: Measured | Failed) -> None:
        raise AssertionError("no time is below its bound")


def run_steps(graph: PrimitiveGraph, steps: Sequence[Candidate], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run kernels in order, each by the meaning of its body, on ports written before.

    A port that no step has written is a KeyError; so is one in another layout.
    """

    def port(value: int, layout: Layout) -> tuple[int, str]:
        return value, str(layout)

    def plain(value: int) -> tuple[int, str]:
        return port(value, Layout.plain(graph.types[value].rank))

    ports = {plain(value): np.asarray(inputs[name], np.float64) for name, value in graph.inputs}
    for step in steps:
        group, arrays = step.group, {}
        for i, (value, layout) in enumerate(zip(group.inputs, step.offer.inputs, strict=True)):
            constant = graph.constants.get(value)
            assert (i not in group.constant_inputs) or constant is not None
            arrays[f"i{i}"] = ports[port(value, layout)] if constant is None else constant.array
        found = reference.run(group.body, arrays)
        for i, (value, layout) in enumerate(zip(group.outputs, step.offer.outputs, strict=True)):
            assert port(value, layout) not in ports, "a port is written twice"
            ports[port(value, layout)] = found[f"o{i}"]
    return {
        name: ports[plain(value)] if value not in graph.constants else graph.constants[value].array
        for name, value in graph.outputs
    }
