"""Kernels that Korch writes itself: any group without a linear or an opaque primitive.

The group is lowered to a tile program and printed as C++.
"""

from __future__ import annotations

from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import FUSED
from korch.primitive.op import Category
from korch.provider.content import content_version
from korch.provider.offers import keeps_some, offered_layouts
from korch.provider.provider import Kernel, Threading
from korch.target import Target
from korch.tile.cpp import print_cpp
from korch.tile.cpp_text import C_TYPE
from korch.tile.growth import TextLimitError, grows_too_large
from korch.tile.lower import lower
from korch.tile.staging import Machine

LEAST_STREAM_BYTES = 16 << 20
"""Outputs of fewer bytes are not written past the caches, however small these are."""


class GeneratedProvider:
    """Korch's own kernel generator."""

    name = "generated"
    version = content_version()
    group_shapes = (FUSED,)

    def __init__(self, least_stream_bytes: int = LEAST_STREAM_BYTES) -> None:
        """Write smaller outputs than `least_stream_bytes` to the caches on any target."""
        self.least_stream_bytes = least_stream_bytes

    def stream_bytes(self, target: Target) -> int:
        """Return from which size on outputs are written past the caches.

        They are far larger than the cores' own caches then. Whether the next kernel would find them
        in the shared one is unknown: other processes may use it too.
        """
        return max(self.least_stream_bytes, 4 * target.l2_bytes * target.threads)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the group in each layout that suits it."""
        for primitive in group.body.primitives:
            if primitive.row.category in (Category.LINEAR, Category.OPAQUE):
                return Refusal(f"{primitive.op} is not generated")
        for type_ in group.body.types:
            if type_.dtype not in C_TYPE:
                return Refusal(f"elements of type {type_.dtype.value} are not generated")
        if grows_too_large(group.body):
            return Refusal("its text would be too long")
        return [
            Offer(inputs, outputs, variant, is_loop_nest=True)
            for inputs, outputs in dict.fromkeys(offered_layouts(group, target.lanes))
            for variant in (("", "keep") if keeps_some(group) else ("",))
        ]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Lower and print the group."""
        machine = Machine(target.lanes, target.threads)
        keeps = offer.variant == "keep"
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        comment = f"{group.text}layouts {layouts}"
        try:
            program = lower(group.body, offer.inputs, offer.outputs, machine, keeps)
            printed = print_cpp(program, comment, target.lanes, target.threads, self.stream_bytes(target))
        except TextLimitError as error:
            return Refusal(str(error))
        threading = Threading.TEAM if printed.is_parallel else Threading.CALLER
        return Kernel(printed.symbol, printed.source, workspace_bytes=printed.workspace_bytes, threading=threading)
