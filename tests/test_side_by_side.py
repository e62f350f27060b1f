"""When the search looks for kernels that can run side by side, and what it does with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import korch
from benchmarks.models import build
from korch.ablation import Ablation
from korch.assembly.segments import Outcome
from korch.candidate.candidate import Candidate
from korch.limits import SearchLimits
from korch.measure.cpu import CpuMeter
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline import Run, stages
from korch.search.ledger import Ledger


def run(**options: Any) -> Run:
    return Run(Options(**options), {}, lambda stage, text: None, started_s=1000.0)


@pytest.mark.parametrize(
    ("options", "looks"),
    [
        ({"threads": 2}, True),
        ({"threads": 1}, False),
        ({"threads": 2, "measure": False}, False),
        ({"threads": 2, "ablation": Ablation(side_by_side=False)}, False),
        ({"threads": 2, "target": "cuda"}, False),
    ],
)
def test_they_are_looked_for_where_they_can_be(options: dict[str, Any], looks: bool) -> None:
    assert run(**options).looks_side_by_side is looks
    assert run(**options).first_deadline.at_s is None


def test_a_part_of_the_budget_is_left_for_them_and_for_building_the_plan() -> None:
    begun = run(budget_s=100.0, threads=2)
    begun.end_s = 7.0
    assert begun.deadline.at_s == 1100.0
    assert begun.build_deadline.at_s == 1093.0
    assert begun.first_deadline.at_s == 1083.0


@pytest.mark.parametrize(
    ("timed", "chosen"), [(0, "estimates"), (3, "the measured times of 3 kernels and by estimates")]
)
def test_a_budget_that_is_too_short_is_reported_with_what_the_plan_is_chosen_by(
    timed: int, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun = run(budget_s=100.0)
    begun.started_s, begun.end_s = time.monotonic(), 7.0
    begun.ledger = Ledger(Meter())
    begun.ledger.records = {str(number): Measured(1000, ()) for number in range(timed)}
    begun.check_budget(92.0)
    assert caplog.messages == []
    begun.check_budget(94.0)
    begun.check_budget(95.0)
    assert caplog.messages == [
        f"no time is left to time all kernels of a first plan, so it is chosen by {chosen}; a budget of about 202 s "
        "suffices"
    ]


def test_an_interrupt_ends_both_searches() -> None:
    both = run(threads=2, budget_s=1e9)
    both.deadline.stop()
    assert both.first_deadline.is_over


class Meter(CpuMeter):
    """Each kernel takes 1 us."""

    def __init__(self) -> None:
        pass

    def bound_ns(self, candidate: Candidate) -> int:
        return 1000


@pytest.mark.parametrize(
    ("options", "spent_s", "seconds"),
    [
        ({}, 0.0, 60.0),
        ({"budget_s": 100.0}, 70.0, 30.0),
        ({"budget_s": 100.0}, 99.0, None),
        ({"budget_s": 100.0}, 150.0, None),
        ({"budget_s": 900.0}, 0.0, 60.0),
        ({"ablation": Ablation(side_by_side=False)}, 0.0, None),
    ],
)
def test_how_long_they_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], spent_s: float, seconds: float | None
) -> None:
    given: list[float | None] = []

    def search(*arguments: Any) -> None:
        given.append(arguments[-1].left_s)

    monkeypatch.setattr(stages, "side_by_side", search)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    outcome: Any = Outcome({"searched": ()}, None)  # type: ignore[arg-type]
    begun = Run(Options(threads=2, **options), {}, lambda stage, text: None, started_s=1000.0 - spent_s)
    begun.outcome, begun.ledger, begun.joined = outcome, Ledger(Meter()), SimpleNamespace(graph=None)  # type: ignore[assignment]
    assert stages._with_side_by_side(begun) == outcome
    assert given == ([] if seconds is None else [seconds])


def test_their_plan_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "side_by_side", lambda graph, steps, *rest: steps[:1])
    a, b, c = (SimpleNamespace(key=key) for key in "abc")
    outcome: Any = Outcome({"searched": (a, b), "split": (c,)}, None)  # type: ignore[arg-type,dict-item]
    begun = run(threads=2)
    begun.outcome, begun.ledger, begun.joined = outcome, Ledger(Meter()), SimpleNamespace(graph=None)  # type: ignore[assignment]
    found = stages._with_side_by_side(begun)
    assert list(found.plans.items()) == [("side by side", (a,)), ("searched", (a, b)), ("split", (c,))]


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(("threads", "share"), [(2, 1), (4, 2)])
def test_the_report_says_what_runs_side_by_side(
    threads: int, share: int, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    def alone(graph: Any, steps: Sequence[Candidate], ledger: Any, *rest: Any) -> tuple[Any, ...]:
        chosen = []
        for step in steps:
            few = [ledger.meter.concurrent.propose(graph, [[step]], ledger.meter.target, [n]) for n in (share, 1)]
            ledger.measure(few)
            chosen.append(next(c for c in few if isinstance(ledger.known(c), Measured)))
        return tuple(chosen)

    monkeypatch.setattr(stages, "side_by_side", alone)
    found = korch.optimize(
        build("mlp"),
        threads=threads,
        cache_folder=cache_folder,
        search=SearchLimits(gap=0.5, max_primitives=4, least_side_by_side_seconds=0.0),
        ablation=Ablation(baselines=False),
    ).report
    beside = found.side_by_side
    assert found.plan == "side by side" and found.max_error < 1e-3
    assert beside.kernels == beside.parts == found.kernels
