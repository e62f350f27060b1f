"""The trace of a search in segments: the cost of the model's best plan, and its bound, over time.

The model has a plan as soon as interfaces are chosen for the segments. From then on, each improvement of a
block's plan counts once per use of the block. The model's bound is the sum over all blocks with a first plan
of the least bound of their interfaces, or the bound of the last choice, if that is higher; the latter also
includes changes of layout.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from korch.search.result import Orchestration, Round, expected
from korch.segments.record import SearchRecord

Key = tuple[int, int]
"""The numbers of a block and of one of its interfaces."""


@dataclass
class SearchTrace:
    """The trace of one search."""

    counts: Mapping[int, int]  # how often a plan runs each block
    rounds: list[Round] = field(default_factory=list)  # the rounds of the whole model so far
    searches: list[SearchRecord] = field(default_factory=list)  # the searches of blocks
    begun_s: float = field(default_factory=time.monotonic)
    _measured: dict[int, int] = field(default_factory=dict)
    _bounds_ns: dict[int, dict[int, int]] = field(default_factory=dict)
    _chosen: Mapping[Key, int] = field(default_factory=dict)
    _costs_ns: dict[Key, int] = field(default_factory=dict)
    _bound_ns: int = 0
    _best_ns: int | None = None
    _expected_ns: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the trace began."""
        return time.monotonic() - self.begun_s

    def record_block(self, block: int, found: Mapping[int, Orchestration]) -> None:
        """Record the first plans of a block: the result for each interface."""
        if block not in self.counts:
            return
        self._bounds_ns[block] = {j: one.certificate.bound_ns for j, one in found.items()}
        self._measured[block] = max([self._measured.get(block, 0), *(one.distinct_measured for one in found.values())])
        self._append()

    def record_round(self, key: Key, entry: Round) -> None:
        """Record a round of a block's search in one interface."""
        block, interface = key
        self._measured[block] = max(self._measured.get(block, 0), entry.measured)
        known_ns = self._costs_ns.get(key)
        if self._best_ns is not None and known_ns is not None and entry.incumbent_ns is not None:
            gain_ns = max(0, known_ns - entry.incumbent_ns)
            self._best_ns -= self._chosen[key] * gain_ns
            self._costs_ns[key] -= gain_ns
        bounds_ns = self._bounds_ns.get(block, {})
        if interface in bounds_ns:
            bounds_ns[interface] = max(bounds_ns[interface], entry.bound_ns)
        self._append()

    def record_estimate(self, best_ns: int | None, expected_ns: int) -> None:
        """Record the cost of the whole by the plans so far, and the cost that is expected, before the first choice."""
        if best_ns is not None:
            self._best_ns = min(best_ns, self._best_ns or best_ns)
        self._expected_ns = expected_ns
        self._append()

    def record_choice(
        self, uses: Mapping[Key, int], found: Mapping[Key, Orchestration], objective_ns: int, bound_ns: int
    ) -> None:
        """Record a choice of interfaces: how often each is used, and the cost and bound of the whole."""
        self._chosen = uses
        self._costs_ns = {key: found[key].certificate.objective_ns or 0 for key in uses}
        self._best_ns, self._bound_ns = objective_ns, bound_ns
        for (block, interface), one in found.items():
            if block in self._bounds_ns:
                self._bounds_ns[block][interface] = one.certificate.bound_ns
        self._append()

    def record_search(self, key: Key, what: str, began_s: float, found: Orchestration, *, is_recalled: bool) -> None:
        """Record that a block's search in one interface has ended."""
        kept = changed_rounds(found.rounds)
        self.searches.append(SearchRecord(*key, what, began_s, is_recalled, kept))

    def of_block(self, block: int) -> tuple[SearchRecord, ...]:
        """Return the searches of a block."""
        return tuple(search for search in self.searches if search.block == block)

    def _append(self) -> None:
        least_ns = sum(
            self.counts[block] * min(bounds_ns.values(), default=0) for block, bounds_ns in self._bounds_ns.items()
        )
        self._bound_ns = max(self._bound_ns, least_ns)
        if self._best_ns is not None:
            self._bound_ns = min(self._bound_ns, self._best_ns)
        expected_ns = expected(self._best_ns, self._bound_ns, self._expected_ns)
        measured = sum(self._measured.values())
        self.rounds.append(Round(self._bound_ns, self._best_ns, measured, self.seconds, expected_ns))


def changed_rounds(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """Return the rounds in which the plan's cost or the bound changed, and the last round."""
    kept: list[Round] = []
    for place, entry in enumerate(rounds):
        state = (entry.bound_ns, entry.incumbent_ns)
        is_last = place == len(rounds) - 1
        if is_last or not kept or state != (kept[-1].bound_ns, kept[-1].incumbent_ns):
            kept.append(entry)
    return tuple(kept)
