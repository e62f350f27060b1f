"""Decides which kernels can run on a team: a set of threads that are already running.

Teams run consecutive kernels of a plan (`korch_plan.c`).
"""

from korch.candidate.candidate import Refusal
from korch.provider.provider import Kernel, Threading


def team_refusal(kernel: Kernel) -> Refusal | None:
    """Return why a kernel that was built for the team's number of threads can't run on a team; None if it can."""
    if kernel.has_state:
        return Refusal("a kernel with a state may have threads of its own")
    if kernel.threading is Threading.OWN:
        return Refusal("the kernel has threads of its own")
    return None
