"""Runs processes that compile LLVM IR (`korch.measure.llvm_worker`), and handles that one hangs or is aborted."""

import atexit
import contextlib
import hashlib
import os
import select
import signal
import subprocess
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

from korch.errors import CompileError
from korch.system.child import child_command
from korch.system.deadline import Deadline

LIMIT_SECONDS = 1200.0
"""The most time for one text."""

TICK_SECONDS = 0.2
"""The interval of checks whether a compiler must be stopped."""

STOPPED = frozenset(-number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
"""The statuses of a compiler that something else ended. LLVM itself may abort, or access memory that it must not."""

NO_RESOURCES = ("[Errno ", "Unable to allocate", "no message")
"""How answers begin if a file was not read or written, or (the last two) if memory ran out."""


class StoppedError(CompileError):
    """The compiler was stopped, because its result would be too late."""


class KilledError(CompileError):
    """The system did not start the compiler, or killed it, or gave it too little of something."""


class CompilerRefusedError(CompileError):
    """The compiler found errors in the source.

    Attributes:
        output: all that it printed.
    """

    output = ""


_idle: list[subprocess.Popen[str]] = []


@cache
def llvm_identity() -> str:
    """Return what distinguishes the objects of this version of LLVM and of the worker from others."""
    worker = Path(__file__).with_name("llvm_worker.py").read_bytes()
    return f"llvmlite {version('llvmlite')} {hashlib.sha256(worker).hexdigest()[:16]}"


def object_name(isa: str, text: str) -> str:
    """Return the name of the file with the object of a text: a hash of all that it depends on."""
    return hashlib.sha256(f"{isa}\n{text}\n{llvm_identity()}".encode()).hexdigest()[:32] + ".o"


def compile_llvm(source: Path, target: Path, stop: Deadline) -> None:
    """Compile a module to an object, or do a job (`llvm_worker`), in a process that is idle or a new one.

    Raises:
        CompilerRefusedError: the text is wrong.
        StoppedError: the compiler was stopped.
        KilledError: the system ended the process, did not start it, or gave it too little memory or disk.
        CompileError: LLVM aborted, or took too long.
    """
    if stop.is_over:
        raise StoppedError("no time was left to start the compiler")
    process = _taken() or _start()
    try:
        answer = _ask(process, f"{source}\t{target}\n", stop)
    except BaseException:
        _end(process)
        raise
    _idle.append(process)
    if answer.startswith(NO_RESOURCES):
        raise KilledError(f"the compiler failed: {answer}")
    if answer:
        refusal = CompilerRefusedError(f"LLVM refused it: {answer}", hint="`korch doctor` checks the compiler")
        refusal.output = answer
        raise refusal


def start_processes(count: int) -> None:
    """Start processes until some number is idle; they load what kernels are built with, which takes half a second."""
    with contextlib.suppress(KilledError):  # a compilation reports it
        _idle.extend(_start() for _ in range(count - len(_idle)))


def _taken() -> subprocess.Popen[str] | None:
    """Take an idle process, if there is one; those that have ended are dropped."""
    with contextlib.suppress(IndexError):
        while (process := _idle.pop()).poll() is not None:
            _end(process)
        return process
    return None


def _start() -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            child_command("korch.measure.llvm_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise KilledError(f"the compiler does not start: {error}") from error


def _ask(process: subprocess.Popen[str], line: str, stop: Deadline) -> str:
    """Send a line and return the answer."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    limit = Deadline.after(LIMIT_SECONDS, time.monotonic())
    with contextlib.suppress(BrokenPipeError):  # the answer says why
        stdin.write(line)
        stdin.flush()
    while not select.select([stdout], [], [], TICK_SECONDS)[0]:
        if stop.is_over:
            raise StoppedError("the compiler did not end in time")
        if limit.is_over:
            raise CompileError(f"the compiler took longer than {LIMIT_SECONDS:g} s")
    answer = stdout.readline()
    if not answer:
        code = process.wait()
        if code in STOPPED:
            raise KilledError("the system killed the compiler, most likely because memory ran out")
        raise CompileError(f"LLVM ended with status {code}")
    return answer.strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # closes its pipes, one of which may not be empty, and waits
        pass


@atexit.register
def end_processes() -> None:
    """End the processes that are idle."""
    while _idle:
        _end(_idle.pop())


def _leave_processes() -> None:
    """Forget the idle processes in a forked process: they answer the one that started them."""
    for process in _idle:
        process.returncode = 0  # it is not a child of this process, which can't wait for it
    _idle.clear()


os.register_at_fork(after_in_child=_leave_processes)
