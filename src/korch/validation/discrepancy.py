"""A plan's predicted and measured time -> the kernels that explain the difference, if it is large.

The predicted time of a plan is the sum of the times of its kernels, each measured alone. If the
time of complete runs differs much, some kernels were measured wrongly or take longer within runs.
The kernels that explain most of the difference are measured again, and the database gets the new
times. A difference that remains is reported as a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from korch.candidate.candidate import Candidate
from korch.deadline import Deadline
from korch.measure.meter import AnyMeter
from korch.runtime.report import Discrepancy, Suspect, disagree
from korch.validation.plan import Validation

RUNS = 5
EXPLAINED = 0.8
"""The kernels that together explain this share of the difference are measured again."""

MOST_KERNELS = 24


def examine(validation: Validation, meter: AnyMeter, deadline: Deadline) -> Discrepancy | None:
    """Return the difference between the winner's predicted and measured time; None if it is small.

    Args:
        validation: the fastest correct plan and its times.
        meter: measures kernels again.
        deadline: when to stop measuring.
    """
    entry, measured_ns = validation.won.entry, validation.won.median_ns
    if not all(done for _, done in entry.costs) or not disagree(entry.predicted_ns, measured_ns):
        return None
    costs_ns = [float(cost_ns) for cost_ns, _ in entry.costs]
    found: list[Suspect] = []
    if not deadline.is_over:
        in_run_ns = _in_run_ns(validation, deadline)
        scale = measured_ns / max(1.0, sum(in_run_ns))  # kernels that are timed wait for each other
        in_run_ns = [ns * scale for ns in in_run_ns]
        numbers = explaining(costs_ns, in_run_ns)
        found = [Suspect(n, entry.steps[n].provider, costs_ns[n], costs_ns[n], in_run_ns[n]) for n in numbers]
        found = _timed_again(found, entry.steps, meter, deadline)
    again_ns = sum(costs_ns) + sum(s.again_ns - s.alone_ns for s in found)
    return Discrepancy(entry.predicted_ns, measured_ns, again_ns, validation.won.is_disturbed, tuple(found))


def _in_run_ns(validation: Validation, deadline: Deadline) -> list[float]:
    """Return the time of each kernel within runs; on other targets its share of a run."""
    time, entry = getattr(validation.winner, "time", None), validation.won.entry
    if time is None:
        ratio = validation.won.median_ns / entry.predicted_ns
        return [cost_ns * ratio for cost_ns, _ in entry.costs]
    rows: list[Sequence[int]] = []
    while len(rows) < RUNS and not (rows and deadline.is_over):
        rows += time(validation.arrays, 1).kernel_ns
    return [float(ns) for ns in np.median(np.array(rows, np.float64), axis=0)]


def explaining(alone_ns: Sequence[float], in_run_ns: Sequence[float]) -> list[int]:
    """Return the places of the kernels that explain most of a difference, the greatest first.

    A kernel explains a part of it if its times differ in the same direction as the sums.
    """
    differences_ns = np.subtract(in_run_ns, alone_ns)
    off_ns = np.maximum(0.0, differences_ns if differences_ns.sum() > 0 else -differences_ns)
    order = np.argsort(-off_ns, kind="stable")[:MOST_KERNELS]
    before = np.cumsum(off_ns[order]) - off_ns[order]
    return [int(n) for n, so_far in zip(order, before, strict=True) if so_far < EXPLAINED * off_ns.sum()]


def _timed_again(
    suspects: Sequence[Suspect], steps: Sequence[Candidate], meter: AnyMeter, deadline: Deadline
) -> list[Suspect]:
    """Return suspects with new times, and store these in the database."""
    keys: Mapping[str, Candidate] = {steps[s.number].key: steps[s.number] for s in suspects}
    meter.tell(f"timing {len(keys)} kernels again: the prediction is wrong")
    meter.measure_again(list(keys.values()), deadline)
    return [replace(s, again_ns=float(meter.cost_ns(steps[s.number])[0])) for s in suspects]
