"""Errors of predictions -> how much faster than predicted a kernel is with a probability that is known: conformal.

The score of a measured kernel is log(predicted / measured time), in units of the predicted spread: it is large if the
kernel is faster than predicted. If a new kernel is exchangeable with n measured ones, its score exceeds the
ceil((n + 1) LEVEL)-th smallest of theirs with a probability of at most 1 - LEVEL. So, of each kind of kernel, the
largest scores of the records are enough; those of the kernels that a search has measured are added to them.

Source:
    Papadopoulos, Proedrou, Vovk and Gammerman, "Inductive confidence machines for regression" (2002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.9993
"""The probability with which a kernel is not faster than its calibrated bound, if it is exchangeable with the measured
ones. Kernels of one model err together, so fewer kernels of a new model are covered: with this level, 99.8 % are."""


@dataclass(frozen=True, slots=True)
class ScoreTail:
    """The scores of the measured kernels of a kind."""

    count: int  # how many kernels were measured
    # the largest scores, in descending order; all that can be the margin of up to twice as many kernels
    largest: tuple[float, ...]

    @staticmethod
    def of(scores: Sequence[float]) -> ScoreTail:
        """Return the tail of some scores."""
        count = len(scores)
        return ScoreTail(count, tuple(sorted(scores, reverse=True)[: 1 + _above(2 * count)]))

    def margin(self, more: Sequence[float] = ()) -> float:
        """Return the score that a new kernel exceeds with a probability of at most 1 - LEVEL.

        It is infinite if there are too few kernels to tell.

        `more`: the scores of other measured kernels; with more of them than `count`, the margin is a larger score.
        """
        count = self.count + len(more)
        if math.ceil((count + 1) * LEVEL) > count:
            return math.inf
        scores = sorted((*self.largest, *more), reverse=True)
        return scores[min(_above(count), len(self.largest) - 1)]


def _above(count: int) -> int:
    """Return how many of `count` scores may be above the margin."""
    return max(0, count - math.ceil((count + 1) * LEVEL))


def score(predicted_ns: float, measured_ns: float, spread: float) -> float:
    """Return the score of a measured kernel.

    `spread`: the predicted standard deviation of the logarithm of its time.
    """
    return math.log(max(1.0, predicted_ns) / max(1.0, measured_ns)) / spread


def bound_ns(predicted_ns: float, spread: float, margin: float) -> int:
    """Return the time that a kernel with this prediction undercuts only if its score exceeds the margin."""
    return int(predicted_ns * math.exp(-margin * spread))
