"""A candidate that serves several sizes -> a kernel whose loops end at the elements that a size needs."""

import logging
from collections.abc import Callable
from dataclasses import replace

from korch.candidate.candidate import Candidate, Refusal
from korch.provider.faults import Fault
from korch.provider.provider import Kernel
from korch.ranges.form import SIZES
from korch.ranges.needed import live_body
from korch.ranges.served import Served
from korch.tile.ir.parameters import count_ended

logger = logging.getLogger("korch.provider")


def kernel_for_sizes(candidate: Candidate, build: Callable[[Candidate], Kernel | Refusal]) -> Kernel | Refusal:
    """Return the kernel of a candidate; a kernel that computes all elements if it can't end and need not.

    `build`: lets its provider build the kernel of a candidate whose group has extents that a size determines.
    """
    served = candidate.served
    if served is None:
        return build(candidate)
    body = live_body(candidate.group.body, served.needs, served.ends)
    if body is not candidate.group.body:
        found = build(replace(candidate, group=replace(candidate.group, body=body)))
        if isinstance(found, Fault):
            logger.warning("a kernel of %s computes all sizes: %s", candidate.provider, found, extra={"fault": True})
        if isinstance(found, Kernel) and found.counts and _ends(found, served):
            return replace(found, size_input=SIZES)
        if served.ends:
            return found if isinstance(found, Refusal) else Refusal("its reductions do not end at the size")
    return build(candidate)


def _ends(kernel: Kernel, served: Served) -> bool:
    """Return whether all reductions of a kernel end that must."""
    extents = {extent for ends in served.ends.values() for extent in ends.values()}
    names = {name for name, count in kernel.counts if not extents.isdisjoint(count.extents)}
    return kernel.program is not None and sum(map(len, served.ends.values())) <= count_ended(kernel.program, names)
