"""The cores that this process may use: by its affinity, and by the quota of its container.

A quota of control groups is a share of time: a container with 2 of 8 cores may use all of them for
a quarter of the time. Of more threads than that, the system stops some in the middle of kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads can run at once, at least 1.

    Args:
        root: where the system's files are.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas(root))]))


def machine_cores() -> int:
    """Return the cores of the machine, whether this process may use them or not."""
    return max(os.cpu_count() or 1, len(os.sched_getaffinity(0)))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process' control groups and of those around them, in cores."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2
            base = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            base = base if base.exists() else root / "sys/fs/cgroup/cpu"
        else:
            continue
        group = base / path.strip("/")
        # Within a container the path may be that outside of it: then only the top is there.
        for folder in dict.fromkeys((group, *group.parents, base)):
            if folder.is_relative_to(base):
                yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    text = _read(folder / "cpu.max") or " ".join(
        _read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    )
    parts = text.split()
    try:
        quota, period = int(parts[0]), int(parts[1])
    except (IndexError, ValueError):  # "max", or there is no such file
        return
    if quota > 0 and period > 0:
        yield quota / period


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
