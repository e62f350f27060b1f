"""Threads that compute with NumPy, and those of its library of matrix products."""

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")


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
        future = pool.submit(contextvars.copy_context().run, task)
        try:
            yield future
        finally:
            wait([future])
