"""Runs the compiler of an engine in a separate process, and reports an error in one line.

So its memory does not count as memory of the engine, and a compiler that crashes is distinguished
from a model that it refuses.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

from korch.errors import UnsupportedError

_MARKS = ("error: ", "Error: ", "NotImplemented: ", "INTERNAL: ")
_LONGEST = 240


def run_tool(command: Sequence[str], task: str) -> None:
    """Run a command to its end.

    Args:
        command: program and arguments.
        task: what it does, as in "compile the model".

    Raises:
        UnsupportedError: it failed; the text has its error in one line, or the signal that ended it.
    """
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise UnsupportedError(f"can't {task}: its compiler was killed by {name}")
    said = reason(done.stderr) or f"its compiler ended with exit code {done.returncode}"
    raise UnsupportedError(f"can't {task}: {said}")


def reason(text: str) -> str:
    """Return the line of a compiler's output with the error; "" if there is none.

    For MLIR that is the first line with an error, for Python the last line of the traceback.

    >>> reason("m.mlir:7:12: error: failed to legalize 'onnx.Fizz': %3 = ...")
    "failed to legalize 'onnx.Fizz'"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    is_python = any(line.startswith("Traceback ") for line in lines)
    for line in reversed(lines) if is_python else lines:
        mark = next((mark for mark in _MARKS if mark in line), None)
        if mark is not None:
            said = line.partition(mark)[2].strip()
            return said.partition(": %")[0][:_LONGEST]  # without the operation's text
    return lines[-1][:_LONGEST] if lines else ""
