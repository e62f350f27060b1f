"""Times of kernels on parts of the threads, and the variants that are chosen, with scripted times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from korch.candidate.candidate import Candidate, Group, Offer, make_group
from korch.candidate.layout import Layout
from korch.concurrent.lanes import KernelLanes, lane_ns, lane_sizes, measured_sizes
from korch.concurrent.side_by_side import side_by_side
from korch.deadline import Deadline
from korch.limits import DEFAULT_LIMITS
from korch.measure.record import Failed, Measured, Record
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import parse_graph
from korch.provider.concurrent import ConcurrentProvider
from korch.search.ledger import Ledger
from korch.target import Target

pytestmark = pytest.mark.usefixtures("many_cores")


@pytest.mark.parametrize(
    ("threads", "allowed", "measured"),
    [
        (1, (), ()),
        (2, (1,), (1,)),
        (3, (1, 2), (1, 2)),
        (4, (1, 2, 3), (1, 2)),
        (5, (1, 2, 3, 4), (1, 2)),
        (6, (1, 2, 3, 4, 5), (1, 3)),
        (8, (1, 2, 4, 6, 7), (1, 4)),
        (12, (1, 3, 6, 9, 11), (1, 6)),
        (64, (1, 16, 32, 48, 63), (1, 32)),
    ],
)
def test_concurrent_are_few_and_each_has_its_rest(
    threads: int, allowed: tuple[int, ...], measured: tuple[int, ...]
) -> None:
    assert lane_sizes(threads) == allowed
    assert measured_sizes(threads) == measured
    assert {threads - share for share in allowed} == set(allowed)
    assert set(measured) <= set(allowed)


def test_what_is_not_measured_lies_between() -> None:
    ideal = {1: 80_000, 4: 20_000, 8: 10_000}
    assert [lane_ns(ideal, n) for n in (1, 2, 4, 8)] == [80_000, 40_000, 20_000, 10_000]
    assert lane_ns(ideal, 6) == pytest.approx(80_000 / 6, abs=1)
    assert lane_ns({1: 9_000, 4: 9_000, 8: 18_000}, 2) == 9_000
    assert 9_000 < lane_ns({1: 9_000, 4: 9_000, 8: 18_000}, 7) < 18_000
    assert lane_ns({1: 0, 4: 0}, 2) == 1
    for outside in (1, 8):
        with pytest.raises(ValueError, match="not between"):
            lane_ns({2: 5, 4: 3}, outside)


TWO = """
graph(%0 "x": f32[8,4], %1 "y": f32[8,4]) -> (%2 "a", %3 "b")
%2: f32[8,4] = exp(%0)
%3: f32[8,4] = neg(%1)
"""

OWN_NS = 10_000
"""What each variant of the plan takes on all threads."""


class Variants:
    """Offers variants on all threads, and others on one, each in plain layouts and once in other layouts."""

    name, version = "toy", "1"

    def __init__(self, everywhere: Sequence[str], few: Sequence[str]) -> None:
        self.everywhere, self.few = everywhere, few

    def offer(self, group: Group, target: Target) -> list[Offer]:
        inputs, outputs = group.plain_layouts
        names = self.everywhere if target.threads > 1 else self.few
        found = 7 * (target.threads == 1)
        return [
            *(Offer(inputs, outputs, name) for name in names),
            Offer((Layout((1, 0)),), outputs, "turned"),
            Offer(inputs, outputs, "found", found_ns=found or 7),
            Offer(inputs, outputs, "in place", is_in_place=True),
        ]


class Meter:
    """Times of variants on all threads, and on one."""

    def __init__(self, provider: Variants, all_ns: Mapping[str, Record], few_ns: Mapping[str, Record]) -> None:
        self.target = Target(threads=2)
        self.concurrent = ConcurrentProvider([provider])  # type: ignore[list-item]
        self.all_ns, self.few_ns = all_ns, few_ns
        self.measured: list[str] = []
        self.confirmed: list[str] = []
        self.second_ns: dict[str, int] = {}
        self.deadline: Deadline | None = None

    def known(self, candidate: Candidate) -> Record | None:
        return self.all_ns.get(candidate.offer.variant) if candidate.provider == "toy" else None

    def bound_ns(self, candidate: Candidate) -> int:
        return 1_000

    def guess_ns(self, candidate: Candidate) -> int:
        return 4_000

    def measure(self, candidates: Sequence[Candidate], end: object = None) -> list[Record]:
        found = []
        for candidate in candidates:
            names = [part.variant for lane in candidate.offer.lanes for part in lane.parts]
            self.measured.append("|".join(names))
            if self.deadline is not None:
                self.deadline.stop()
            slowest = [self.few_ns[name] for name in names]
            failed = [record for record in slowest if isinstance(record, Failed)]
            found.append(
                failed[0] if failed else max(slowest, key=lambda r: r.time_ns if isinstance(r, Measured) else 0)
            )
        return found

    def confirm(self, candidates: Sequence[Candidate], end: object = None) -> list[Record | None]:
        names = [c.offer.lanes[0].parts[0].variant for c in candidates]
        self.confirmed += names
        return [Measured(self.second_ns[n], ()) if n in self.second_ns else self.few_ns[n] for n in names]


def times(**ns: int | None) -> dict[str, Record]:
    return {name: Failed("crashed", "so it does") if t is None else Measured(t, ()) for name, t in ns.items()}


def plan(variant: str = "own") -> tuple[PrimitiveGraph, list[Candidate]]:
    graph = parse_graph(TWO.lstrip())
    groups = [make_group(graph, [p], [graph.primitives[p].output]) for p in range(2)]
    return graph, [Candidate(group, "toy", Offer(*group.plain_layouts, variant), "1") for group in groups]


def lanes_of(meter: Meter, deadline: Deadline | None = None) -> KernelLanes:
    graph, steps = plan()
    ledger = Ledger(meter)  # type: ignore[arg-type]
    ledger.look_up(steps)
    lanes = KernelLanes(graph, steps, ledger)
    lanes.measure(deadline or Deadline())
    return lanes


def chosen(lanes: KernelLanes, place: int = 0) -> tuple[str, int]:
    best = lanes.fastest[place][1]
    return best.part.offer.variant, lanes.time_ns(best)


EVERYWHERE = ("other", "own", "third", "fourth", "last")
ALL_NS = times(own=OWN_NS, other=10_500, third=12_000, fourth=13_000, last=20_000)


def test_the_variant_that_is_fastest_on_one_thread_is_kept() -> None:
    meter = Meter(
        Variants(EVERYWHERE, EVERYWHERE), ALL_NS, times(own=19_000, other=18_000, third=15_000, fourth=16_000)
    )
    lanes = lanes_of(meter)
    assert chosen(lanes) == chosen(lanes, 1) == ("third", 15_000)
    # The plan's variants come first, and those of the least time on all threads; not the slowest, nor other layouts.
    assert meter.measured[:2] == ["own", "own"]
    assert set(meter.measured) == {"own", "other", "third", "fourth"}
    assert set(meter.confirmed) == {"third"}
    assert lanes.estimates_ns() == {0: {1: 15_000}, 1: {1: 15_000}}


def test_the_plans_variant_is_kept_if_it_is_as_fast() -> None:
    few_ns = times(own=15_000, other=15_000, third=16_000, fourth=17_000)
    meter = Meter(Variants(EVERYWHERE, EVERYWHERE), ALL_NS, few_ns)
    assert chosen(lanes_of(meter)) == ("own", 15_000)
    assert not meter.confirmed


def test_a_variant_that_is_slower_when_timed_again_is_left() -> None:
    few_ns = times(own=15_000, other=14_000, third=16_000, fourth=17_000)
    meter = Meter(Variants(EVERYWHERE, EVERYWHERE), ALL_NS, few_ns)
    meter.second_ns = {"other": 15_500}
    assert chosen(lanes_of(meter)) == ("own", 15_000)
    assert meter.confirmed == ["other", "other"]


def test_what_failed_is_not_tried_and_what_fails_is_left() -> None:
    all_ns = {**ALL_NS, **times(other=None)}
    meter = Meter(Variants(EVERYWHERE, EVERYWHERE), all_ns, times(own=15_000, third=None, fourth=14_000, last=14_500))
    assert chosen(lanes_of(meter)) == ("fourth", 14_000)
    assert "other" not in meter.measured


def test_another_variant_replaces_one_that_is_not_offered_on_one_thread() -> None:
    meter = Meter(Variants(EVERYWHERE, ("third", "other")), ALL_NS, times(other=15_000, third=14_000))
    assert chosen(lanes_of(meter)) == ("third", 14_000)


def test_a_kernel_without_variants_on_one_thread_has_no_lane() -> None:
    lanes = lanes_of(Meter(Variants(EVERYWHERE, ()), ALL_NS, {}))
    assert not lanes.fastest and not lanes.estimates_ns()


def test_others_are_not_tried_when_time_is_over() -> None:
    meter, deadline = Meter(Variants(EVERYWHERE, EVERYWHERE), ALL_NS, times(own=15_000)), Deadline()
    meter.deadline = deadline
    assert chosen(lanes_of(meter, deadline)) == ("own", 15_000)
    assert set(meter.measured) == {"own"}


@pytest.mark.parametrize(("each_s", "measured"), [(1.0, 6), (2.0, 4), (4.0, 2), (8.0, 1)])
def test_time_is_left_for_sets(each_s: float, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])

    class Slow(Meter):
        def measure(self, candidates: Sequence[Candidate], end: object = None) -> list[Record]:
            clock_s[0] += each_s
            return super().measure(candidates, end)

    names = EVERYWHERE[:3]
    meter: Any = Slow(Variants(names, names), ALL_NS, times(own=15_000, other=16_000, third=17_000))
    graph, steps = plan()
    ledger = Ledger(meter, replace(DEFAULT_LIMITS, batch=1))
    ledger.look_up(steps)
    lanes = KernelLanes(graph, steps, ledger)
    lanes.measure(Deadline(10.0))
    assert len(meter.measured) == measured
    assert meter.measured[:2] == ["own", "own"][:measured]
    assert len(lanes.fastest) == min(2, measured)


def test_no_others_are_tried_if_so_limited() -> None:
    meter: Any = Meter(Variants(EVERYWHERE, EVERYWHERE), ALL_NS, times(own=15_000))
    graph, steps = plan()
    ledger = Ledger(meter, replace(DEFAULT_LIMITS, concurrent_variants=0))
    ledger.look_up(steps)
    lanes = KernelLanes(graph, steps, ledger)
    lanes.measure(Deadline())
    assert chosen(lanes) == ("own", 15_000)


def test_a_set_has_the_variants_that_are_fastest_on_its_threads() -> None:
    few_ns = times(own=19_900, other=11_000, third=16_000, fourth=17_000)
    meter: Any = Meter(Variants(EVERYWHERE, EVERYWHERE), ALL_NS, few_ns)
    graph, steps = plan()
    ledger = Ledger(meter)
    ledger.look_up(steps)
    found = side_by_side(graph, steps, ledger, Deadline())
    assert found is not None and [str(step.offer.variant) for step in found] == ["toy:other | toy:other"]
    assert meter.measured[-1] == "other|other"
