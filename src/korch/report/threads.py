"""The activity of the threads of each kernel in complete runs.

The unchanged artifact runs in another process, in which the runtime records what its threads do.
ONNX Runtime has threads of its own: for its kernels only the calling thread is recorded.
"""

import json
import subprocess
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from korch.errors import MeasureError, excerpt
from korch.report.task_spans import TaskRun, TaskSpan
from korch.system.child import child_command

SECONDS = 300
"""The time limit of the process."""


@dataclass(frozen=True, slots=True)
class ThreadSpan:
    """The work of one thread in one parallel region of a kernel, times in nanoseconds."""

    kernel: int  # the kernel's index in the plan
    thread: int  # the number of the thread; 0 is the calling thread
    begin_ns: int  # its start, since the start of the first kernel
    end_ns: int  # its end
    wait_ns: int  # the part of this time in which it waited for other threads between stages

    @property
    def busy_ns(self) -> int:
        """The nanoseconds in which it worked."""
        return self.end_ns - self.begin_ns - self.wait_ns


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """One run: the time of each kernel, and the spans of its threads."""

    kernel_ns: tuple[int, ...]
    spans: tuple[ThreadSpan, ...]


@dataclass(frozen=True, slots=True)
class ThreadLoad:
    """How evenly the threads of a kernel work; medians over runs."""

    longest: float  # the time of the thread that works longest, relative to the mean of all threads
    # the share of the threads' time in the kernel in which they do not work on a parallel region: they wait for other
    # threads, start, or only one of them works
    idle: float


@dataclass(frozen=True)
class Threads:
    """Recorded runs of a plan."""

    threads: int  # the number of threads
    runs: tuple[WatchedRun, ...]  # the runs, with a join after each kernel
    task_runs: tuple[TaskRun, ...] = ()  # runs as tasks; empty if the plan has no tasks

    @property
    def typical_tasks(self) -> TaskRun | None:
        """The run as tasks with the median duration; None if the plan has no tasks."""
        ordered = sorted(self.task_runs, key=lambda run: run.end_ns)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def typical(self) -> WatchedRun:
        """The run whose kernels are nearest to their medians over all runs.

        The run of median duration would be a worse choice: one kernel in it may be slow and the others fast.
        """
        times = np.array([run.kernel_ns for run in self.runs], float)
        away = np.abs(times - np.median(times, axis=0)).sum(axis=1)
        return self.runs[int(np.argmin(away))]

    def loads(self) -> tuple[ThreadLoad | None, ...]:
        """Return, for each kernel, how evenly its threads work; None if no region was recorded."""
        found: list[ThreadLoad | None] = []
        for kernel in range(len(self.runs[0].kernel_ns)):
            rows = [self._load(run, kernel) for run in self.runs]
            seen = [row for row in rows if row is not None]
            middle = np.median(np.array(seen), axis=0) if seen else None
            found.append(None if middle is None else ThreadLoad(float(middle[0]), float(middle[1])))
        return tuple(found)

    def _load(self, run: WatchedRun, kernel: int) -> tuple[float, float] | None:
        busy_ns = [0] * self.threads
        for span in run.spans:
            if span.kernel == kernel and span.thread < self.threads:
                busy_ns[span.thread] += span.busy_ns
        total_ns = sum(busy_ns)
        if not total_ns:
            return None
        mean_ns = total_ns / self.threads
        whole_ns = max(run.kernel_ns[kernel], *busy_ns)
        return max(busy_ns) / mean_ns, max(0.0, 1 - mean_ns / whole_ns)


def watch_threads(artifact: Path, threads: int, rounds: int, seed: int = 0) -> Threads:
    """Run an artifact of one plan and record its threads.

    Raises:
        MeasureError: the process fails.
    """
    task = {"artifact": str(artifact), "rounds": rounds, "seed": seed}
    command = child_command("korch.report.threads_worker")
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasureError(f"the process that records threads fails: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MeasureError(f"the process that records threads fails: {excerpt(last)}")
    answer = json.loads(done.stdout)
    tasks = (TaskRun(tuple(TaskSpan(bool(span[0]), *span[1:]) for span in spans)) for spans in answer["tasks"] if spans)
    return Threads(threads, tuple(map(read_run, answer["runs"])), tuple(tasks))


def read_run(data: dict[str, Any]) -> WatchedRun:
    """Return a run from the process's answer. A parallel region belongs to the kernel in which it begins.

    Where the threads of the plan run a kernel together, the region's number is -1 - the kernel's number.
    """
    kernel_ns: Sequence[int] = data["kernel_ns"]
    ends = list(accumulate(kernel_ns))
    begun_ns = data["begun_ns"]
    first: dict[int, int] = {}
    for region, _, begin_ns, _, _ in data["spans"]:
        first[region] = min(begin_ns, first.get(region, begin_ns))
    spans = (
        ThreadSpan(
            -1 - region if region < 0 else min(bisect_right(ends, first[region] - begun_ns), len(ends) - 1),
            thread,
            begin_ns - begun_ns,
            end_ns - begun_ns,
            wait_ns,
        )
        for region, thread, begin_ns, end_ns, wait_ns in data["spans"]
    )
    ordered = sorted(spans, key=lambda span: (span.begin_ns, span.thread))
    return WatchedRun(tuple(kernel_ns), tuple(ordered))
