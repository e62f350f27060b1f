"""Costs and a solution -> the candidates that are worth measuring.

Pure functions of the ledger: `expected_improvements` by estimates, `near_optimal` by bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.search.estimate import Kind, expected_improvement_ns
from korch.search.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Exploration:
    """What estimates say should be measured.

    Attributes:
        kernels: the best plan by estimates.
        unknown: those of it without a measurement.
        improvements: other candidates, each with the nanoseconds that measuring it is expected to
            gain, in descending order.
    """

    kernels: tuple[int, ...]
    unknown: tuple[int, ...]
    improvements: tuple[tuple[float, int], ...]


def unmeasured(ledger: Ledger, candidates: Sequence[Candidate], kernels: Sequence[int]) -> tuple[int, ...]:
    """Return the kernels of a plan of which nothing is known."""
    return tuple(k for k in kernels if candidates[k].key not in ledger.records)


def expected_improvements(
    ledger: Ledger,
    candidates: Sequence[Candidate],
    estimates_ns: Sequence[int],
    slack_ns: Mapping[int, int],
    least_ns: float,
    left_out: Collection[str],
) -> tuple[tuple[float, int], ...]:
    """Return unmeasured candidates with what measuring them is expected to gain, descending.

    Args:
        ledger: what is known.
        candidates: of the instance.
        estimates_ns: the estimate of each.
        slack_ns: by candidate, how much a plan with it costs more than the best one.
        least_ns: smaller gains are left out.
        left_out: keys of candidates that are measured anyway.
    """
    found: dict[str, tuple[float, int]] = {}
    for k, slack in slack_ns.items():
        key = candidates[k].key
        if key in ledger.records or key in left_out:
            continue
        gain_ns = expected_improvement_ns(estimates_ns[k], slack, ledger.limits.estimate_spread)
        if gain_ns > max(least_ns, found.get(key, (0.0, 0))[0]):
            found[key] = (gain_ns, k)
    return tuple(sorted(found.values(), key=lambda entry: (-entry[0], entry[1])))


def of_each_kind(ledger: Ledger, candidates: Sequence[Candidate], kernels: Iterable[int]) -> list[int]:
    """Return candidates without those of a kind of which there are enough before them.

    Other forms of one product are expected to gain about as much as the best of them, and would fill a round.
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
    """Return unmeasured candidates that the relaxation can't distinguish from those of an optimum.

    A plan with a candidate costs at least the relaxation's bound plus the candidate's slack;
    beyond the best plan's cost it need never be measured. Measuring the nearest ones together
    with the plan's saves most of the rounds.

    Args:
        ledger: what is known.
        candidates: of the instance.
        slack_ns: by candidate.
        room_ns: the best plan's cost minus the relaxation's bound.
    """
    found: dict[str, int] = {}
    for _, k in sorted((slack, k) for k, slack in slack_ns.items() if slack <= room_ns):
        key = candidates[k].key
        if key not in ledger.records and len(found) < ledger.limits.round_candidates:
            found.setdefault(key, k)
    return list(found.values())
