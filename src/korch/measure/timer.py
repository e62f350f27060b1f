"""Kernels -> measurements, interleaved, in a separate process.

Each round times all kernels of a batch, so that a slow period of a shared machine affects all of
them. The measured time is a low quantile of the samples. A kernel that crashes or hangs is recorded as
such, and a new process continues with the others.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from korch.measure.record import Failed, Measured
from korch.measure.session import MeasuringProcess, run_jobs
from korch.primitive.op import Array
from korch.system.deadline import Deadline

ROUNDS = 12
LEAST_ROUNDS = 5
KERNEL_NS = 60_000_000
HANG_SECONDS = 10.0

ENOUGH_SECONDS = 600.0
"""The time limit for one batch if no shorter one is given."""

SCRATCH = "scratch"
"""The element type of a workspace. A workspace is filled with zeros: kernels also compute on padded lanes, and random
bytes there may be denormal numbers, which are much slower than the contents of a plan's arena."""


@dataclass(frozen=True)
class BufferSpec:
    """One buffer of a kernel: its size, its element type, and its content if that matters."""

    size_bytes: int
    dtype: str
    data: Array | None = None
    same_as: int | None = None  # the position of the buffer before it whose memory it has, too

    def as_json(self) -> dict[str, Any]:
        """Return the buffer as JSON data for the worker."""
        line: dict[str, Any] = {"bytes": self.size_bytes, "dtype": self.dtype, "same_as": self.same_as}
        if self.data is not None:
            line["data"] = base64.b64encode(self.data.tobytes()).decode()
        return line


@dataclass(frozen=True)
class Job:
    """A kernel to time: its symbol in the library and its buffers, workspace last.

    `inputs` has the positions of buffers that other kernels write before this one runs. `cold` has the
    positions of buffers that are in no cache when it starts.
    """

    symbol: str
    has_state: bool
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[int, ...] = ()
    cold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setup:
    """The process that times kernels."""

    objects: Sequence[Path]  # the files with the kernels' objects
    threads: int = 1  # the threads of a kernel
    own_cache_bytes: int = 1 << 20  # the size of a core's private caches; other data fill them before each run
    l3_bytes: int = 32 << 20  # the size of the cache that the cores share
    hang_seconds: float = HANG_SECONDS  # how long a kernel may run before it counts as hung
    environment: Mapping[str, str] = field(default_factory=dict)  # further environment variables


def time_kernels(
    jobs: Sequence[Job], setup: Setup, seconds: float | None = None, stop: Deadline | None = None
) -> list[Measured | Failed | None]:
    """Time kernels.

    `seconds`: the time after which kernels that have a sample get no more.

    Returns:
        A measurement or a failure for each job; None for a job that was not timed before the end.
    """
    task = {
        "objects": [str(path) for path in setup.objects],
        "threads": setup.threads,
        "rounds": ROUNDS,
        "least_rounds": LEAST_ROUNDS,
        "kernel_ns": KERNEL_NS,
        "parent": os.getpid(),
        "own_cache_bytes": setup.own_cache_bytes,
        "l3_bytes": setup.l3_bytes,
        "seconds": ENOUGH_SECONDS if seconds is None else seconds,
    }
    rows = [
        {
            "symbol": job.symbol,
            "has_state": job.has_state,
            "buffers": [b.as_json() for b in job.buffers],
            "inputs": list(job.inputs),
            "cold": list(job.cold),
        }
        for job in jobs
    ]
    with MeasuringProcess("korch.measure.worker", setup.environment) as process:
        return run_jobs(rows, task, process, setup.hang_seconds, stop)
