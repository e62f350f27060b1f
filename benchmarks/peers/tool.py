"""Runs the compiler of an engine in a separate process, and reports an error in one line.

Because it is a separate process, its memory is not counted as memory of the engine, and a crash of the compiler
can be distinguished from an error that it reports for the model.
"""

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
        task: a description of what it does, such as "compile the model".

    Raises:
        UnsupportedError: the command failed; the message has its error in one line, or the signal that ended it.
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
    """Return the error from a compiler's output, in one line; "" if the output is empty.

    For MLIR it is the first line with an error, for Python the last line of the traceback.

    >>> reason("m.mlir:7:12: error: failed to legalize 'onnx.Fizz': %3 = ...")
    "failed to legalize 'onnx.Fizz'"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    is_python = any(line.startswith("Traceback ") for line in lines)
    for line in reversed(lines) if is_python else lines:
        mark = next((mark for mark in _MARKS if mark in line), None)
        if mark is not None:
            said = line.partition(mark)[2].strip()
            return said.partition(": %")[0][:_LONGEST]  # without the text of the MLIR operation
    return lines[-1][:_LONGEST] if lines else ""
