"""Plans for ranges of sizes -> a table with the fastest plan for each size, according to their fitted costs."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from korch.ranges.cost import Integers, Matrix
from korch.ranges.form import Dimension, Sizes
from korch.ranges.plan import RangePlan

MOST_ENTRIES = 1 << 18
"""The most sizes in a table. If there are more, the costs are computed each time a size is looked up."""

MOST_LISTED = 1 << 24
"""The most sizes for which a list of the plans is made."""

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
        """Return the index of the cheapest plan for some sizes; if a plan for them has no costs, of the first one.

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

    def runs(self) -> list[tuple[int, int]]:
        """Return the places at which another plan begins, in the order of all sizes, with the plan's index.

        Of more sizes than `MOST_LISTED`, all have the largest plan.
        """
        count = math.prod(self._counts)
        if len(self._plans) == 1 or count > MOST_LISTED:
            return [(0, len(self._plans) - 1)]
        found: list[tuple[int, int]] = []
        for begin in range(0, count, MOST_ENTRIES):
            own = self._numbers(begin, min(begin + MOST_ENTRIES, count))
            for i in [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist()]:
                if not found or found[-1][1] != own[i]:
                    found.append((begin + i, int(own[i])))
        return found

    @cached_property
    def _table(self) -> bytes:
        return self._numbers(0, math.prod(self._counts)).astype(np.uint8).tobytes()

    def _numbers(self, begin: int, end: int) -> Integers:
        """Return the index of the plan at each of some places."""
        sizes = np.unravel_index(np.arange(begin, end), self._counts)
        found = self._best([size + low for size, low in zip(sizes, self._lows, strict=True)])
        for measured in self._sums:
            place = self._place(measured) - begin
            if 0 <= place < len(found):
                found[place] = self._corrected(measured, int(found[place]))
        return found

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
        costs = np.array([self._costs(plan, sizes) for plan in self._plans])
        without = costs[np.array([not plan.costs for plan in self._plans])]
        at = (without < math.inf).any(axis=0)  # one that serves the size can't be compared with the others
        costs[:, at] = np.where(costs[:, at] < math.inf, 0.0, math.inf)
        return np.asarray(np.argmin(costs, axis=0))

    def _costs(self, plan: RangePlan, sizes: Sequence[Integers]) -> Matrix:
        """Return the cost of a plan at each of some sizes; infinity where the plan does not serve the size."""
        costs = np.zeros(len(sizes[0]))
        for cost in plan.costs:
            costs += cost.at_all(sizes)
        for size, most in zip(sizes, plan.sizes, strict=True):
            costs[size != most if plan.is_exact else size > most] = math.inf
        return costs
