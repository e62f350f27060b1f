"""Child processes that run a module of this package, without importing the user's script or files.

`multiprocessing` would import the user's script again in each child: a script that calls `optimize` without an
`if __name__ == "__main__":` would then optimize again there. `python -m` would put the current folder first on
the module path, so that the user's files could hide ours.
"""

import sys

_COMMAND = """
import importlib, sys
sys.path[:] = sys.argv[2:]
importlib.import_module(sys.argv[1]).serve()
"""


def child_command(module: str) -> list[str]:
    """Return the command that calls a module's `serve`; the child imports from the same `sys.path` as this process."""
    return [sys.executable, "-P", "-c", _COMMAND, module, *sys.path]
