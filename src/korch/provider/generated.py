"""Kernels that Korch generates itself: for groups without linear and opaque primitives, and for operators of `WHOLE`.

The group is lowered to a tile program and printed as LLVM IR.
"""

from collections.abc import Callable, Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import FUSED
from korch.primitive.op import Category
from korch.provider.content import content_version
from korch.provider.elements import elements_program, gather_program, offer_elements
from korch.provider.offers import offered_layouts
from korch.provider.opaque import operator_of
from korch.provider.provider import Kernel
from korch.provider.running import offer_running, running_program
from korch.provider.tile_kernel import kernel_of
from korch.provider.top import offer_top, top_program
from korch.target import Target
from korch.tile.ir.growth import TextLimitError, grows_too_large
from korch.tile.ir.program import TileProgram
from korch.tile.llvm.arithmetic import KIND
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine

LEAST_STREAM_BYTES = 16 << 20
"""Outputs of fewer bytes are always written through the caches, however small the caches are."""


Offered = Callable[[Group, Target], tuple[Offer, ...] | Refusal]

Lowered = Callable[[Group, Machine, str], TileProgram]
"""Returns the program of an offer, given its variant."""

WHOLE: dict[str, tuple[Offered, Lowered]] = {
    "TopK": (offer_top, top_program),
    "Gather": (offer_elements, gather_program),
    "GatherElements": (offer_elements, elements_program),
    "CumSum": (offer_running, running_program),
    "CumProd": (offer_running, running_program),
}
"""The offers and the program of each operator that has kernels although it is not split."""


def stream_bytes(target: Target, least_bytes: int = LEAST_STREAM_BYTES) -> int:
    """Return the size from which on outputs are written with non-temporal stores, which bypass the caches.

    Such outputs are far larger than the cores' private caches. Whether the next kernel would find
    them in the shared cache is unknown, because other processes may use that cache too.
    """
    return max(least_bytes, 4 * target.l2_bytes * target.threads)


class GeneratedProvider:
    """Korch's own kernel generator."""

    name = "generated"
    version = content_version()
    group_shapes = (FUSED,)

    def __init__(self, least_stream_bytes: int = LEAST_STREAM_BYTES) -> None:
        """Write outputs smaller than `least_stream_bytes` through the caches."""
        self.least_stream_bytes = least_stream_bytes

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the group in each suitable layout."""
        if (operator := operator_of(group.body.primitives)) in WHOLE:
            return WHOLE[operator][0](group, target)
        for primitive in group.body.primitives:
            if primitive.row.category in (Category.LINEAR, Category.OPAQUE):
                return Refusal(f"{primitive.op} is not generated")
        for type_ in group.body.types:
            if type_.dtype not in KIND:
                return Refusal(f"elements of type {type_.dtype.value} are not generated")
        if grows_too_large(group.body):
            return Refusal("its text would be too long")
        return [
            Offer(inputs, outputs, is_loop_nest=True)
            for inputs, outputs in dict.fromkeys(offered_layouts(group, target.lanes))
        ]

    def program(self, group: Group, offer: Offer, machine: Machine) -> TileProgram:
        """Return the tile program that an offer stands for.

        Raises:
            TextLimitError: the kernel's source would be too long.
        """
        if (operator := operator_of(group.body.primitives)) in WHOLE:
            return WHOLE[operator][1](group, machine, offer.variant)
        return lower(group.body, offer.inputs, offer.outputs, machine)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Lower and print the group."""
        try:
            program = self.program(group, offer, Machine.of(target))
            return kernel_of(program, group, offer, target, stream_bytes=stream_bytes(target, self.least_stream_bytes))
        except TextLimitError as error:
            return Refusal(str(error))
