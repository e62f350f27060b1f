"""Runs a compiler as a process, and handles that it takes too long or is killed."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from korch.errors import CompileError
from korch.system.deadline import Deadline

COMPILE_SECONDS = 120
"""The limit of a compiler's CPU time."""

PATIENCE = 10
"""The limit of its elapsed time, as a multiple of COMPILE_SECONDS, since the machine may be busy."""

TICK_SECONDS = 0.2
"""The interval of checks whether a compiler must be stopped."""

IDLE_TICKS = 5
"""A compiler that has computed nothing in this number of intervals hangs."""


class StoppedError(CompileError):
    """The compiler was stopped, because its result would be too late."""


class KilledError(CompileError):
    """The system did not start the compiler, or killed it."""


class CompilerRefusedError(CompileError):
    """The compiler found errors in the source.

    Attributes:
        output: all that it printed.
    """

    output = ""


def run_compiler(
    command: Sequence[str], folder: Path, stop: Deadline | None = None, end: Deadline | None = None
) -> None:
    """Run a compiler in a folder, which also gets its temporary files.

    Args:
        command: the program and its arguments.
        folder: the folder.
        stop: when to stop it.
        end: when to stop it if it computes nothing. Then a compiler that hangs is told from one on a busy machine.
    """
    code, said = _call(command, folder, stop or Deadline(), end or Deadline())
    # If the system killed the compiler proper, the driver prints that and exits normally.
    if code == -signal.SIGXCPU or (code and "CPU time limit exceeded" in said):
        raise CompileError(f"the compiler took longer than {COMPILE_SECONDS} s")
    if code < 0 or (code and ": Killed" in said):
        raise KilledError("the system killed the compiler, most likely because memory ran out")
    if code:
        refusal = CompilerRefusedError(_cause(said), hint="`korch doctor` checks the compiler")
        refusal.output = said
        raise refusal


def _cause(said: str) -> str:
    """Return the lines of a compiler's output that say why it failed; a linker's summary comes after the cause."""
    lines = [line for line in said.splitlines() if re.search("error|cannot find|undefined reference", line)]
    lines.sort(key=lambda line: "linker command failed" in line or line.startswith("collect2"))
    return "; ".join(lines[:3] or said.splitlines()[-1:] or ["no message"])


def _call(command: Sequence[str], folder: Path, stop: Deadline, end: Deadline) -> tuple[int, str]:
    """Return a compiler's exit code and output; its elapsed time has a generous limit, as the machine may be busy."""
    limit = Deadline.after(PATIENCE * COMPILE_SECONDS, time.monotonic())
    if stop.is_over:
        raise StoppedError("no time was left to start the compiler")
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=folder,
            # Assemblers can't read some characters of paths, so paths are relative. Messages are read in English.
            env={**os.environ, "TMPDIR": ".", "LC_ALL": "C"},
        ) as process:
            try:
                _limit_computing(process.pid)
                idle = 0
                while True:
                    try:
                        said = process.communicate(timeout=TICK_SECONDS)[1]
                        break
                    except subprocess.TimeoutExpired:
                        left_s = end.left_s
                        if left_s is not None and left_s <= IDLE_TICKS * TICK_SECONDS:  # all processes are listed
                            idle = 0 if _computes(process.pid) else idle + 1
                        if stop.is_over or (end.is_over and idle >= IDLE_TICKS):
                            raise StoppedError("the compiler did not end in time") from None
                        if limit.is_over:
                            raise
            except BaseException:
                # The driver has started other processes, which would continue to run.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        limit_s = PATIENCE * COMPILE_SECONDS
        raise KilledError(f"the compiler did not end within {limit_s:g} s") from error
    except OSError as error:
        raise KilledError(f"the compiler does not start: {error}") from error
    return process.returncode, said


def _computes(group: int) -> bool:
    """Return whether a process of a group runs, waits for a core, or waits for a disk; true where it is not known."""
    if sys.platform != "linux":
        return True
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            state, _, of = path.read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state in "RD":
                return True
    return False


def _limit_computing(process: int) -> None:
    """Limit the CPU time of a process that has just started, and of the processes that it will start."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it may have ended, or limits may not be allowed
            most = resource.prlimit(process, resource.RLIMIT_CPU)[1]
            soft = COMPILE_SECONDS if most == resource.RLIM_INFINITY else min(COMPILE_SECONDS, most)
            resource.prlimit(process, resource.RLIMIT_CPU, (soft, most))
            resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))
