"""Plans for a range of sizes -> the time of each of their kernels as a function of the sizes."""

import time
from collections.abc import Sequence

import numpy as np

from korch.inputs import random_arrays
from korch.limits import SearchLimits
from korch.measure.meter import NEVER
from korch.primitive.op import Array
from korch.ranges.cost import Cost, fit_all
from korch.ranges.form import Dimension, Sizes
from korch.ranges.plan import RangePlan
from korch.runtime.executable import Executable
from korch.system.cores import short_slices
from korch.system.deadline import Deadline

FIT_SIZES = 9  # number of sizes at which these plans are timed
FIT_SECONDS = 1.5  # time for these runs
LEAST_FIT_ROUNDS = 3  # runs at each size even if no time remains


def fit_costs(
    dimensions: Sequence[Dimension],
    plans: Sequence[tuple[Executable, RangePlan]],
    deadline: Deadline,
    limits: SearchLimits,
) -> list[tuple[Cost, ...]]:
    """Return the cost of each kernel of some plans that serve the same sizes; none if there is no time.

    `limits`: the limits of sizes, rounds and seconds.
    """
    times: list[list[tuple[Sizes, list[float]]]] = [[] for _ in plans]
    _, first = plans[0]
    bounds = [(d.low, min(n, d.high)) for d, n in zip(dimensions, first.sizes, strict=True)]
    for sizes in sample_sizes(bounds, FIT_SIZES):
        if deadline.is_over:
            break
        for own, row in zip(times, kernel_ns(plans, sizes, limits, deadline), strict=True):
            own.append((sizes, row))
    return [_fitted(own) for own in times]


def sample_sizes(bounds: Sequence[tuple[int, int]], count: int) -> list[Sizes]:
    """Return sizes between bounds in geometric steps; several dimensions have them in different orders."""
    columns = [[_between(low, high, k / (count - 1)) for k in range(count)] for low, high in bounds]
    ends = [tuple(column[0] for column in columns), tuple(column[-1] for column in columns)]
    mixed = [
        tuple(column[k * (2 * d + 1) % count if d else k] for d, column in enumerate(columns)) for k in range(count)
    ]
    return list(dict.fromkeys((*ends, *mixed)))


def _between(low: int, high: int, share: float) -> int:
    """Return the size at a fraction of the way from `low` to `high` in geometric steps."""
    return round(low * (high / low) ** share) if low else round(high * share)


def kernel_ns(
    plans: Sequence[tuple[Executable, RangePlan]], sizes: Sizes, limits: SearchLimits, deadline: Deadline = NEVER
) -> list[list[float]]:
    """Return the least time of each kernel of some plans for some sizes, over interleaved runs.

    The least time is used because other processes make some runs longer.

    `limits`: the limits for the runs of each plan, not counting a first one. `deadline`: after it, each plan has one
    run besides the first one.
    """
    feeds = [_inputs(executable, plan, sizes) for executable, plan in plans]
    rows: list[list[Sequence[int]]] = [[] for _ in plans]
    begun_s = time.monotonic()
    with short_slices():
        for turn in range(limits.fit_rounds + 1):
            is_enough = turn > LEAST_FIT_ROUNDS and time.monotonic() > begun_s + FIT_SECONDS
            if is_enough or (turn > 1 and deadline.is_over):
                break
            for (executable, _), arrays, own in zip(plans, feeds, rows, strict=True):
                found = executable.time(arrays, 1).kernel_ns
                own += found if turn else ()  # the caches are cold in the first run
    return [np.min(np.array(own, np.float64), axis=0).tolist() for own in rows]


def _inputs(executable: Executable, plan: RangePlan, sizes: Sizes) -> list[Array]:
    infos = executable.get_inputs()
    feeds = random_arrays({i.name: (tuple(i.shape), i.dtype) for i in infos}, 0) | plan.hidden_at(sizes)
    return [feeds[info.name] for info in infos]


def _fitted(rows: Sequence[tuple[Sizes, Sequence[float]]]) -> tuple[Cost, ...]:
    times = np.array([row for _, row in rows], np.float64).T
    return fit_all([sizes for sizes, _ in rows], np.maximum(1.0, times)) if rows else ()
