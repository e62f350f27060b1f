"""How one plan serves the sizes of a range."""

from dataclasses import dataclass

from korch.primitive.op import Array
from korch.ranges.cost import Cost
from korch.ranges.form import Factor, Hidden, Sizes


@dataclass(frozen=True, slots=True)
class AtSizes:
    """What a search measured at one size of each dimension."""

    sizes: Sizes  # the sizes
    sum_ns: int  # the sum of the times of the plan's kernels
    best_ns: int  # the least such sum of any plan of the kernels that were measured there
    bound_ns: int  # a lower bound of the sum of any plan that was considered there


@dataclass(frozen=True, slots=True)
class RangePlan:
    """How one plan serves all sizes up to its own, or its own size only."""

    sizes: Sizes  # the plan's size of each dimension
    inputs: tuple[tuple[tuple[Factor, ...], ...], ...]  # the form of each input that the user sees, in order
    outputs: tuple[tuple[tuple[Factor, ...], ...], ...]  # the form of each output
    hidden: tuple[Hidden, ...] = ()  # the hidden inputs, which come after these
    timed: Sizes = ()  # the sizes for which its kernels are timed
    costs: tuple[Cost, ...] = ()  # the fitted time of each kernel that runs; empty if not fitted
    measured: tuple[AtSizes, ...] = ()  # the sums of its kernels at the sizes for which plans were searched
    # whether it serves its own size only, so that nothing is padded, masked or cut; `outputs` is empty
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
