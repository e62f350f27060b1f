"""The result of a search: the plan, its certificate, and the rounds that led to it."""

from dataclasses import dataclass
from enum import StrEnum

from korch.binary_program.problem import Certificate
from korch.candidate.candidate import Candidate


class PlanName(StrEnum):
    """The names of the plans that are validated end to end."""

    SEARCHED = "searched"
    SECOND = "second"
    SPLIT = "split"
    PLAIN_LAYOUT = "plain-layout"
    BY_RULES = "by-rules"
    ONCE = "once"


@dataclass(frozen=True, slots=True)
class Round:
    """The state of a search after one round."""

    bound_ns: int  # lower bound of all plans' costs
    incumbent_ns: int | None  # the cost of the best plan so far; None if there is none yet
    measured: int  # the number of candidates measured so far, in this run or an earlier one
    seconds: float  # time since the search started
    expected_ns: int | None = None  # the cost of the plan that a longer search is expected to find


def expected(best_ns: int | None, bound_ns: int, estimate_ns: int | None) -> int | None:
    """Return the cost that is expected after a longer search: the estimate, between the bound and the best plan."""
    if estimate_ns is None:
        return None
    return max(bound_ns, estimate_ns if best_ns is None else min(best_ns, estimate_ns))


@dataclass(frozen=True, slots=True)
class Orchestration:
    """The result of a search."""

    steps: tuple[Candidate, ...]  # the chosen candidates in order
    certificate: Certificate  # the cost of the plan and the proven bound
    costs_ns: tuple[int, ...]  # the cost of each step
    rounds: tuple[Round, ...]  # the rounds of the search
    distinct_measured: int  # how many candidates have measured times; candidates with equal keys count once
    failed: int  # how many candidates failed
    stopped_by_budget: bool  # whether the search ended because no time was left
    corrections: int = 0  # the ledger's number of corrections when the bound was proven
