"""Ledger -> costs of candidates: measured times, bounds for the others, or estimates.

Pure functions of what the ledger knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.measure.record import Failed, Measured
from korch.search.estimate import Kind
from korch.search.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of an instance's candidates.

    Attributes:
        costs_ns: the measured time, or the bound, of each.
        is_measured: whether each is measured.
        failed: the positions of those that failed.
    """

    costs_ns: list[int]
    is_measured: list[bool]
    failed: list[int]


def price(ledger: Ledger, candidates: Sequence[Candidate]) -> Prices:
    """Return the costs of candidates.

    A time below the bound counts as the bound: costs must only rise from bounds to measurements,
    or the last solution would prove nothing.
    """
    records = [ledger.records.get(c.key) for c in candidates]
    costs_ns = [
        max(record.time_ns, bound_ns) if isinstance(record, Measured) else bound_ns
        for record, bound_ns in zip(records, ledger.bounds_ns(candidates), strict=True)
    ]
    return Prices(
        costs_ns,
        [isinstance(record, Measured) for record in records],
        [k for k, record in enumerate(records) if isinstance(record, Failed)],
    )


def estimates_ns(ledger: Ledger, candidates: Sequence[Candidate]) -> list[int]:
    """Return measured times, and for the others estimates by what was measured of their kind."""
    prices, guesses_ns = price(ledger, candidates), ledger.guesses_ns(candidates)
    for candidate, guess_ns in zip(candidates, guesses_ns, strict=True):
        record = ledger.records.get(candidate.key)
        if isinstance(record, Measured) and not record.is_disturbed:
            ledger.experience.learn(candidate, record.time_ns, guess_ns)
    factors = ledger.experience.factors()
    return [
        cost_ns if is_measured else max(cost_ns, _expected_ns(ledger, c, guess_ns, factors))
        for c, guess_ns, cost_ns, is_measured in zip(
            candidates, guesses_ns, prices.costs_ns, prices.is_measured, strict=True
        )
    ]


def estimate_ns(ledger: Ledger, candidate: Candidate) -> int:
    """Return the measured time of one candidate, or an estimate; nothing is learned from it."""
    cost_ns, is_measured = ledger.cost_ns(candidate)
    if is_measured:
        return cost_ns
    guess_ns = ledger.guesses_ns([candidate])[0]
    return max(cost_ns, _expected_ns(ledger, candidate, guess_ns, ledger.experience.factors()))


def _expected_ns(ledger: Ledger, candidate: Candidate, guess_ns: int, factors: dict[Kind, float]) -> int:
    """Return what a candidate likely takes: by its times at other sizes, or by what was measured of its kind."""
    predicted_ns = ledger.predicted_ns.get(candidate.key)
    return ledger.experience.estimate_ns(candidate, guess_ns, factors) if predicted_ns is None else predicted_ns


def plan_ns(ledger: Ledger, chosen: Sequence[Candidate]) -> int:
    """Return the cost of a plan: measured times, and at least the guess for the others."""
    prices, guesses_ns = price(ledger, chosen), [0] * len(chosen)
    if not all(prices.is_measured):
        guesses_ns = [
            0 if is_measured else guess_ns
            for is_measured, guess_ns in zip(prices.is_measured, ledger.guesses_ns(chosen), strict=True)
        ]
    return sum(map(max, prices.costs_ns, guesses_ns))
