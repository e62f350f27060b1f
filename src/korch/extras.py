"""Optional dependencies: the command that installs what an extra of the distribution needs."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "korch-compiler"
"""The project's name for pip. The package that Python imports is `korch`."""


def install_command(extra: str) -> str:
    """Return a command that installs the packages of an extra, such as "torch".

    It names the packages themselves, not this project, so it is right for an installation from a
    checkout, from a wheel, and from an index.
    """
    try:
        requirements = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:  # the sources are on Python's path, but not installed
        return f"pip install '.[{extra}]' in a checkout of Korch"
    here = {"extra": extra, "sys_platform": sys.platform, "platform_machine": platform.machine()}
    wanted = []
    for text in requirements:
        package, _, marker = text.partition(";")
        conditions = dict(re.findall(r"""(\w+) == ["']([^"']+)""", marker))
        if "extra" in conditions and conditions.items() <= here.items():
            wanted.append(shlex.quote(package.strip()))
    return " ".join(["pip install", *wanted])
