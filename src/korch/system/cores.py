"""The number of cores that this process may use (by affinity and container quota), and its time slices.

The quota of a control group is a share of time: a container with 2 of 8 cores may use all 8 for a
quarter of the time. If more threads than the quota run, the system stops some of them in the middle of kernels.

Threads that are timed ask for short time slices. On a busy machine, Linux lets a thread that wakes up
interrupt others only if its slice is shorter than theirs; otherwise it waits for the end of their slice,
which takes milliseconds. A short slice does not give a thread a larger share of a core.
"""

import ctypes
import os
import platform
import re
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLES, SAMPLE_S = 11, 0.005
"""How often the running threads are counted, and the seconds between two counts."""

SHORT_SLICE_NS = 100_000
"""The shortest time slice that Linux accepts. It has an effect since Linux 6.12."""

_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime (here the slice), deadline and period of sched_setattr(2)."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call sched_setattr by machine; sched_getattr has the next number."""

_ORDINARY = (0, 3)
"""The policies SCHED_OTHER and SCHED_BATCH, whose threads have time slices."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads can run at once, at least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas(root))]))


def slowness(root: Path = Path("/")) -> float:
    """Return how many times as long work on all cores takes now as on an idle machine, at least 1.

    It follows from the number of threads that run or wait for a core on the machine, sampled a few times; it is 1 if
    the system does not tell.
    """
    counts = []
    for _ in range(SAMPLES):
        found = re.search(r"^procs_running (\d+)", _read(root / "proc/stat"), re.MULTILINE)
        counts.append(int(found[1]) if found else 1)
        time.sleep(SAMPLE_S)
    others = statistics.median(counts) - 1  # this thread runs, too
    return float(max(1.0, (others + usable_cores()) / machine_cores()))


def idle_seconds(root: Path = Path("/")) -> float | None:
    """Return how long the cores that this process may use were without work, since the machine was started.

    It is the sum over the cores; None if the system does not tell.
    """
    rows = {row[0]: row for line in _read(root / "proc/stat").splitlines() if len(row := line.split()) > 5}
    found = [rows.get(f"cpu{core}") for core in os.sched_getaffinity(0)]
    ticks = [int(row[4]) + int(row[5]) for row in found if row is not None]  # idle, also while waiting for a disk
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def machine_cores() -> int:
    """Return the cores of the machine, whether this process may use them or not."""
    return max(os.cpu_count() or 1, len(os.sched_getaffinity(0)))


@contextmanager
def short_slices() -> Iterator[None]:
    """Give all threads of this process, and the threads that they start, short time slices until the context ends.

    This does nothing on systems without such slices.
    """
    before = {thread: _set_slice(thread, SHORT_SLICE_NS) for thread in _threads()}
    try:
        yield
    finally:
        for thread in _threads():
            _set_slice(thread, before.get(thread, 0))


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        return []


def _set_slice(thread: int, slice_ns: int) -> int:
    """Set a thread's time slice and return the previous one; 0 means the system's default."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return 0
    call, attributes = ctypes.CDLL(None).syscall, ctypes.create_string_buffer(_SCHED_ATTR.size)
    if call(number + 1, thread, attributes, _SCHED_ATTR.size, 0) != 0:
        return 0  # the thread has ended, or the system forbids the call
    size, policy, flags, nice, priority, before_ns, *others = _SCHED_ATTR.unpack(attributes.raw)
    if policy in _ORDINARY:
        call(number, thread, _SCHED_ATTR.pack(size, policy, flags, nice, priority, slice_ns, *others), 0)
    return int(before_ns)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process' control groups and of their parent groups, in cores."""
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
        # Within a container, the path may be the one outside of it. Then only the top folder exists.
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
        return path.read_text("utf-8")
    except OSError:
        return ""
