"""Processes that time kernels on the same device take turns."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def device_lock() -> Iterator[None]:
    """Wait until no other process of this user times kernels, and keep the others waiting meanwhile.

    Without a folder for the lock's file nothing is waited for.
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
