"""Kernels -> measurements, in a process of their own, interleaved.

The rounds go over all kernels of a batch, so that a slow spell of a shared machine hits all of them
alike; a low quantile of the samples is the time. A kernel that crashes or hangs is recorded as
such, and a new process goes on with the others.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from korch.errors import MeasureError
from korch.measure.record import Failed, Measured, summarize
from korch.primitive.op import Array

ROUNDS = 12
LEAST_ROUNDS = 5
KERNEL_NS = 60_000_000
HANG_SECONDS = 10.0
START_SECONDS = 60.0
COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from korch.measure.worker import serve; serve()"
"""The process imports from where this one does: `-m` would put the current folder first, whose
files are the user's, not ours."""


@dataclass(frozen=True)
class BufferSpec:
    """One buffer of a kernel: its bytes, its element type, and what it holds if that matters."""

    size_bytes: int
    dtype: str
    data: Array | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as the worker reads it."""
        line: dict[str, Any] = {"bytes": self.size_bytes, "dtype": self.dtype}
        if self.data is not None:
            line["data"] = base64.b64encode(self.data.tobytes()).decode()
        return line


@dataclass(frozen=True)
class Job:
    """A kernel to time: its symbol in the library and its buffers, workspace last.

    `inputs` has the positions of buffers that other kernels write before this one runs.
    """

    symbol: str
    has_state: bool
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[int, ...] = ()


def time_kernels(
    jobs: Sequence[Job],
    library: Path,
    timer: Path,
    preload: Sequence[Path],
    threads: int,
    hang_seconds: float = HANG_SECONDS,
    environment: dict[str, str] | None = None,
    sweep_bytes: int = 1 << 20,
) -> list[Measured | Failed]:
    """Time kernels of one library.

    Args:
        jobs: the kernels.
        library: the shared library that holds them.
        timer: the shared library built from `korch_timer.cpp`.
        preload: shared libraries that they call.
        threads: OpenMP threads.
        hang_seconds: how long a kernel may say nothing.
        environment: further environment variables of the process.
        sweep_bytes: of a core's own caches, which are emptied before each run.

    Returns:
        A measurement or a failure for each job.
    """
    results: list[Measured | Failed | None] = [None] * len(jobs)
    waiting = list(range(len(jobs)))
    while waiting:
        task = {
            "library": str(library), "timer": str(timer), "preload": [str(p) for p in preload],
            "threads": threads, "rounds": ROUNDS, "least_rounds": LEAST_ROUNDS,
            "kernel_ns": KERNEL_NS, "parent": os.getpid(), "sweep_bytes": sweep_bytes,
            "jobs": [
                {"symbol": jobs[i].symbol, "has_state": jobs[i].has_state,
                 "buffers": [b.as_json() for b in jobs[i].buffers],
                 "inputs": list(jobs[i].inputs)} for i in waiting
            ],
        }  # fmt: skip
        session = _Session(len(waiting), hang_seconds, environment or {})
        found = session.run(task)
        for local, i in enumerate(waiting):
            results[i] = found[local]
        left = [i for i in waiting if results[i] is None]
        if len(left) == len(waiting):
            reason = f": {session.unready}" if session.unready else ""
            raise MeasureError(f"the measuring process died before it touched a kernel{reason}",
                               hint="Run `korch doctor`")  # fmt: skip
        waiting = left
    return [result for result in results if result is not None]


class _Session:
    """One life of the worker."""

    def __init__(self, count: int, hang_seconds: float, environment: dict[str, str]) -> None:
        self.samples: list[list[int]] = [[] for _ in range(count)]
        self.failures: list[Failed | None] = [None] * count
        self.at: int | None = None
        self.unready = ""
        self.hang_seconds = hang_seconds
        self.environment = environment

    def run(self, task: dict[str, Any]) -> list[Measured | Failed | None]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, *sys.path], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(task["threads"]), **self.environment},
        )  # fmt: skip
        try:
            ended = self._listen(process, json.dumps(task))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if ended == "done":
            return [self._result(i) for i in range(len(self.samples))]
        if self.at is not None:
            self.failures[self.at] = self._end(ended, code)
        return [*self.failures]

    def _end(self, ended: str, code: int) -> Failed:
        if ended == "hung":
            return Failed("hung", f"it did not return within {self.hang_seconds:g} s")
        if code == -signal.SIGKILL:
            return Failed("killed", "the system killed it, most likely for want of memory")
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failed("crashed", f"the process ended by {name}")

    def _result(self, i: int) -> Measured | Failed:
        failure = self.failures[i]
        if failure is not None:
            return failure
        if not self.samples[i]:
            return Failed("failed", "it gave no sample")
        return summarize(self.samples[i])

    def _listen(self, process: subprocess.Popen[bytes], task: str) -> str:
        if process.stdin is None or process.stdout is None:
            raise MeasureError("the measuring process has no pipes")
        try:
            process.stdin.write(task.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return "crashed"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while True:
                limit = START_SECONDS if self.at is None else self.hang_seconds
                if not selector.select(limit):
                    return "hung"
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return "crashed"
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if self._take(json.loads(line)):
                        return "done"

    def _take(self, line: dict[str, Any]) -> bool:
        if "at" in line:
            self.at = line["at"]
        elif "sample" in line:
            i, time_ns = line["sample"]
            if time_ns < 0:
                self.failures[i] = Failed("failed", "run returned an error")
            self.samples[i].append(time_ns)
        elif "unready" in line:
            self.unready = line["unready"]
        elif "failed" in line:
            i, kind, text = line["failed"]
            self.failures[i] = Failed(kind, text)
        return "done" in line
