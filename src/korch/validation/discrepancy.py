"""A plan's predicted and measured time -> the kernels that explain the difference, if it is large.

The predicted time of a plan is the sum of the times of its kernels, each measured alone. If the
time of complete runs differs much, some kernels were measured wrongly or take longer within runs.
The kernels that explain most of the difference are measured again, and the new times are stored in the
database. A difference that remains is reported as a warning. If some kernels of a plan were not measured,
the times of the other kernels are compared with their times within complete runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from korch.candidate.candidate import Candidate
from korch.measure.meter import AnyMeter
from korch.runtime.report import Discrepancy, Suspect, disagree
from korch.system.cores import short_slices
from korch.system.deadline import Deadline
from korch.validation.plan import Validation

SUSPECT_RUNS = 5  # runs in which kernels are timed if the prediction for a plan is wrong
SUSPECT_SHARE = 0.8  # kernels that explain this share of the difference are measured again
SUSPECT_KERNELS = 24  # most kernels that are measured again


def examine(validation: Validation, meter: AnyMeter, deadline: Deadline) -> Discrepancy | None:
    """Return the difference between the winner's predicted and measured time; None if it is small."""
    entry, measured_ns = validation.won.entry, float(validation.won.median_ns)
    known = [n for n, (_, is_measured) in enumerate(entry.costs) if is_measured]
    costs_ns = [float(entry.costs[n][0]) for n in known]
    is_partly_known, in_run_ns = len(known) < len(entry.costs), list[float]()
    if is_partly_known:
        if not known or deadline.is_over:
            return None
        in_run_ns = _in_run_ns(validation, deadline, known, SUSPECT_RUNS)
        measured_ns = sum(in_run_ns)
    predicted_ns = sum(costs_ns)
    if not disagree(predicted_ns, measured_ns):
        return None
    found: list[Suspect] = []
    if not deadline.is_over:
        in_run_ns = in_run_ns or _in_run_ns(validation, deadline, known, SUSPECT_RUNS)
        of_known = zip(known, costs_ns, in_run_ns, strict=True)
        suspects = [Suspect(n, entry.steps[n].provider, alone_ns, alone_ns, ns) for n, alone_ns, ns in of_known]
        found = [suspects[i] for i in explaining(costs_ns, in_run_ns)]
        found = _timed_again(found, entry.steps, meter, deadline)
    again_ns = predicted_ns + sum(s.again_ns - s.alone_ns for s in found)
    unknown = len(entry.costs) - len(known)
    return Discrepancy(predicted_ns, measured_ns, again_ns, validation.won.is_disturbed, tuple(found), unknown)


def _in_run_ns(validation: Validation, deadline: Deadline, numbers: Sequence[int], runs: int) -> list[float]:
    """Return the times of some kernels within a run, scaled to the plan's median time.

    The times of a run in which each kernel is timed are only used as shares of the median time, because such
    kernels wait for each other. On targets that can't time kernels within a run, the predicted shares are used.
    """
    time, entry = getattr(validation.winner, "time", None), validation.won.entry
    rows: list[Sequence[int]] = []
    with short_slices():
        while time is not None and len(rows) < runs and not (rows and deadline.is_over):
            rows += time(validation.timed, 1).kernel_ns
    if not any(rows):
        rows = [[cost_ns for cost_ns, _ in entry.costs]]
    medians_ns = np.median(np.array(rows, np.float64), axis=0)
    scale = validation.won.median_ns / max(1.0, float(medians_ns.sum()))
    return [float(medians_ns[n] * scale) for n in numbers]


def explaining(alone_ns: Sequence[float], in_run_ns: Sequence[float]) -> list[int]:
    """Return the indices of the kernels that explain most of a difference, in descending order of their part.

    A kernel explains a part of the difference if its times differ in the same direction as the sums.
    """
    differences_ns = np.subtract(in_run_ns, alone_ns)
    off_ns = np.maximum(0.0, differences_ns if differences_ns.sum() > 0 else -differences_ns)
    order = np.argsort(-off_ns, kind="stable")[:SUSPECT_KERNELS]
    before = np.cumsum(off_ns[order]) - off_ns[order]
    most_ns = SUSPECT_SHARE * off_ns.sum()
    return [int(n) for n, so_far in zip(order, before, strict=True) if so_far < most_ns]


def _timed_again(
    suspects: Sequence[Suspect], steps: Sequence[Candidate], meter: AnyMeter, deadline: Deadline
) -> list[Suspect]:
    """Return suspects with new times, and store these in the database."""
    keys: Mapping[str, Candidate] = {steps[s.number].key: steps[s.number] for s in suspects}
    meter.tell(f"timing {len(keys)} kernels again: the prediction is wrong")
    meter.measure_again(list(keys.values()), deadline)
    return [replace(s, again_ns=float(meter.cost_ns(steps[s.number])[0])) for s in suspects]
