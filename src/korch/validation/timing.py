"""Times of whole runs, interleaved over the plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from korch.cores import short_slices
from korch.deadline import Deadline
from korch.measure.absence import Absence
from korch.measure.record import summarize
from korch.primitive.op import Array
from korch.validation.plan import Entry, Result

ROUNDS = 11

SECONDS = 4.0

SHORT_ROUNDS, SHORT_SECONDS = 99, 0.5
"""Short plans are timed in more rounds, until one of these limits: they may differ by little."""

LEAST_ROUNDS = 3

DISTURBED_ROUNDS, DISTURBED_SECONDS = 3 * ROUNDS, 3 * SECONDS
"""The limits of rounds and seconds while too few runs are undisturbed."""

SAFETY = 1.5
"""Another plan is validated only if this many times its predicted duration is left."""


@dataclass(frozen=True)
class Until:
    """The time at which no more plans are built and run.

    Attributes:
        deadline: the time.
        needed_s: returns the seconds to compile the kernels of a plan.
        tell: called with a line of text before each step.
    """

    deadline: Deadline = field(default_factory=Deadline)
    needed_s: Callable[[Entry], float] = lambda entry: 0.0
    tell: Callable[[str], None] = lambda text: None

    def leaves_out(self, entry: Entry, build_s: float) -> bool:
        """Return whether there is no time for a plan if building one takes so long."""
        left_s = self.deadline.left_s
        return left_s is not None and left_s < SAFETY * (build_s + self.needed_s(entry))


def time_all(results: Sequence[Result], arrays: Sequence[Array], until: Until) -> list[Result]:
    """Time the executables in turn, round by round, so that other processes disturb all equally.

    Runs in which a thread had no core for some time are dropped and repeated.
    """
    runners = {i: r.executable.stopwatch(arrays) for i, r in enumerate(results) if r.executable is not None}
    until.tell(f"comparing {len(runners)} plans" if len(runners) > 1 else "timing the plan")
    with short_slices():
        times = _times(runners, until)
    return [_timed(result, times.get(i, [])) for i, result in enumerate(results)]


def _times(runners: Mapping[int, Callable[[], int]], until: Until) -> dict[int, list[tuple[int, int]]]:
    """Return, for each executable, the nanoseconds of its runs and for how many of them a thread had no core."""
    times: dict[int, list[tuple[int, int]]] = {i: [] for i in runners}
    for run in runners.values():
        run()
    begun = time.monotonic()
    for turn in range(SHORT_ROUNDS):
        seconds, is_hurried = time.monotonic() - begun, until.deadline.is_over
        if turn >= LEAST_ROUNDS and (seconds > DISTURBED_SECONDS or is_hurried):
            break
        if turn >= DISTURBED_ROUNDS and seconds > SHORT_SECONDS:
            break
        is_enough = (turn >= ROUNDS and seconds > SHORT_SECONDS) or (turn >= LEAST_ROUNDS and seconds > SECONDS)
        if is_enough and all(not summarize(*zip(*own, strict=True)).is_disturbed for own in times.values() if own):
            break
        for i, run in runners.items():
            if not is_hurried or turn == 0:
                run()  # the first run after another plan finds its caches cold
            absence = Absence()
            taken_ns = run()
            times[i].append((taken_ns, absence.away_ns()))
    return times


def _timed(result: Result, runs: Sequence[tuple[int, int]]) -> Result:
    """Return a result with the times of runs, each with the time for which a thread was away."""
    if not runs:
        return result
    found = summarize(*zip(*runs, strict=True))
    return replace(result, times_ns=found.samples_ns, disturbed=found.disturbed, is_disturbed=found.is_disturbed)
