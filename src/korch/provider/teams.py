"""Which kernels can run as a team: on threads that a surrounding region already has.

`korch_teams.h` runs such kernels: consecutive ones of a plan, and those of a lane.
"""

from __future__ import annotations

from korch.candidate.candidate import Refusal
from korch.provider.provider import Kernel, Threading
from korch.target import Target


def team_refusal(kernel: Kernel, target: Target) -> Refusal | None:
    """Return why a kernel can't run as a team, or None if it can.

    Args:
        kernel: built for the team's number of threads.
        target: the machine.
    """
    if "clang" in target.compiler.lower():
        return Refusal("only the regions of GCC's OpenMP can be given to a team")
    if kernel.has_state or kernel.libraries:
        return Refusal("a kernel with a state or a library may have threads of its own")
    if kernel.threading is Threading.OWN:
        return Refusal("the kernel has threads of its own")
    return None
