"""Ranks the plans that a search has tried by their current costs: pure functions of the ledger."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.search.ledger import Ledger
from korch.search.price import plan_ns, price


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan: its cost in nanoseconds, and the numbers of its candidates."""

    cost_ns: int
    kernels: tuple[int, ...]

    def is_close(self, bound_ns: int, gap: float) -> bool:
        """Return whether `bound_ns` proves that no plan is cheaper by more than the fraction `gap` of this cost."""
        return self.cost_ns - bound_ns <= gap * self.cost_ns


def best_two(
    ledger: Ledger, candidates: Sequence[Candidate], tried: Iterable[tuple[int, ...]], *, is_measuring: bool
) -> tuple[PricedPlan | None, PricedPlan | None]:
    """Return the best plan that was tried and the second-best one.

    If no plan is fully measured, the best is the first plan without failed kernels.

    `is_measuring`: whether kernels are measured; if not, a plan costs the sum of its lower bounds.
    """
    plans = [(kernels, [candidates[k] for k in kernels]) for kernels in tried]
    measured = sorted(
        (PricedPlan(plan_ns(ledger, own), kernels) for kernels, own in plans if all(map(ledger.is_measured, own))),
        key=lambda plan: plan.cost_ns,
    )
    if measured:
        best = measured[0]
        return best, next((plan for plan in measured if set(plan.kernels) != set(best.kernels)), None)
    alive = ((kernels, own) for kernels, own in plans if not any(map(ledger.has_failed, own)))
    kernels, own = next(alive, (None, ()))
    if kernels is None:
        return None, None
    cost_ns = plan_ns(ledger, own) if is_measuring else sum(price(ledger, own).costs_ns)
    return PricedPlan(cost_ns, kernels), None


def distinct_measured(ledger: Ledger, candidates: Iterable[Candidate]) -> int:
    """Return how many candidates are measured; candidates with equal keys count once."""
    unique = {c.key: c for c in candidates}
    return sum(map(ledger.is_measured, unique.values()))
