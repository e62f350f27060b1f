"""Temporary folders that are removed at the end of their use, or by a later process.

A process that is killed can't remove its folder. So each process locks its folder, and the system releases
the lock when the process ends. The next process that needs a folder in the same place removes all folders
that are not locked.
"""

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
    """Make a folder that is removed when the context ends.

    `parent`: where to make it; by default the system's folder for temporary files.

    Raises:
        OSError: the folder can't be made.
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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see all of it or none.

    Raises:
        OSError: it can't be written.
    """
    with scratch_folder(path.parent) as folder:
        (folder / "new").write_bytes(data)
        (folder / "new").replace(path)


def sweep(parent: Path) -> None:
    """Remove the temporary folders of processes that are gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, belongs to another user, or was just removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _make(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the file descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a sweep is removing it
            os.close(descriptor)
            continue
        except OSError:  # the file system has no locks, so no sweep can lock the folder either
            return folder, descriptor
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)  # a sweep removed it before it was locked
