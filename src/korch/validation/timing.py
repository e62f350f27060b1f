"""Times complete runs of several plans, interleaved."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from korch.measure.absence import Absence
from korch.measure.record import summarize
from korch.primitive.op import Array
from korch.system.cores import short_slices
from korch.system.deadline import Deadline
from korch.validation.plan import PlanEntry, Result

PLAN_ROUNDS = 11  # rounds in which plans are timed in turn
PLAN_SECONDS = 4.0  # time for these rounds
LEAST_PLAN_ROUNDS = 3  # rounds even if no time remains
SHORT_PLAN_SECONDS = 0.5  # plans whose `PLAN_ROUNDS` take less are short
SHORT_PLAN_ROUNDS = 99  # most rounds of short plans
DISTURBED_FACTOR = 3  # rounds and seconds are extended up to this factor while too few runs are undisturbed
BUILD_SAFETY = 1.5  # a plan is built only if this many times its predicted duration remains


@dataclass(frozen=True)
class Until:
    """The condition under which no more plans are built and run."""

    deadline: Deadline = field(default_factory=Deadline)  # the time at which to stop
    # returns the seconds needed to compile the kernels of a plan
    needed_s: Callable[[PlanEntry], float] = lambda entry: 0.0
    tell: Callable[[str], None] = lambda text: None  # called with a line of text before each step

    def leaves_out(self, entry: PlanEntry, build_s: float) -> bool:
        """Return whether there is no time left for a plan, if building a plan takes `build_s`."""
        left_s = self.deadline.left_s
        return left_s is not None and left_s < BUILD_SAFETY * (build_s + self.needed_s(entry))


def time_all(results: Sequence[Result], arrays: Sequence[Array], until: Until) -> list[Result]:
    """Time the executables in turn, round by round, so that other processes disturb all of them equally.

    Runs in which a thread had no core for some time are dropped and repeated.
    """
    runners = {i: r.executable.stopwatch(arrays) for i, r in enumerate(results) if r.executable is not None}
    until.tell(f"comparing {len(runners)} plans" if len(runners) > 1 else "timing the plan")
    with short_slices():
        times = _times(runners, until)
    return [_timed(result, times.get(i, [])) for i, result in enumerate(results)]


def _times(runners: Mapping[int, Callable[[], int]], until: Until) -> dict[int, list[tuple[int, int]]]:
    """Return, for each executable and run, the nanoseconds of the run and those for which a thread had no core."""
    times: dict[int, list[tuple[int, int]]] = {i: [] for i in runners}
    if len(runners) > 1:  # a single plan has just run, to be checked
        for run in runners.values():
            run()
    begun, least = time.monotonic(), LEAST_PLAN_ROUNDS
    for turn in range(SHORT_PLAN_ROUNDS):
        seconds, is_hurried = time.monotonic() - begun, until.deadline.is_over
        if turn >= least and (seconds > DISTURBED_FACTOR * PLAN_SECONDS or is_hurried):
            break
        is_long = seconds > SHORT_PLAN_SECONDS
        if turn >= DISTURBED_FACTOR * PLAN_ROUNDS and is_long:
            break
        is_enough = (turn >= PLAN_ROUNDS and is_long) or (turn >= least and seconds > PLAN_SECONDS)
        if is_enough and all(not summarize(*zip(*own, strict=True)).is_disturbed for own in times.values() if own):
            break
        for i, run in runners.items():
            if len(runners) > 1 and (not is_hurried or turn == 0):
                run()  # the first run after another plan finds its caches cold
            absence = Absence()
            taken_ns = run()
            times[i].append((taken_ns, absence.away_ns()))
    return times


def _timed(result: Result, runs: Sequence[tuple[int, int]]) -> Result:
    """Return a result with the times of runs, given with the times for which a thread had no core."""
    if not runs:
        return result
    found = summarize(*zip(*runs, strict=True))
    return replace(result, times_ns=found.samples_ns, disturbed=found.disturbed, is_disturbed=found.is_disturbed)
