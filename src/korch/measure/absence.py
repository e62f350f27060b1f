"""Measures for how long threads of this process were ready to run but had no core."""

import os
import threading
from pathlib import Path

TASKS = Path("/proc/self/task")
STAT = Path("/proc/stat")
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
STOLEN = 8
"""The field of the first line of `/proc/stat` with the time that other virtual machines took (steal time)."""


class Absence:
    """A stopwatch that counts only while a thread waits for a core, or while the virtual machine has no core."""

    def __init__(self) -> None:
        # Python's other threads do no work for the model (one shows progress, for example), so they may wait.
        own = threading.get_native_id()
        self._others = {t.native_id for t in threading.enumerate() if t.native_id != own}
        self._waited_ns, self._stolen_ns = self._waiting_ns(), _stolen_ns()

    def away_ns(self) -> int:
        """Return the longest waiting time of one thread since creation, plus steal time; 0 if unknown."""
        now_ns = self._waiting_ns()
        waits = (ns - self._waited_ns.get(task, 0) for task, ns in now_ns.items())
        return max(waits, default=0) + _stolen_ns() - self._stolen_ns

    def _waiting_ns(self) -> dict[int, int]:
        found: dict[int, int] = {}
        try:
            tasks = [int(folder.name) for folder in TASKS.iterdir()]
        except OSError:  # another system than Linux
            return {}
        for task in tasks:
            if task in self._others:
                continue
            try:
                found[task] = int((TASKS / str(task) / "schedstat").read_text("utf-8").split()[1])
            except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
                continue
        return found


def _stolen_ns() -> int:
    try:
        with STAT.open() as stream:
            return int(stream.readline().split()[STOLEN]) * TICK_NS
    except (OSError, ValueError, IndexError):
        return 0
