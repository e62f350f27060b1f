"""Threads that compute with NumPy, and those of its library of matrix products."""

import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")

TURN_S = 0.0005
"""The time for which a thread that leaves NumPy waits for one that runs Python; by default it is ten times as long."""


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of functions that use NumPy, each computed on a thread of its own.

    The library's own threads wait for each other without sleeping. Beside a busy process, a product then takes ten
    times as long as on one thread, so it gets only one.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(len(tasks)) as pool:
        waiting = [pool.submit(contextvars.copy_context().run, task) for task in tasks]
        return [future.result() for future in waiting]


@contextmanager
def beside(task: Callable[[], T]) -> Iterator[Future[T]]:
    """Compute a function on another thread while the body runs, which waits for its end."""
    with ThreadPoolExecutor(1) as pool:
        future, before_s = pool.submit(contextvars.copy_context().run, task), sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        try:
            yield future
        finally:
            sys.setswitchinterval(before_s)  # threads that all use NumPy take longer with short turns
            wait([future])
