"""Samples of kernels -> the expected time of a run of all of them.

A kernel's cost is a low quantile of its samples. That distinguishes kernels best, since it excludes samples that
timer interrupts or other processes disturbed. But in a run of a hundred kernels a few are always interrupted, so
the sum of costs is less than the time of a run. Here many runs are simulated by drawing one sample of each
kernel, and the sums give the expected times. It is assumed that kernels are interrupted independently.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from korch.measure.record import Measured, Record, summarize

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected nanoseconds of a run: the median, and the range that contains four of five runs."""

    median_ns: float
    p10_ns: float
    p90_ns: float


def expect(kernels: Iterable[tuple[int, Record | None]]) -> Expected | None:
    """Return the expected time of a run.

    `kernels`: the cost of each kernel of the run, in nanoseconds, and its record.

    Returns:
        The expected time; None if a kernel has no samples.
    """
    rng = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    for cost_ns, record in kernels:
        if not (isinstance(record, Measured) and record.samples_ns):
            return None
        samples = np.asarray(record.samples_ns, np.float64)
        # The cost may be higher than the samples: it includes the call, and is at least the bound.
        samples += cost_ns - summarize(record.samples_ns).time_ns
        sums += samples[rng.integers(0, samples.size, DRAWS)]
    low, median, high = np.percentile(sums, (10, 50, 90))
    return Expected(float(median), float(low), float(high))
