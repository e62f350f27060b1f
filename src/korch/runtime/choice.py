"""Plans for ranges of sizes -> a table of the plan that takes the least time at each size, by their fitted costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from korch.ranges.cost import Integers, Matrix
from korch.ranges.form import Dimension, Sizes
from korch.ranges.plan import RangePlan

MOST_ENTRIES = 1 << 18
"""The most sizes of a table; of more, the costs are computed when a size is asked for."""

MOST_PLANS = 256
"""Numbers of plans in a table are bytes."""


class PlanChoice:
    """Finds the plan for the size of a run."""

    def __init__(self, dimensions: Sequence[Dimension], plans: Sequence[RangePlan]) -> None:
        """Keep the plans; the table is made when it is first read.

        Args:
            dimensions: what is free.
            plans: in the order in which plans of equal cost are taken.
        """
        self._plans = plans
        self._lows = tuple(d.low for d in dimensions)
        self._counts = tuple(d.high - d.low + 1 for d in dimensions)
        self._has_table = math.prod(self._counts) <= MOST_ENTRIES and len(plans) <= MOST_PLANS

    def number(self, sizes: Sizes) -> int:
        """Return the place of the plan with the least cost for some sizes; without costs, of the first that is able."""
        if not self._has_table:
            return int(self._best([np.array([size]) for size in sizes])[0])
        place = 0
        for size, low, count in zip(sizes, self._lows, self._counts, strict=True):
            place = place * count + size - low
        return self._table[place]

    @cached_property
    def _table(self) -> bytes:
        columns = [np.arange(low, low + count) for low, count in zip(self._lows, self._counts, strict=True)]
        sizes = [column.reshape(-1) for column in np.meshgrid(*columns, indexing="ij")]
        return self._best(sizes).astype(np.uint8).tobytes()

    def _best(self, sizes: Sequence[Integers]) -> Integers:
        return np.asarray(np.argmin([self._costs(plan, sizes) for plan in self._plans], axis=0))

    def _costs(self, plan: RangePlan, sizes: Sequence[Integers]) -> Matrix:
        """Return what a plan takes for each of some sizes; infinity where it is too small."""
        costs = np.zeros(len(sizes[0]))
        for cost in plan.costs:
            costs += cost.at_all(sizes)
        for size, most in zip(sizes, plan.sizes, strict=True):
            costs[size != most if plan.is_exact else size > most] = math.inf
        return costs
