"""What a search returns: the plan, what is proven of it, and the rounds that led to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from korch.candidate.candidate import Candidate
from korch.program.problem import Certificate


class PlanName(StrEnum):
    """The names of the plans that are validated end to end."""

    SEARCHED = "searched"
    SECOND = "second"
    SIDE_BY_SIDE = "side by side"
    WITHOUT_FOUND = "without found programs"
    SPLIT = "split"
    PLAIN_LAYOUT = "plain-layout"
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class Round:
    """The state of a search after one round.

    Attributes:
        bound_ns: no plan costs less.
        incumbent_ns: the cost of the best plan so far; None if there is none yet.
        measured: candidates measured so far, in this run or before.
        seconds: since the start.
    """

    bound_ns: int
    incumbent_ns: int | None
    measured: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Orchestration:
    """The result of a search.

    Attributes:
        steps: the chosen candidates in order.
        certificate: what is proven of them.
        costs_ns: the cost of each.
        rounds: the rounds of the search.
        distinct_measured: how many candidates have measured times, equal ones counted once.
        failed: how many candidates failed.
        stopped_by_budget: whether the search ended because no time was left.
    """

    steps: tuple[Candidate, ...]
    certificate: Certificate
    costs_ns: tuple[int, ...]
    rounds: tuple[Round, ...]
    distinct_measured: int
    failed: int
    stopped_by_budget: bool
