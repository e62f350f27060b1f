"""A worker process as an object: start it, send requests, close it.

Each engine has its own process: thread pools of several engines in one process disturb each other,
and an engine that crashes or hangs must not end the comparison. A crash, a time-out and an error of
an engine have three different messages, and each names the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from korch import errors
from korch.errors import KorchError, MeasureError

_TAIL_LINES = 5


class WorkerProcess:
    """A running worker; a context manager that leaves no process behind.

    Attributes:
        name: the name of the engine's row, used in messages.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._buffer = b""
        # The worker imports from the same folders as this process.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),  # noqa: PTH109
            "OMP_NUM_THREADS": str(threads),
        }
        # With `active`, threads of an idle worker would spin while another engine is timed.
        environment.pop("OMP_WAIT_POLICY", None)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "korch.report.peers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            bufsize=0,
            start_new_session=True,  # so that compilers that it started can be killed with it
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            KorchError: the error that the engine raised, with its own class.
            MeasureError: the worker died, or didn't answer within `timeout_s` (it is then killed).
        """
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise MeasureError("the worker is closed", where=f"peer {self.name}")
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            line = self._read_line(timeout_s)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self._kill()
            raise MeasureError(
                f"no answer to {request['do']!r} within {timeout_s:g} s, so it was killed", where=f"peer {self.name}"
            ) from None
        if not line:
            raise self._death(request["do"])
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._rebuild(answer["error"])
        return answer

    def settle(self, limit_s: float = 0.25) -> bool:
        """Wait until the worker's threads are asleep.

        Thread pools spin for a while after a run. Returns False if they still spin after `limit_s`,
        or if the system does not provide this information.
        """
        step_s = 0.008  # the operating system updates the times of running threads once per tick, up to 4 ms
        deadline = time.monotonic() + limit_s
        before_ns = self._busy_ns()
        while time.monotonic() < deadline:
            time.sleep(step_s)
            now_ns = self._busy_ns()
            if before_ns is None or now_ns is None:
                return False
            if now_ns - before_ns < 0.05e9 * step_s and not self._is_runnable():
                return True
            before_ns = now_ns
        return False

    def memory_bytes(self) -> int | None:
        """Return its memory without mapped files; None where Linux's /proc is missing.

        So the libraries of an engine are not counted, but its copies of weights are.
        """
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text("utf-8").splitlines()
        except OSError:
            return None
        kib = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
        return 1024 * kib[0] if kib else None

    def close(self) -> None:
        """End the worker; kill it if it does not end by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._stderr.close()

    def _kill(self) -> None:
        """Kill the worker and the processes that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_line(self, timeout_s: float) -> bytes:
        """Return the next line, b"" at the end of the stream; raise `TimeoutError` after `timeout_s`."""
        stdout = self._process.stdout
        if stdout is None:
            return b""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                raise TimeoutError
            chunk = os.read(stdout.fileno(), 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _busy_ns(self) -> int | None:
        """Return the time for which threads ran or waited for a core; None where Linux's /proc is missing.

        Waiting is included, because a spinning thread that other processes keep off its core is not asleep.
        """
        total_ns = 0
        try:
            for task in Path(f"/proc/{self._process.pid}/task").iterdir():
                total_ns += _busy_ns(task / "schedstat")
        except OSError:
            return None
        return total_ns

    def _is_runnable(self) -> bool:
        """Return whether a thread runs or waits for a core; the time that it waits is only known once it runs again."""
        for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text("utf-8").rpartition(")")[2].split()[0] == "R":
                    return True
        return False

    def _death(self, request: str) -> MeasureError:
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._kill()
            code = self._process.wait()
        try:
            cause = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            cause = f"ended with exit code {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        said = "Its last output: " + " | ".join(lines[-_TAIL_LINES:]) if lines else ""
        return MeasureError(
            f"its process {cause} while it was asked to {request!r}", where=f"peer {self.name}", hint=said
        )

    def _rebuild(self, fields: dict[str, str]) -> KorchError:
        kind = getattr(errors, fields.pop("kind"), MeasureError)
        where = fields.get("where")
        fields["where"] = f"peer {self.name}: {where}" if where else f"peer {self.name}"
        error: KorchError = kind(**fields)
        return error


def _busy_ns(path: Path) -> int:
    """Return the time for which a thread ran or waited for a core; 0 if it has just ended."""
    try:
        return sum(map(int, path.read_text("utf-8").split()[:2]))
    except (FileNotFoundError, ProcessLookupError):
        return 0
