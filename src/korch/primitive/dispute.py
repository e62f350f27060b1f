"""Records of nodes for which references gave different results, or that only one reference computes.

The references of a node are compared wherever one of them is needed: when constants are folded, when the model's
results are computed, and when what the host runs is checked. Whoever optimizes a model collects these records.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispute:
    """A node for which references gave different results, or which only one of them computes."""

    node: str  # the node's operator, and its name if it is known
    followed: tuple[str, ...]  # the references whose result was used; if there are several, they agree
    others: tuple[str, ...]  # the references with other results; none if there is only one reference
    # the largest difference between them, relative to the largest element; infinite if shapes differ, or NaN and
    # infinities are at other places
    error: float

    @property
    def is_decided(self) -> bool:
        """Whether a majority of the references agrees, or there is only one."""
        return len(self.followed) > 1 or not self.others

    @property
    def text(self) -> str:
        """A line for users."""
        if not self.others:
            return f"{self.node}: only {self.followed[0]} computes it, so no other reference confirms its result"
        differ = "differs" if len(self.others) == 1 else "differ"
        size = "in shape or special numbers" if self.error == float("inf") else f"by {self.error:.1e} of the largest"
        followed, others = " and ".join(self.followed), " and ".join(self.others)
        if self.is_decided:
            return f"{self.node}: {followed} agree and were followed; {others} {differ} {size}"
        return f"{self.node}: {followed} was followed; {others} {differ} {size}, and no third reference decides"


Disputes = dict[tuple[str, tuple[str, ...]], Dispute]
"""Disputes by node and by the references whose result was used."""

_NOTED: ContextVar[Disputes | None] = ContextVar("disputes", default=None)


@contextmanager
def noted_disputes() -> Iterator[Disputes]:
    """Collect the disputes that are noted in the body, one for each node and result; they are also noted outside."""
    outside, found = _NOTED.get(), Disputes()
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)
        for dispute in found.values() if outside is not None else ():
            note(dispute)


def note(dispute: Dispute) -> None:
    """Add a dispute to those that are collected; of equal ones, the one with the largest error is kept."""
    noted, key = _NOTED.get(), (dispute.node, dispute.followed)
    if noted is not None and not (key in noted and noted[key].error >= dispute.error):
        noted[key] = dispute
