"""Settings of the whole process that searches change while they run, also beside each other."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Setting:
    """A setting that is changed while at least one body runs with it."""

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        """`change`: changes the setting, and returns a function that restores it."""
        self._change, self._lock, self._users = change, threading.Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run the body with the setting changed; whichever body ends last restores it."""
        with self._lock:
            if self._users == 0:
                self._restore = self._change()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._restore()


def _collect_rarely() -> Callable[[], None]:
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    return lambda: gc.set_threshold(*before)


few_collections = Setting(_collect_rarely)
"""Makes Python's garbage collector run rarely: a search makes millions of long-lived objects and hardly any cycles of
references, so that frequent collections take time and free nothing."""


def _use_one_blas_thread() -> Callable[[], None]:
    from threadpoolctl import threadpool_limits  # here, because every command imports this module

    restore: Callable[[], None] = threadpool_limits(1, user_api="blas").restore_original_limits
    return restore


one_blas_thread = Setting(_use_one_blas_thread)
"""Gives NumPy's products of matrices one thread each."""
