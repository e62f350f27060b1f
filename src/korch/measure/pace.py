"""What work took so far -> what more of it will take on this machine just now.

A budget is kept by predictions: how long compilers need for a plan's kernels, how long the end of a
search takes. On a busy machine all of that takes several times as long as usual, so what was usual
is scaled by what the work of this run took over its usual time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

USUAL_S: Mapping[str, float] = {
    "compile": 0.25,  # a kernel, with the others of its batch
    "start": 0.8,  # a measuring process
    "time": 0.04,  # a round of one kernel
    "build": 0.015,  # a kernel's part of the main source and its library; 4 MB of weights
}
"""Seconds per unit of work, where nothing is known of the machine."""

MOST_RISE = 1.25
"""The largest factor by which one run raises a usual time: a run on a busy machine says little about later runs."""

NEWEST = 0.5
"""The weight of the newest observation of a kind."""


class Pace:
    """Seconds per unit of each kind of work: usual ones, and those of this run.

    Attributes:
        usual_s: seconds per unit in earlier runs, by kind.
    """

    def __init__(self, text: str | None = None, clock: Callable[[], float] = monotonic) -> None:
        """Begin a run.

        Args:
            text: what `to_text` gave at the end of an earlier run.
            clock: the time, in seconds.
        """
        self.usual_s = {**USUAL_S, **_known(text)}
        self._own_s: dict[str, float] = {}
        self._clock = clock

    def note(self, kind: str, units: float, seconds: float) -> None:
        """Learn from work that was done."""
        if units > 0 and seconds > 0:
            found_s = seconds / units
            before_s = self._own_s.get(kind, found_s)
            self._own_s[kind] = NEWEST * found_s + (1 - NEWEST) * before_s

    @contextmanager
    def noting(self, kind: str, units: float) -> Iterator[None]:
        """Learn from work that is done in a context."""
        begun_s = self._clock()
        yield
        self.note(kind, units, self._clock() - begun_s)

    @property
    def slowness(self) -> float:
        """How many times as long as usual work takes in this run; 1 if nothing is known."""
        ratios = [math.log(own_s / self.usual_s[kind]) for kind, own_s in self._own_s.items()]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    def predict_s(self, kind: str, units: float = 1.0) -> float:
        """Return what work will take."""
        own_s = self._own_s.get(kind)
        return units * (self.usual_s[kind] * self.slowness if own_s is None else own_s)

    def to_text(self) -> str:
        """Return what is usual by now, for another run."""
        middle_s = {kind: math.sqrt(own_s * self.usual_s[kind]) for kind, own_s in self._own_s.items()}
        return json.dumps({kind: min(middle_s.get(kind, s), MOST_RISE * s) for kind, s in self.usual_s.items()})


def _known(text: str | None) -> dict[str, float]:
    """Return the seconds by kind that a text has; it may come from another version."""
    try:
        found = json.loads(text or "{}")
        return {kind: s for kind, s in found.items() if kind in USUAL_S and 0 < s < math.inf}
    except (ValueError, AttributeError, TypeError):
        return {}
