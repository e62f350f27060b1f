"""The report of a failure of an engine's compiler."""

import signal
import sys

import pytest

from benchmarks.peers.tool import reason, run_tool
from korch.errors import UnsupportedError

MLIR = """m.mlir:607:12: error: failed to legalize operation 'onnx.Fizz': %3 = "x"(%1)
    %3 = torch.operator "onnx.Fizz"(%1)
m.mlir:607:12: error: failed to run translation
"""
PYTHON = """warning: an error: of no importance
Traceback (most recent call last):
  File "a.py", line 7, in main
    raise ValueError("error: inner")
tvm.error.OpNotImplemented: not supported for frontend ONNX: Fizz

!!! further words
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MLIR, "failed to legalize operation 'onnx.Fizz'"),
        (PYTHON, "not supported for frontend ONNX: Fizz"),
        ("Traceback (most recent call last):\nKeyError: 'x'", "'x'"),
        ("no word of it\nthe last line\n", "the last line"),
        ("a: error: " + 1000 * "x", 240 * "x"),
        ("\n  \n", ""),
    ],
)
def test_the_one_line_that_says_why(text: str, line: str) -> None:
    assert reason(text) == line


def run(code: str) -> str:
    with pytest.raises(UnsupportedError) as caught:
        run_tool([sys.executable, "-c", code], "compile the model")
    return str(caught.value)


def test_a_tool_that_works_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run_tool([sys.executable, "-c", "print('many warnings')"], "compile the model")
    assert capfd.readouterr() == ("", "")


def test_an_error_a_crash_and_a_silent_exit_are_told_apart() -> None:
    assert run("raise TypeError('odd')") == "can't compile the model: odd"
    assert run("import sys; sys.exit(3)") == ("can't compile the model: its compiler ended with exit code 3")
    killed = f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"
    assert run(killed) == "can't compile the model: its compiler was killed by SIGSEGV"


def test_a_tool_that_waits_for_input_gets_none() -> None:
    assert run("import sys; sys.exit(sys.stdin.read() or 'nothing')") == ("can't compile the model: nothing")
