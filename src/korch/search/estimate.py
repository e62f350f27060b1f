"""Predictions and measured times -> estimated times of other candidates, and the expected gain of measuring them.

The meter predicts a time without measuring. An estimate is that time multiplied with a factor, which is learned from
the ratios of measured to predicted times of similar kernels. Estimates prove nothing; they only decide what is
measured first.
"""

import math
import statistics
from dataclasses import dataclass, field

from korch.candidate.candidate import Candidate
from korch.costs.features import innermost_axes
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.ops.elementwise import TRANSCENDENTAL_OPS
from korch.primitive.ops.linear import ConvAttributes

MOVING_OPS = frozenset(("transpose", "concat", "take", "pad"))

PRIOR = 1.0
"""The number of kernels that the factor of a coarser kind counts for."""

Kind = tuple[object, ...]


def kinds(candidate: Candidate) -> tuple[Kind, ...]:
    """Return the kinds of a candidate, the finest first. Candidates of one kind have a similar ratio of time to guess.

    A guess depends on bytes and operations only. The kinds add what it ignores: what is computed,
    whether elements are moved, how many concatenations there are, and whether the innermost axis
    differs between large images (then loads or stores are of single elements).
    """
    primitives = candidate.group.body.primitives
    ports = (*candidate.input_ports, *candidate.output_ports)
    layouts = frozenset(str(layout) for _, layout in ports)
    linear = tuple(sorted(map(_form, (p for p in primitives if p.row.category is Category.LINEAR))))
    is_reduction = any(p.row.category is Category.REDUCE for p in primitives)
    moves = (any(p.op in MOVING_OPS for p in primitives), _concatenations(candidate))
    turns = innermost_axes(candidate)
    slow = min(2, sum(p.op in TRANSCENDENTAL_OPS for p in primitives))
    maker = (candidate.provider, candidate.offer.pairs)
    coarse = (maker, bool(primitives), linear, is_reduction)
    return ((*coarse, slow, moves, turns, layouts), (*coarse, slow, moves, turns), (*coarse, turns), coarse, coarse[:1])


def _concatenations(candidate: Candidate) -> int:
    """Return the number of concatenations in a group, at most 2."""
    return min(2, sum(p.op == "concat" for p in candidate.group.body.primitives))


def _form(primitive: Primitive) -> str:
    """Return the name of a linear operation; a grouped convolution is distinguished from an ungrouped one."""
    attributes = primitive.attributes
    is_grouped = isinstance(attributes, ConvAttributes) and attributes.groups > 1
    return f"grouped {primitive.op}" if is_grouped else primitive.op


@dataclass
class Factors:
    """What is to be multiplied with guesses, by kind."""

    # the median logarithm of the ratio of time to guess, and the number of kernels, of each kind
    logs: dict[Kind, tuple[float, int]]
    _known: dict[tuple[Kind, ...], float] = field(default_factory=dict)

    def of(self, chain: tuple[Kind, ...]) -> float:
        """Return the factor for a candidate of some kinds.

        From the coarsest kind to the finest, the factor moves towards the kind's median, the further the more
        kernels of the kind are known (a ridge regression of the residuals of each kind).
        """
        if chain not in self._known:
            found = 0.0
            for kind in reversed(chain):
                log, count = self.logs.get(kind, (0.0, 0))
                found += count / (count + PRIOR) * (log - found)
            self._known[chain] = math.exp(found)
        return self._known[chain]


@dataclass
class Experience:
    """Ratios of measured time to guess, by kind; the searches of a model's blocks share one object."""

    ratios: dict[Kind, list[float]] = field(default_factory=dict)
    _kinds: dict[str, tuple[Kind, ...]] = field(default_factory=dict)
    _learned: set[str] = field(default_factory=set)

    def learn(self, candidate: Candidate, time_ns: int, guess_ns: int) -> None:
        """Add the measured time of a candidate; later times of the same candidate are ignored."""
        if candidate.key in self._learned:
            return
        self._learned.add(candidate.key)
        for kind in self.kinds_of(candidate):
            self.ratios.setdefault(kind, []).append(max(1, time_ns) / max(1, guess_ns))

    def factors(self) -> Factors:
        """Return the factor of each combination of kinds that was learned."""
        return Factors(
            {kind: (statistics.median(map(math.log, found)), len(found)) for kind, found in self.ratios.items()}
        )

    def estimate_ns(self, candidate: Candidate, guess_ns: int, factors: Factors) -> int:
        """Return the guess times the factor of the candidate's kinds."""
        return int(guess_ns * factors.of(self.kinds_of(candidate)))

    def kinds_of(self, candidate: Candidate) -> tuple[Kind, ...]:
        """Return `kinds` of a candidate, computed once."""
        if candidate.key not in self._kinds:
            self._kinds[candidate.key] = kinds(candidate)
        return self._kinds[candidate.key]


def expected_improvement_ns(estimate_ns: float, slack_ns: float, spread: float) -> float:
    """Return by how much measuring a candidate is expected to improve the best plan.

    The best plan with the candidate is estimated to cost `slack_ns` more than the best plan. If the
    candidate takes less than its estimate by more than `slack_ns`, the gain is the excess over
    `slack_ns`; otherwise it is 0. Times are assumed to be log-normal around the estimate.

    Source:
        The formula is that for the price of a put option: Black and Scholes, "The pricing of options
        and corporate liabilities" (1973).
    """
    strike_ns = estimate_ns - slack_ns
    if strike_ns <= 0:
        return 0.0
    d = math.log(strike_ns / estimate_ns) / spread
    mean_ns = estimate_ns * math.exp(spread**2 / 2)
    return max(0.0, strike_ns * _normal(d) - mean_ns * _normal(d - spread))


def _normal(x: float) -> float:
    """Return the standard normal cumulative distribution function at `x`."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
