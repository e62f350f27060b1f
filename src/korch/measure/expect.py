"""Samples of kernels -> what a run of all of them takes.

A kernel's cost is a low quantile of its samples. That tells kernels apart best, as it leaves out
what the system's timer and busy neighbours did to some of them; but of a hundred kernels in a run
a few are always interrupted, so that the sum of costs is less than a run takes. Here a run is drawn
from the samples again and again, one of each kernel, and the sums are what runs are expected to
take. It supposes that kernels are interrupted independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from korch.measure.record import Measured, Record, summarize

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Expected:
    """Nanoseconds that a run is expected to take: the median, and where four of five runs lie."""

    median_ns: float
    p10_ns: float
    p90_ns: float


def expect(kernels: Iterable[tuple[int, Record | None]]) -> Expected | None:
    """Return what a run takes.

    Args:
        kernels: the cost of each kernel of the run, in nanoseconds, and what is known of it.

    Returns:
        What is expected; None if a kernel has no samples.
    """
    rng = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    for cost_ns, record in kernels:
        if not (isinstance(record, Measured) and record.samples_ns):
            return None
        samples = np.asarray(record.samples_ns, np.float64)
        # The cost has what the samples have not: the call, or a bound that they were below.
        samples += cost_ns - summarize(record.samples_ns).time_ns
        sums += samples[rng.integers(0, samples.size, DRAWS)]
    low, median, high = np.percentile(sums, (10, 50, 90))
    return Expected(float(median), float(low), float(high))
