"""A lock that lets only one process at a time measure kernels on the device."""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_own = threading.RLock()
_held: list[int] = []
"""The lock's open file, while a thread of this process holds the lock."""


@contextmanager
def device_lock() -> Iterator[None]:
    """Hold the lock: wait until no other process of this user times kernels, and exclude others meanwhile.

    A thread that holds the lock may enter it again. If the lock's file can't be opened, only threads of this process
    exclude each other.
    """
    with _own:
        if _held:
            yield
            return
        path = Path(tempfile.gettempdir()) / f"korch-cuda-{os.getuid()}.lock"
        try:
            _held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError:
            yield
            return
        try:
            fcntl.flock(_held[0], fcntl.LOCK_EX)
            yield
        finally:
            os.close(_held.pop())
