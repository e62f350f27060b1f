"""Processes that run a module of this package, and neither the user's script nor the user's folder.

`multiprocessing` would import the script again in each of them: one that optimizes without an
`if __name__ == "__main__":` would do so there, too. And `-m` would put the current folder first,
whose files are the user's, not ours.
"""

from __future__ import annotations

import sys

_COMMAND = """
import importlib, sys
sys.path[:] = sys.argv[2:]
importlib.import_module(sys.argv[1]).serve()
"""


def child_command(module: str) -> list[str]:
    """Return the command that calls `serve` of a module, imported from where this process does."""
    return [sys.executable, "-P", "-c", _COMMAND, module, *sys.path]
