"""Kernels that write rows at computed positions of another value (`write_rows`)."""

import math
from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.ops.state import WriteAttributes
from korch.provider.content import content_version
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.tile_kernel import comment_of
from korch.target import Target
from korch.tile.llvm.constants import Constants


class StateProvider:
    """Writes rows into the memory of a state; of any other value, into a copy of it.

    It is not registered as an entry point, because the executable must handle such offers specially. The
    meter of its target adds it.
    """

    name = "state"
    version = content_version()
    group_shapes = ()

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer to write rows in plain layouts."""
        attributes = _attributes(group)
        if attributes is None:
            return Refusal("only rows that replace those of another value")
        if group.body.primitives[0].inputs != tuple(value for _, value in group.body.inputs):
            return Refusal("an operand is a constant, or is read twice")
        return [Offer(*group.plain_layouts, updates=attributes.is_state)]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return the kernel, which calls `korch_rows.c`."""
        attributes = _attributes(group)
        if attributes is None:
            raise AssertionError("no offer was made")
        whole, rows = group.input_types[:2]
        axis, shape = attributes.axis, whole.shape
        row_bytes = math.prod(shape[axis + 1 :]) * whole.dtype.size_bytes
        numbers = (math.prod(shape[:axis]), shape[axis], rows.shape[axis], row_bytes, int(attributes.is_checked))
        made = Constants(target.isa)
        text = made.kernel("korch_rows", [f"i64 {n}" for n in numbers], ("run",), comment_of(group, offer))
        return named_kernel(text, threading=Threading.CALLER)


def _attributes(group: Group) -> WriteAttributes | None:
    """Return the attributes of a group that only writes rows; None for any other."""
    body = group.body.primitives
    found = body[0].attributes if len(body) == 1 else None
    return found if isinstance(found, WriteAttributes) else None
