"""Bounds and what was measured -> estimates for what was not.

An estimate is the bound times what kernels alike took over theirs. It proves nothing; it says what
to measure first.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from korch.candidate.candidate import Candidate
from korch.primitive.op import Category
from korch.tile.lower import KEEP_OPS

UNKNOWN_RATIO = 4.0
"""An estimate over its bound where nothing alike was measured."""

MOVING_OPS = frozenset(("transpose", "concat", "take", "pad"))

Kind = tuple[object, ...]


def kinds(candidate: Candidate) -> tuple[Kind, ...]:
    """Return what candidates are alike in that take about as long over their bounds, finest first.

    The bound knows bytes and linear operations. So it matters what else is computed, and whether
    elements change their places.
    """
    primitives = candidate.group.body.primitives
    ports = (*candidate.input_ports, *candidate.output_ports)
    layouts = frozenset(str(layout) for _, layout in ports)
    linear = tuple(sorted(p.op for p in primitives if p.row.category is Category.LINEAR))
    is_reduction = any(p.row.category is Category.REDUCE for p in primitives)
    moves = any(p.op in MOVING_OPS for p in primitives)
    slow = min(2, sum(p.op in KEEP_OPS for p in primitives))
    coarse = (candidate.provider, bool(primitives), linear, is_reduction)
    return ((*coarse, slow, moves, layouts), (*coarse, slow, moves), coarse, coarse[:1])


@dataclass
class Experience:
    """Measured times over bounds, by kind; the searches of a model's blocks share one."""

    ratios: dict[Kind, list[float]] = field(default_factory=dict)
    _kinds: dict[str, tuple[Kind, ...]] = field(default_factory=dict)
    _learned: set[str] = field(default_factory=set)

    def learn(self, candidate: Candidate, time_ns: int, bound_ns: int) -> None:
        """Add what a candidate took; once for each."""
        if candidate.key in self._learned:
            return
        self._learned.add(candidate.key)
        for kind in self._kinds_of(candidate):
            self.ratios.setdefault(kind, []).append(time_ns / max(1, bound_ns))

    def factors(self) -> dict[Kind, float]:
        """Return the median ratio of each kind."""
        return {kind: statistics.median(found) for kind, found in self.ratios.items()}

    def estimate_ns(self, candidate: Candidate, bound_ns: int, factors: dict[Kind, float]) -> int:
        """Return an estimate by `factors`: by the finest kind of which anything is known."""
        known = (factors[kind] for kind in self._kinds_of(candidate) if kind in factors)
        return int(bound_ns * max(1.0, next(known, UNKNOWN_RATIO)))

    def _kinds_of(self, candidate: Candidate) -> tuple[Kind, ...]:
        if candidate.key not in self._kinds:
            self._kinds[candidate.key] = kinds(candidate)
        return self._kinds[candidate.key]
