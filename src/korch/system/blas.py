"""Threads that compute with NumPy."""

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from korch.system.settings import one_blas_thread

T = TypeVar("T")


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of functions that use NumPy, each computed on a thread of its own.

    The library's own threads wait for each other without sleeping. Beside a busy process, a product then takes ten
    times as long as on one thread, so it gets only one.
    """
    with one_blas_thread(), ThreadPoolExecutor(len(tasks)) as pool:
        waiting = [pool.submit(contextvars.copy_context().run, task) for task in tasks]
        return [future.result() for future in waiting]
