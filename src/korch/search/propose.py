"""Costs and a solution -> the candidates that are worth measuring.

Pure functions of the ledger: `expected_improvements` uses estimates, `near_optimal` uses bounds.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.search.estimate import Kind, expected_improvement_ns
from korch.search.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Exploration:
    """The candidates to measure according to estimates."""

    kernels: tuple[int, ...]  # the best plan according to estimates
    unknown: tuple[int, ...]  # the kernels of that plan without a record
    # (expected gain of measuring it in nanoseconds, candidate) of other candidates, in descending order of the gain
    improvements: tuple[tuple[float, int], ...]


def unmeasured(ledger: Ledger, candidates: Sequence[Candidate], kernels: Sequence[int]) -> tuple[int, ...]:
    """Return the kernels of a plan that have neither a measurement nor a failure."""
    return tuple(k for k in kernels if candidates[k].key not in ledger.records)


def expected_improvements(
    ledger: Ledger,
    candidates: Sequence[Candidate],
    estimates_ns: Sequence[int],
    slack_ns: Mapping[int, int],
    least_ns: float,
    left_out: Collection[str],
) -> tuple[tuple[float, int], ...]:
    """Return unmeasured candidates with the expected gain of measuring them, in descending order.

    `slack_ns`: by candidate, by how much a plan with it costs more than the best plan.
    """
    found: dict[str, tuple[float, int]] = {}
    spreads = ledger.spreads(candidates)
    for k, slack in slack_ns.items():
        key = candidates[k].key
        if key in ledger.records or key in left_out:
            continue
        gain_ns = expected_improvement_ns(estimates_ns[k], slack, spreads[k])
        if gain_ns > max(least_ns, found.get(key, (0.0, 0))[0]):
            found[key] = (gain_ns, k)
    return tuple(sorted(found.values(), key=lambda entry: (-entry[0], entry[1])))


def of_each_kind(ledger: Ledger, candidates: Sequence[Candidate], kernels: Iterable[int]) -> list[int]:
    """Return the first `limits.same_kind` candidates of each kind, in the given order.

    All forms of one matrix product have about the same expected gain, and would otherwise fill a round.
    """
    found, taken = list[int](), Counter[Kind]()
    for k in kernels:
        kind = ledger.experience.kinds_of(candidates[k])[0]
        if taken[kind] < ledger.limits.same_kind:
            taken[kind] += 1
            found.append(k)
    return found


def near_optimal(
    ledger: Ledger, candidates: Sequence[Candidate], slack_ns: Mapping[int, int], room_ns: int
) -> list[int]:
    """Return unmeasured candidates that may be in an optimal plan as far as the relaxation proves.

    A plan with a candidate costs at least the relaxation's bound plus the candidate's slack. If that
    exceeds the best plan's cost, the candidate need never be measured. Measuring those with the least
    slack together with the plan's own saves most of the rounds.
    """
    found: dict[str, int] = {}
    for _, k in sorted((slack, k) for k, slack in slack_ns.items() if slack <= room_ns):
        key = candidates[k].key
        if key not in ledger.records and len(found) < ledger.limits.round_candidates:
            found.setdefault(key, k)
    return list(found.values())
