"""How one plan serves the sizes of a range."""

from __future__ import annotations

from dataclasses import dataclass

from korch.primitive.op import Array
from korch.ranges.cost import Cost
from korch.ranges.form import Factor, Hidden, Sizes


@dataclass(frozen=True, slots=True)
class AtSizes:
    """What a search measured at one size of each dimension.

    Attributes:
        sizes: the sizes.
        sum_ns: the sum of the times of the plan's kernels.
        best_ns: the least such sum of any plan of the kernels that were measured there.
        bound_ns: a lower bound of the sum of any plan that was considered there.
    """

    sizes: Sizes
    sum_ns: int
    best_ns: int
    bound_ns: int


@dataclass(frozen=True, slots=True)
class RangePlan:
    """How one plan serves all sizes up to its own, or its own size only.

    Attributes:
        sizes: the plan's size of each dimension.
        inputs: the form of each input that the user sees, in order.
        outputs: the form of each output.
        hidden: the hidden inputs, which come after these.
        timed: the sizes for which its kernels are timed.
        costs: the fitted time of each kernel that runs; empty if not fitted.
        measured: the sums of its kernels at the sizes for which plans were searched.
        is_exact: whether it serves its own size only, so that nothing is padded, masked or cut; `outputs` is empty.
    """

    sizes: Sizes
    inputs: tuple[tuple[tuple[Factor, ...], ...], ...]
    outputs: tuple[tuple[tuple[Factor, ...], ...], ...]
    hidden: tuple[Hidden, ...] = ()
    timed: Sizes = ()
    costs: tuple[Cost, ...] = ()
    measured: tuple[AtSizes, ...] = ()
    is_exact: bool = False

    def serves(self, sizes: Sizes) -> bool:
        """Return whether the plan can run some sizes."""
        return sizes == self.sizes if self.is_exact else all(n <= m for n, m in zip(sizes, self.sizes, strict=True))

    def hidden_at(self, sizes: Sizes) -> dict[str, Array]:
        """Return the hidden inputs for some sizes, by name."""
        return {hidden.name: hidden.array(sizes) for hidden in self.hidden}

    def cost_ns(self, sizes: Sizes) -> float:
        """Return the predicted time for some sizes; 0 if it is not known."""
        return sum(cost.at(sizes) for cost in self.costs)
