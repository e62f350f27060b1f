"""Durations of work so far -> predictions for more work on this machine in its current state.

To keep a time budget, a run predicts, for example, how long the compiler needs for a plan's kernels, and how
long the end of a search takes. On a busy machine all of that takes several times as long as usual. So usual
durations are scaled by the ratio of this run's durations to the usual ones.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

USUAL_S: Mapping[str, float] = {
    "compile": 0.035,  # one kernel, printed and compiled together with the others of its batch
    "start": 0.8,  # the start of a measuring process
    "time": 0.008,  # one round of one kernel
    "build": 0.002,  # one kernel's share of the tables and the loader, or half a megabyte of weights
}
"""Seconds per unit of work on a machine without earlier runs."""

MOST_RISE = 1.25
"""The largest factor by which one run may raise a usual time: a run on a busy machine predicts later runs badly."""

NEWEST = 0.5
"""The weight of the newest observation of a kind."""


class Pace:
    """Seconds per unit of each kind of work: the usual ones, and those of this run.

    Attributes:
        usual_s: seconds per unit in earlier runs, by kind.
        spent_s: seconds of this run, by kind.
    """

    def __init__(self, text: str | None = None, clock: Callable[[], float] = monotonic) -> None:
        """Begin a run.

        Args:
            text: the result of `to_text` at the end of an earlier run.
            clock: returns the time in seconds.
        """
        self.usual_s = {**USUAL_S, **_known(text)}
        self.spent_s: dict[str, float] = {}
        self._own_s: dict[str, float] = {}
        self._clock = clock

    def note(self, kind: str, units: float, seconds: float) -> None:
        """Record the duration of work that was done."""
        if units > 0 and seconds > 0:
            self.spent_s[kind] = self.spent_s.get(kind, 0.0) + seconds
            found_s = seconds / units
            before_s = self._own_s.get(kind, found_s)
            self._own_s[kind] = NEWEST * found_s + (1 - NEWEST) * before_s

    @contextmanager
    def noting(self, kind: str, units: float) -> Iterator[None]:
        """Record the duration of the work that is done in this context."""
        begun_s = self._clock()
        yield
        self.note(kind, units, self._clock() - begun_s)

    @property
    def slowness(self) -> float:
        """The ratio of this run's durations to the usual ones (geometric mean); 1 if nothing was recorded."""
        ratios = [math.log(own_s / self.usual_s[kind]) for kind, own_s in self._own_s.items()]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    def predict_s(self, kind: str, units: float = 1.0) -> float:
        """Return the predicted duration of work in seconds."""
        own_s = self._own_s.get(kind)
        return units * (self.usual_s[kind] * self.slowness if own_s is None else own_s)

    def to_text(self) -> str:
        """Return the updated usual durations as JSON, for later runs."""
        middle_s = {kind: math.sqrt(own_s * self.usual_s[kind]) for kind, own_s in self._own_s.items()}
        return json.dumps({kind: min(middle_s.get(kind, s), MOST_RISE * s) for kind, s in self.usual_s.items()})


def _known(text: str | None) -> dict[str, float]:
    """Return the seconds by kind in a text, which another version may have written."""
    try:
        found = json.loads(text or "{}")
        return {kind: s for kind, s in found.items() if kind in USUAL_S and 0 < s < math.inf}
    except (ValueError, AttributeError, TypeError):
        return {}
