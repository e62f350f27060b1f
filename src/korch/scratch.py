"""Temporary folders: removed when they are no longer needed, or by a later process.

A process that is killed removes nothing. So each folder is locked by the process that made it; the
system drops the lock with the process, and the next that needs a folder there removes those that
nobody has locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".korch-"
_SWEPT: set[Path] = set()


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for a while.

    Args:
        parent: where; by default where the system has temporary files.

    Raises:
        OSError: it can't be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    if parent not in _SWEPT:
        _SWEPT.add(parent)
        sweep(parent)
    folder, descriptor = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def sweep(parent: Path) -> None:
    """Remove the temporary folders of processes that are gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or just removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _make(parent: Path) -> tuple[Path, int]:
    """Return a new folder and what holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process has swept it before it was locked
            continue
        with suppress(OSError):  # no locks here, or another process is sweeping it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)
