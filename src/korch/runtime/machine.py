"""The requirements of built kernels on the machine that runs them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from korch.errors import ArtifactError
from korch.target import REQUIRED_FLAGS


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of a library on the machine that runs it.

    Attributes:
        system: the operating system, as `sys.platform` names it.
        machine: the architecture, as `uname -m` names it.
        cpu_flags: flags of /proc/cpuinfo that the CPU must have.
    """

    system: str
    machine: str
    cpu_flags: tuple[str, ...]

    @staticmethod
    def here(cpu_flags: Sequence[str]) -> Requirements:
        """Return the requirements of a library that was built here with these CPU flags."""
        return Requirements(sys.platform, platform.machine(), tuple(sorted(set(cpu_flags))))

    def check(self) -> None:
        """Check that this machine can run the library.

        Raises:
            ArtifactError: it can't.
        """
        found = Requirements(sys.platform, platform.machine(), ())
        if (self.system, self.machine) != (found.system, found.machine):
            raise ArtifactError(
                f"it was built for {self.system} on {self.machine}, this is {found.system} on {found.machine}",
                hint="Build it on a machine of this kind",
            )
        if missing := sorted(set(self.cpu_flags) - cpu_flags()):
            raise ArtifactError(
                f"it was built for a CPU with {', '.join(missing)}, which this CPU lacks",
                hint="Build it on this machine",
            )


def best_isa(built: Collection[str]) -> str:
    """Return the best instruction set that this CPU has, of those for which something was built.

    Raises:
        ArtifactError: it has none of them.
    """
    for isa, needed in REQUIRED_FLAGS.items():
        if isa in built and cpu_flags().issuperset(needed):
            return isa
    raise ArtifactError(
        f"it has kernels for {', '.join(sorted(built)) or 'no CPU'}, which this CPU can't run",
        hint="Build it on this machine",
    )


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU in /proc/cpuinfo; an empty set if there is no such file."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(flags.split())
    return frozenset()
