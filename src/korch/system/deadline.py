"""When a search must stop: at a given time, or as soon as another thread or Ctrl-C stops it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadline:
    """A time on the monotonic clock that any thread may bring forward to now.

    Attributes:
        at_s: the time, None for no limit.
        whole: the deadline of which this one is a part.
        share: the fraction of the remaining time of `whole` that this deadline was given.
        least_s: of `whole`, the least budget that was announced; 0 if the budget suffices, None before the estimate.
    """

    def __init__(
        self,
        at_s: float | None = None,
        told: threading.Event | None = None,
        whole: Deadline | None = None,
        share: float = 1.0,
    ) -> None:
        self.at_s, self.share, self.whole = at_s, share, whole or self
        self.least_s: float | None = None
        self._told = told or threading.Event()

    @staticmethod
    def after(seconds: float | None, begun_s: float) -> Deadline:
        """Return the deadline `seconds` after `begun_s`; one without a limit if `seconds` is None."""
        return Deadline(None if seconds is None else begun_s + seconds)

    def until(self, at_s: float | None) -> Deadline:
        """Return a deadline at `at_s` or at this one, whichever is earlier; it is stopped together with this one."""
        limits = [limit for limit in (self.at_s, at_s) if limit is not None]
        return Deadline(min(limits, default=None), self._told, self.whole, self.share)

    def before(self, seconds: float) -> Deadline:
        """Return a deadline `seconds` earlier than this one; it is stopped together with this one."""
        return self.until(None if self.at_s is None else self.at_s - seconds)

    def less(self, share: float) -> Deadline:
        """Return a deadline that leaves `share` of the remaining time unused; it is stopped together with this one."""
        left_s = self.left_s
        found = self.until(None if left_s is None else time.monotonic() + (1 - share) * left_s)
        found.share *= 1 - share
        return found

    def shared(self, parts: float) -> Deadline:
        """Return the deadline for the first of several parts that share the remaining time equally."""
        return self.less(1 - 1 / parts)

    @property
    def without_limit(self) -> Deadline:
        """A deadline that is over only if this one is stopped."""
        return Deadline(None, self._told, self.whole, self.share)

    def stop(self) -> None:
        """Bring the deadline forward to now."""
        self._told.set()

    @property
    def left_s(self) -> float | None:
        """The remaining seconds, 0 or negative if the deadline is over; None if there is no limit."""
        if self._told.is_set():
            return 0.0
        return None if self.at_s is None else self.at_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether no time remains."""
        left = self.left_s
        return left is not None and left <= 0


@contextmanager
def stopped_by_interrupt(deadline: Deadline, tell: Callable[[], None]) -> Iterator[None]:
    """Stop a deadline at the first interrupt (Ctrl-C); a second one raises KeyboardInterrupt.

    Only the main thread may handle signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        deadline.stop()
        tell()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
