"""Runs in which a thread had no core: they are discarded and repeated, or corrected and marked."""

from typing import Any

import pytest

from korch.measure.record import Measured, confirmed, from_text, is_disturbed, is_lasting, summarize, to_text
from korch.measure.worker import PATIENCE, TimingLimits, take_turns

QUANTUM_NS = 8_000_000


def test_a_scheduler_quantum_is_no_part_of_a_kernel() -> None:
    away = [0, QUANTUM_NS, 0, QUANTUM_NS, 0, QUANTUM_NS]
    samples = [20_000 + ns for ns in away]
    assert summarize(samples).time_ns == 20_000 and summarize(samples[1::2]).time_ns > QUANTUM_NS
    found = summarize(samples, away)
    assert (found.time_ns, found.disturbed, found.is_disturbed) == (20_000, 3, False)
    assert found.samples_ns == (20_000,) * 3


def test_what_is_always_disturbed_is_an_estimate_and_not_kept() -> None:
    found = summarize([30_000_000, 26_000_000, 18_000_000], [20_000_000, 16_000_000, 8_000_000])
    assert (found.time_ns, found.disturbed, found.is_disturbed) == (10_000_000, 3, True)
    assert not is_lasting(found)
    assert summarize([QUANTUM_NS], [QUANTUM_NS]).time_ns == QUANTUM_NS  # it tells nothing


def test_a_short_wait_is_no_disturbance() -> None:
    assert not is_disturbed(20_000, 900) and is_disturbed(20_000, 1_100)
    assert not is_disturbed(10_000_000, 190_000) and is_disturbed(10_000_000, 210_000)


def test_an_undisturbed_measurement_counts_more_than_a_longer_disturbed_one() -> None:
    first = Measured(900, (900,), disturbed=4, is_disturbed=True)
    again = Measured(500, (500,), disturbed=1)
    for pair in ((first, again), (again, first)):
        found = confirmed(*pair)
        assert found == Measured(500, (500,), is_confirmed=True, disturbed=5)
    assert from_text(to_text(found)) == found


class Kernel:
    """A kernel of some nanoseconds, disturbed in its first runs."""

    repeats = 1

    def __init__(self, own_ns: int, disturbed: int) -> None:
        self.own_ns, self.disturbed, self.runs = own_ns, disturbed, 0

    def run(self) -> tuple[int, int]:
        self.runs += 1
        away_ns = QUANTUM_NS if self.runs <= self.disturbed else 0
        return self.own_ns + away_ns, away_ns


def turns(kernel: Kernel, limits: TimingLimits) -> Measured:
    samples: list[list[int]] = []

    def say(**line: Any) -> None:
        if "sample" in line:
            samples.append(line["sample"][1:])

    take_turns({0: kernel}, Kernel.run, limits, say)
    return summarize([s for s, _ in samples], [away for _, away in samples])


LIMITS = TimingLimits(rounds=6, least_rounds=2, kernel_ns=10_000_000, end_s=100.0, clock=lambda: 0.0)


def test_disturbed_runs_are_taken_again() -> None:
    calm = turns(Kernel(1000, 0), LIMITS)
    busy = turns(Kernel(1000, 30), LIMITS)  # each turn has a run before the one that counts
    assert (len(calm.samples_ns), calm.disturbed) == (LIMITS.rounds, 0)
    assert (busy.time_ns, busy.is_disturbed) == (1000, False)
    assert busy.disturbed == 15
    never = Kernel(1000, 10_000)
    assert turns(never, LIMITS).is_disturbed
    assert never.runs == 2 * PATIENCE * LIMITS.rounds


@pytest.mark.parametrize(("now_s", "rounds"), [(0.0, 6), (101.0, 1)])
def test_after_the_time_each_kernel_has_one_round(now_s: float, rounds: int) -> None:
    limits = TimingLimits(6, 2, 10_000_000, 100.0, clock=lambda: now_s)
    assert len(turns(Kernel(1000, 0), limits).samples_ns) == rounds
