"""Which kernels can work as a team, on threads that wait for their regions in a region around them.

`korch_teams.h` runs such kernels: those of a plan that follow each other, and those of a lane.
"""

from __future__ import annotations

import re

from korch.candidate.candidate import Refusal
from korch.provider.provider import Kernel
from korch.target import Target

_DIRECTIVE = re.compile(r"#\s*pragma\s+omp\s+(.*)")
_TEAM_DIRECTIVE = re.compile(
    r"barrier|(parallel|for|parallel for)"
    r"(\s+((num_threads|if) ?\(([^()]|\([^()]*\))*\)|schedule\(static\)|nowait))*\s*"
)


def team_refusal(kernel: Kernel, target: Target) -> Refusal | None:
    """Return why a kernel can't work as a team, if so.

    Args:
        kernel: built for as many threads.
        target: the machine.
    """
    if "clang" in target.compiler.lower():
        return Refusal("only the regions of GCC's OpenMP can be given to a team")
    if kernel.has_state or kernel.libraries:
        return Refusal("a kernel with a state or a library may have threads of its own")
    for directive in omp_directives(kernel.source):
        if not _TEAM_DIRECTIVE.fullmatch(directive):
            return Refusal(f"a team does not know 'omp {directive}'")
    return None


def omp_directives(source: str) -> list[str]:
    """Return what stands behind `#pragma omp` in a source."""
    return _DIRECTIVE.findall(source)
