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

    One that has just had its turn does not get the next one while another waits: a process waits for the device with
    the place of the next one locked, which the others wait for. Without a folder for the locks' files nothing is
    waited for.
    """
    folder = Path(tempfile.gettempdir())
    descriptors = []
    try:
        try:
            for name in ("device", "next"):
                path = folder / f"korch-cuda-{os.getuid()}-{name}.lock"
                descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError:
            yield
            return
        device, place = descriptors
        fcntl.flock(place, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX)
        fcntl.flock(place, fcntl.LOCK_UN)
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
