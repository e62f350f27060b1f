"""Ledger -> costs of candidates: the measured time, or else a lower bound or an estimate.

Pure functions of the ledger's content, except that `estimates_ns` adds new measurements to the ledger's experience.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.costs.calibrated import bound_ns, score
from korch.measure.record import Failed, Measured
from korch.search.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of an instance's candidates."""

    costs_ns: list[int]  # the measured time, or the bound, of each
    is_measured: list[bool]  # whether each is measured
    failed: list[int]  # the positions of the candidates that failed


def price(ledger: Ledger, candidates: Sequence[Candidate]) -> Prices:
    """Return the costs of candidates.

    A measured time below the bound is replaced by the bound. Costs may only rise when a bound is
    replaced by a measurement; otherwise the solver's last bound would not be valid for the new costs.
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


def calibrated(ledger: Ledger, candidates: Sequence[Candidate]) -> Prices | None:
    """Return costs of candidates with calibrated bounds, which unmeasured kernels undercut with a known probability.

    Where the hard bound is higher, or there are too few records of a kind, it is the cost. None without records.
    """
    tails, prices = ledger.tails(), price(ledger, candidates)
    if not tails:
        return None
    predicted = list(zip(ledger.guesses_ns(candidates), ledger.spreads(candidates), strict=True))
    own: dict[str, dict[str, float]] = {}
    for candidate, (guess_ns, spread) in zip(candidates, predicted, strict=True):
        record = ledger.records.get(candidate.key)
        if isinstance(record, Measured) and not record.is_disturbed and guess_ns:
            own.setdefault(candidate.provider, {})[candidate.key] = score(guess_ns, record.time_ns, spread)
    margins = {kind: tail.margin(tuple(own.get(kind, {}).values())) for kind, tail in tails.items()}
    costs_ns = [
        cost_ns if is_measured else max(cost_ns, bound_ns(guess_ns, spread, margins.get(c.provider, math.inf)))
        for c, (guess_ns, spread), cost_ns, is_measured in zip(
            candidates, predicted, prices.costs_ns, prices.is_measured, strict=True
        )
    ]
    return Prices(costs_ns, prices.is_measured, prices.failed)


def estimates_ns(ledger: Ledger, candidates: Sequence[Candidate]) -> list[int]:
    """Return the measured time of each candidate, or an estimate from the measured candidates of its kind."""
    prices, guesses_ns = price(ledger, candidates), ledger.guesses_ns(candidates)
    for candidate, guess_ns in zip(candidates, guesses_ns, strict=True):
        record = ledger.records.get(candidate.key)
        if isinstance(record, Measured) and not record.is_disturbed:
            ledger.experience.learn(candidate, record.time_ns, guess_ns)
    factors = ledger.experience.factors()
    return [
        cost_ns if is_measured else max(cost_ns, ledger.experience.estimate_ns(c, guess_ns, factors))
        for c, guess_ns, cost_ns, is_measured in zip(
            candidates, guesses_ns, prices.costs_ns, prices.is_measured, strict=True
        )
    ]


def estimate_ns(ledger: Ledger, candidate: Candidate) -> int:
    """Return the measured time of one candidate, or an estimate; the ledger's experience is not updated."""
    cost_ns, is_measured = ledger.cost_ns(candidate)
    if is_measured:
        return cost_ns
    guess_ns = ledger.guesses_ns([candidate])[0]
    return max(cost_ns, ledger.experience.estimate_ns(candidate, guess_ns, ledger.experience.factors()))


def plan_ns(ledger: Ledger, chosen: Sequence[Candidate]) -> int:
    """Return the cost of a plan: the sum of measured times, or the larger of bound and guess if not measured."""
    prices, guesses_ns = price(ledger, chosen), [0] * len(chosen)
    if not all(prices.is_measured):
        guesses_ns = [
            0 if is_measured else guess_ns
            for is_measured, guess_ns in zip(prices.is_measured, ledger.guesses_ns(chosen), strict=True)
        ]
    return sum(map(max, prices.costs_ns, guesses_ns))
