"""The command line: `korch optimize`, `run`, `bench`, `explain`, `profile`, `unpack`, and others (`cli/parser.py`).

Exit codes: 0 success, 1 error, 2 wrong usage, 130 interrupted. Results go to stdout, progress goes to stderr.
"""

import gc
import os
import sys
from collections.abc import Sequence

from korch.system.settings import few_collections

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    _open_standard_streams()
    try:
        with few_collections():  # also while modules are imported
            from korch.cli.command import run_command  # here, because the imports take a while and may be interrupted

            return run_command(arguments)
    except KeyboardInterrupt:
        print("korch: interrupted; measurements are kept, and the same command continues from them", file=sys.stderr)
        return 130
    finally:
        if arguments is None:
            gc.freeze()  # the process ends: no garbage must be found among the objects of a search


def _open_standard_streams() -> None:
    """Replace closed standard streams, so that files that are opened later do not take their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - a number
