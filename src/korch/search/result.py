"""The result of a search: the plan, its certificate, and the rounds that led to it."""

from __future__ import annotations

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
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class Round:
    """The state of a search after one round.

    Attributes:
        bound_ns: lower bound of all plans' costs.
        incumbent_ns: the cost of the best plan so far; None if there is none yet.
        measured: the number of candidates measured so far, in this run or an earlier one.
        seconds: time since the search started.
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
        certificate: the cost of the plan and the proven bound.
        costs_ns: the cost of each step.
        rounds: the rounds of the search.
        distinct_measured: how many candidates have measured times; candidates with equal keys count once.
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
