"""Plans for ranges of sizes -> a table with the fastest plan for each size, according to their fitted costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from korch.ranges.cost import Integers, Matrix
from korch.ranges.form import Dimension, Sizes
from korch.ranges.plan import RangePlan

MOST_ENTRIES = 1 << 18
"""The most sizes in a table. If there are more, the costs are computed each time a size is looked up."""

MOST_PLANS = 256
"""The most plans in a table, which stores the number of a plan in one byte."""


MOST = 1.05
"""The largest ratio of the measured sum of a chosen plan's kernels to the least one at the size."""


class PlanChoice:
    """Finds the fastest plan for the sizes of a run."""

    def __init__(self, dimensions: Sequence[Dimension], plans: Sequence[RangePlan]) -> None:
        """Store the plans; the table is computed on first use.

        `plans`: the plans; of plans with equal costs, the first is used.
        """
        self._plans = plans
        self._lows = tuple(d.low for d in dimensions)
        self._counts = tuple(d.high - d.low + 1 for d in dimensions)
        self._has_table = math.prod(self._counts) <= MOST_ENTRIES and len(plans) <= MOST_PLANS

    def number(self, sizes: Sizes) -> int:
        """Return the index of the cheapest plan for some sizes; without costs, of the first plan that serves them.

        At a size at which the plans' kernels were measured, it is not a plan whose sum there exceeds the least one
        by more than a factor of `MOST`.
        """
        if not self._has_table:
            return self._corrected(sizes, int(self._best([np.array([size]) for size in sizes])[0]))
        return self._table[self._place(sizes)]

    def _place(self, sizes: Sizes) -> int:
        place = 0
        for size, low, count in zip(sizes, self._lows, self._counts, strict=True):
            place = place * count + size - low
        return place

    @cached_property
    def _table(self) -> bytes:
        columns = [np.arange(low, low + count) for low, count in zip(self._lows, self._counts, strict=True)]
        sizes = [column.reshape(-1) for column in np.meshgrid(*columns, indexing="ij")]
        found = self._best(sizes).astype(np.uint8)
        for measured in self._sums:
            place = self._place(measured)
            if 0 <= place < len(found):
                found[place] = self._corrected(measured, int(found[place]))
        return found.tobytes()

    @cached_property
    def _sums(self) -> dict[Sizes, dict[int, int]]:
        """By size, the sums of the measured kernels of the plans, by plan."""
        found: dict[Sizes, dict[int, int]] = {}
        for i, plan in enumerate(self._plans):
            for at in plan.measured:
                found.setdefault(at.sizes, {})[i] = at.sum_ns
        return found

    def _corrected(self, sizes: Sizes, number: int) -> int:
        """Return a plan that is measured to be among the best at a size, if the one chosen by fitted costs is not."""
        sums = self._sums.get(sizes, {})
        is_worse = number in sums and sums[number] > MOST * min(sums.values())
        return min(sums, key=sums.__getitem__) if is_worse else number

    def _best(self, sizes: Sequence[Integers]) -> Integers:
        return np.asarray(np.argmin([self._costs(plan, sizes) for plan in self._plans], axis=0))

    def _costs(self, plan: RangePlan, sizes: Sequence[Integers]) -> Matrix:
        """Return the cost of a plan at each of some sizes; infinity where the plan does not serve the size."""
        costs = np.zeros(len(sizes[0]))
        for cost in plan.costs:
            costs += cost.at_all(sizes)
        for size, most in zip(sizes, plan.sizes, strict=True):
            costs[size != most if plan.is_exact else size > most] = math.inf
        return costs
