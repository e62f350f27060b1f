"""How the time of a budget is divided, and what is said if it is too short."""

import time
from typing import Any

import pytest

from korch.candidate.candidate import Candidate
from korch.measure.cpu import CpuMeter
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline import Run, untold
from korch.search.ledger import Ledger


def run(**options: Any) -> Run:
    return Run(Options(**options), {}, untold, started_s=1000.0)


class Meter(CpuMeter):
    """Each kernel takes 1 us."""

    def __init__(self) -> None:
        pass

    def bound_ns(self, candidate: Candidate) -> int:
        return 1000


def test_the_search_ends_when_the_plan_must_be_built() -> None:
    begun = run(budget_s=100.0)
    begun.end_s = 7.0
    assert (begun.deadline.at_s, begun.build_deadline.at_s) == (1100.0, 1093.0)
    assert run().build_deadline.at_s is None


@pytest.mark.parametrize(
    ("timed", "chosen"), [(0, "estimates"), (3, "the measured times of 3 kernels and by estimates")]
)
def test_a_budget_that_is_too_short_is_reported_with_what_the_plan_is_chosen_by(
    timed: int, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun = run(budget_s=100.0)
    begun.started_s, begun.end_s = time.monotonic(), 7.0
    ledger = Ledger(Meter())
    ledger.records = {str(number): Measured(1000, ()) for number in range(timed)}
    begun.check_budget(ledger, 92.0)
    assert caplog.messages == []
    begun.check_budget(ledger, 94.0)
    begun.check_budget(ledger, 95.0)
    assert caplog.messages == [
        f"no time is left to time all kernels of a first plan, so it is chosen by {chosen}; a budget of about 126 s "
        "suffices"
    ]


def test_an_interrupt_ends_the_search() -> None:
    begun = run(threads=2, budget_s=1e9)
    begun.deadline.stop()
    assert begun.build_deadline.is_over
