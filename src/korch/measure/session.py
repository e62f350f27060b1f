"""Jobs -> measurements, in a separate process that may crash or hang.

The process reads one task as a JSON line from stdin and answers in JSON lines: see
`korch.measure.worker`. If it dies during a job, the job is recorded as crashed or hung, and a new process
continues with the others.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

from korch.errors import MeasureError
from korch.measure.record import Failed, Measured, summarize
from korch.system.child import child_command
from korch.system.deadline import Deadline

START_SECONDS = 60.0
PRINTED_BYTES = 500
"""The number of bytes that are kept of the end of a process's output to stderr."""


def run_jobs(
    jobs: Sequence[Mapping[str, Any]],
    task: Mapping[str, Any],
    process: MeasuringProcess,
    hang_seconds: float,
    stop: Deadline | None = None,
) -> list[Measured | Failed | None]:
    """Time jobs.

    Args:
        jobs: the jobs in the form that the process reads.
        task: the other entries of the task.
        process: runs the jobs; it continues to run afterwards, unless it has crashed, hung or been stopped.
        hang_seconds: how long a job may send nothing.
        stop: when to end; jobs that have samples by then are measured.

    Returns:
        A measurement or a failure for each job; None for a job that was not run before the end.

    Raises:
        MeasureError: the process dies before it starts a job.
    """
    results: list[Measured | Failed | None] = [None] * len(jobs)
    waiting = list(range(len(jobs)))
    stop = stop or Deadline()
    while waiting and not stop.is_over:
        session = TimingSession(len(waiting), hang_seconds, stop)
        found = session.run({**task, "jobs": [jobs[i] for i in waiting]}, process)
        for local, i in enumerate(waiting):
            results[i] = found[local]
        left = [i for i in waiting if results[i] is None]
        if len(left) == len(waiting) and not stop.is_over:
            reason = session.unready or session.printed
            raise MeasureError(
                "the measuring process ended before it ran a kernel" + (f": {reason}" if reason else ""),
                hint="Run `korch doctor`",
            )
        waiting = left
    return results


class MeasuringProcess:
    """A process that times kernels: started when there is a task, ended at the exit of the context.

    If the process has ended, the next task starts a new one.

    Args:
        serve: the module whose `serve` is the process.
        environment: further environment variables of the process.
    """

    def __init__(self, serve: str, environment: Mapping[str, str] | None = None) -> None:
        self.serve = serve
        self.environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Return the running process; start one if there is none."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
            self._process = subprocess.Popen(
                child_command(self.serve),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        return self._process

    def close(self) -> tuple[int, str]:
        """End the process; return its exit code, and the end of its output to stderr."""
        process, printed = self._process, self._printed
        self._process = self._printed = None
        if process is None or printed is None:
            return 0, ""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with printed:
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - PRINTED_BYTES))
            return code, "; ".join(printed.read().decode(errors="replace").strip().splitlines())


class TimingSession:
    """One task of a measuring process."""

    def __init__(self, count: int, hang_seconds: float, stop: Deadline) -> None:
        self.stop = stop
        self.printed = ""  # the end of what the process wrote to stderr
        self.samples: list[list[int]] = [[] for _ in range(count)]
        self.away_ns: list[list[int]] = [[] for _ in range(count)]
        self.failures: list[Failed | None] = [None] * count
        self.at: int | None = None
        self.unready = ""
        self.hang_seconds = hang_seconds

    def run(self, task: dict[str, Any], process: MeasuringProcess) -> list[Measured | Failed | None]:
        """Send the process a task and read its answers to the end; None for jobs that it did not reach."""
        code, ended = 0, "crashed"
        try:
            ended = self._listen(process.start(), json.dumps(task))
        finally:
            if ended != "done":
                code, self.printed = process.close()
        if ended == "done":
            return [self._result(i) for i in range(len(self.samples))]
        if ended == "stopped":
            return [f if f is not None or not self.samples[i] else self._result(i) for i, f in enumerate(self.failures)]
        if self.at is not None and self.failures[self.at] is None:
            self.failures[self.at] = self._end(ended, code)
        return [*self.failures]

    def _end(self, ended: str, code: int) -> Failed:
        if ended == "hung":
            return Failed("hung", f"it did not return within {self.hang_seconds:g} s")
        if code == -signal.SIGKILL:
            return Failed("killed", "the system killed it, most likely because memory ran out")
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        printed = f": {self.printed}" if self.printed else ""
        return Failed("crashed", f"the process ended by {name}{printed}")

    def _result(self, i: int) -> Measured | Failed:
        failure = self.failures[i]
        if failure is not None:
            return failure
        if not self.samples[i]:
            return Failed("failed", "it gave no sample")
        return summarize(self.samples[i], self.away_ns[i])

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
                limit_s = START_SECONDS if self.at is None else self.hang_seconds
                left_s = self.stop.left_s
                if left_s is not None and left_s <= 0:
                    return "stopped"
                if not selector.select(limit_s if left_s is None else min(limit_s, left_s)):
                    if self.stop.is_over:
                        return "stopped"
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
            i, time_ns, *away_ns = line["sample"]
            if time_ns < 0:
                self.failures[i] = Failed("failed", "run returned an error")
            self.samples[i].append(time_ns)
            self.away_ns[i].append(away_ns[0] if away_ns else 0)
        elif "unready" in line:
            self.unready = line["unready"]
        elif "failed" in line:
            i, kind, text = line["failed"]
            self.failures[i] = Failed(kind, text)
        return "done" in line
