"""Optional dependencies: the command that installs the packages of an extra of the distribution."""

import platform
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "korch-compiler"
"""The project's name in pip. The package that Python imports is `korch`."""


def install_command(extra: str) -> str:
    """Return a command that installs the packages of an extra, such as "torch".

    The command names the packages, not this project. So it is valid whether Korch was installed from a
    checkout, from a wheel, or from an index.
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
    return " ".join(["pip install", *wanted]) if wanted else f"there is no package of {extra!r} for this machine"
