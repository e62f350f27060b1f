"""The process that runs TVM (`korch.provider.tvm.worker`): ended when it is late, restarted when TVM aborts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version

from korch.errors import CompileError
from korch.system.deadline import Deadline
from korch.system.extras import install_command

WORKER = [sys.executable, "-m", "korch.provider.tvm.worker"]
"""The command of the process."""

TICK_SECONDS = 0.2
"""The interval of checks whether the process must be ended."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A kernel that TVM made."""

    trace: str  # TVM's record of the schedule, as JSON
    source: str  # LLVM IR, in which NAME stands for the symbol
    workspace_bytes: int
    is_parallel: bool


def tvm_version() -> str:
    """Return the version of the installed TVM.

    Raises:
        ImportError: there is none.
    """
    if importlib.util.find_spec("tvm") is None:
        raise ImportError(f"TVM is not installed; {install_command('tvm')}")
    return version("apache-tvm")


class LateError(CompileError):
    """TVM did not answer in time."""


class Tuner:
    """Questions to a process, which starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def begin(self, end: Deadline) -> None:
        """Start the process if there is none, and wait until it has imported TVM.

        Raises:
            CompileError: TVM aborted, or was not imported in time (`LateError`).
        """
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                WORKER, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            self._line(end)

    def ask(self, question: Mapping[str, object], end: Deadline) -> tuple[list[Proposal], str]:
        """Return the kernels that are the answer to a question, and why there are not more.

        Raises:
            CompileError: TVM aborted, or did not answer in time (`LateError`).
        """
        self.begin(end)
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        answer = json.loads(self._line(end))
        names = [field.name for field in fields(Proposal)]
        return [Proposal(*(made[name] for name in names)) for made in answer["kernels"]], answer["reason"]

    def _line(self, end: Deadline) -> str:
        """Return the next line of the process; end the process if there is none."""
        process = self._process
        assert process is not None and process.stdout is not None
        line = ""
        try:
            while not (is_there := select.select([process.stdout], [], [], TICK_SECONDS)[0]) and not end.is_over:
                pass
            line = process.stdout.readline() if is_there else ""
        finally:
            if not line:
                self.close()
        if not line:
            raise CompileError("TVM aborted") if is_there else LateError("TVM did not answer in time")
        return line

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # closes its pipes and waits
                pass
