"""A lock that lets only one process at a time measure kernels on the device."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def device_lock() -> Iterator[None]:
    """Hold the lock: wait until no other process of this user times kernels, and exclude others meanwhile.

    If the lock's file can't be opened, there is no exclusion.
    """
    path = Path(tempfile.gettempdir()) / f"korch-cuda-{os.getuid()}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
