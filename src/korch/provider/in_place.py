"""Concatenations for which no kernel runs: the operands' kernels write directly into the result's memory.

This is possible if each operand is a contiguous part of the result in the chosen layout. Other uses of an
operand's memory are not checked here: `korch.search.instance` leaves out operands that have memory of their
own, and the integer program lets each operand be a part of at most one result.
"""

from collections.abc import Sequence
from itertools import accumulate

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import layout_choices
from korch.primitive.ops.layout import ConcatAttributes
from korch.provider.content import content_version
from korch.provider.provider import Kernel
from korch.system.alignment import ALIGNMENT
from korch.target import Target


class InPlaceProvider:
    """Offers a concatenation at no cost.

    It is not registered as an entry point, because the executable must handle such offers specially. The
    meter of its target adds it.
    """

    name = "in place"
    version = content_version()
    group_shapes = ()

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer a concatenation in each layout that stores the operands one after another."""
        body = group.body
        attributes = body.primitives[0].attributes if len(body.primitives) == 1 else None
        if not isinstance(attributes, ConcatAttributes):
            return Refusal("only a concatenation is done in place")
        operands = tuple(value for _, value in body.inputs)
        if operands != body.primitives[0].inputs or group.constant_inputs:
            return Refusal("a concatenation of constants, or of a value twice, is not in place")
        offers = []
        types, axis = group.input_types, attributes.axis
        for layout in layout_choices(group.output_types[0], target.lanes):
            own = tuple(layout.normalized(type_.shape) for type_ in types)
            if not all(found in layout_choices(type_, target.lanes) for found, type_ in zip(own, types, strict=True)):
                continue
            sizes = [found.size_bytes(t) for found, t in zip(own, types, strict=True)]
            # Kernels may rely on buffers aligned to 64 bytes, and vectors that cross cache lines are slow.
            is_aligned = not any(end % ALIGNMENT for end in accumulate(sizes[:-1]))
            if is_aligned and layout.lays_end_to_end([type_.shape for type_ in types], axis):
                offers.append(Offer(own, (layout,), is_in_place=True))
        return offers or Refusal("the operands are not aligned parts of the result")

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return an empty kernel: nothing runs."""
        return Kernel("", "")
