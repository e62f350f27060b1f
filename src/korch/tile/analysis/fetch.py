"""Chooses what reductions prefetch.

The hardware prefetches a few lines ahead of a read, and none beyond a page, which is too late for a reduction that
reads one stream from memory.
"""

from collections.abc import Mapping, Set

from korch.tile.ir.program import Load, Pass
from korch.tile.lower.buffers import LINE_BYTES

FAR_BYTES = 8 << 10
"""The distance in bytes at which lines are prefetched from memory into the L2 cache."""


def fetched_ahead(pass_: Pass, large: Set[str]) -> Mapping[str, int]:
    """Return the loads of a reduction whose iterations read consecutive lines of a large buffer, by name.

    Each has the distance, in elements, of its prefetch into the L2 cache.
    """
    if not pass_.axes:  # a window of one element, or a reduction of one
        return {}
    inner = pass_.axes[-1]
    width = next((axis.extent for axis in pass_.axes if axis.name == pass_.vector), 0)
    found: dict[str, int] = {}
    for op in pass_.ops if inner.is_reduced and inner.name != pass_.vector else ():
        if isinstance(op, Load) and op.buffer in large and not op.guards:
            step, along = (op.index.coefficient(name) for name in (inner.name, pass_.vector))
            if along == 1 and step == width and width * op.dtype.size_bytes >= LINE_BYTES:
                found[op.name] = FAR_BYTES // op.dtype.size_bytes
    return found
