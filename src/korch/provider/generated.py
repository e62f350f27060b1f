"""Kernels that Korch generates itself: for groups without linear and opaque primitives, and for operators of `WHOLE`.

The group is lowered to a tile program and printed as C++. Groups with matrix products are only run by programs
that the superoptimizer finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.candidate.shape import FUSED, Compose, GroupShape
from korch.primitive.op import Category
from korch.provider.content import content_version
from korch.provider.elements import elements_program, offer_elements
from korch.provider.offers import keeps_some, offered_layouts
from korch.provider.opaque import operator_of
from korch.provider.provider import Kernel
from korch.provider.running import offer_running, running_program
from korch.provider.tile_kernel import kernel_of
from korch.provider.top import offer_top, top_program
from korch.superopt.find import Finder, FoundProgram
from korch.target import Target
from korch.tile.cpp.text import C_TYPE
from korch.tile.ir.growth import TextLimitError, grows_too_large
from korch.tile.ir.program import TileProgram
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine

FOUND = "found"
"""The variant of an offer of a found program is this word and the program's hash."""

LEAST_STREAM_BYTES = 16 << 20
"""Outputs of fewer bytes are always written through the caches, however small the caches are."""


WHOLE: dict[str, tuple[Callable[[Group], tuple[Offer, ...] | Refusal], Callable[[Group, Machine], TileProgram]]] = {
    "TopK": (offer_top, top_program),
    "GatherElements": (offer_elements, elements_program),
    "CumSum": (offer_running, running_program),
    "CumProd": (offer_running, running_program),
}
"""The offers and the program of each operator that has kernels although it is not split."""


class GeneratedProvider:
    """Korch's own kernel generator."""

    name = "generated"
    version = content_version("superopt")

    def __init__(self, least_stream_bytes: int = LEAST_STREAM_BYTES, finder: Finder | None = None) -> None:
        """Write outputs smaller than `least_stream_bytes` through the caches; find programs with the finder, if any."""
        self.least_stream_bytes = least_stream_bytes
        self.finder = finder

    @property
    def group_shapes(self) -> tuple[GroupShape | Compose, ...]:
        """The kinds of groups that the provider wants to be asked about."""
        return (FUSED,) if self.finder is None else (FUSED, self.finder.groups)

    def stream_bytes(self, target: Target) -> int:
        """Return the size from which on outputs are written with non-temporal stores, which bypass the caches.

        Such outputs are far larger than the cores' private caches. Whether the next kernel would find
        them in the shared cache is unknown, because other processes may use that cache too.
        """
        return max(self.least_stream_bytes, 4 * target.l2_bytes * target.threads)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the group in each suitable layout, and the programs that the superoptimizer found for it."""
        if self.finder is not None and group.body.linear:
            return self._found(group, self.finder)
        if (operator := operator_of(group.body.primitives)) in WHOLE:
            return WHOLE[operator][0](group)
        for primitive in group.body.primitives:
            if primitive.row.category in (Category.LINEAR, Category.OPAQUE):
                return Refusal(f"{primitive.op} is not generated")
        for type_ in group.body.types:
            if type_.dtype not in C_TYPE:
                return Refusal(f"elements of type {type_.dtype.value} are not generated")
        if grows_too_large(group.body):
            return Refusal("its text would be too long")
        found = [] if self.finder is None else self._offers(group, self.finder)
        return [
            Offer(inputs, outputs, variant, is_loop_nest=True)
            for inputs, outputs in dict.fromkeys(offered_layouts(group, target.lanes))
            for variant in (("", "keep") if keeps_some(group) else ("",))
        ] + found

    def _found(self, group: Group, finder: Finder) -> Sequence[Offer] | Refusal:
        """Offer the programs found for a group; they may read constant matrices packed in panels."""
        products = group.body.linear
        if len(products) == 1 and not any(p.row.category is Category.REDUCE for p in group.body.primitives):
            return Refusal("a product alone is made by other providers")
        reason = finder.find(group).reason or "no program is found for it"
        return tuple(self._offers(group, finder)) or Refusal(reason)

    def _offers(self, group: Group, finder: Finder) -> list[Offer]:
        offers = []
        for found in finder.find(group).programs:
            inputs = list(group.plain_layouts[0])
            for position, columns in found.packed:
                rank = group.input_types[position].rank
                order = (*range(rank - 2), rank - 1, rank - 2)
                inputs[position] = Layout(order, ((rank - 1, columns),))
            variant, found_ns = f"{FOUND} {found.name}", max(1, round(found.estimate_ns))
            offers.append(Offer(tuple(inputs), group.plain_layouts[1], variant, found_ns=found_ns))
        return offers

    def found(self, group: Group, offer: Offer) -> FoundProgram | None:
        """Return the found program that an offer stands for, or None if it stands for a lowered one."""
        if self.finder is None or not offer.variant.startswith(FOUND):
            return None
        programs = {found.name: found for found in self.finder.find(group).programs}
        return programs[offer.variant.removeprefix(FOUND).strip()]

    def program(self, group: Group, offer: Offer, machine: Machine) -> TileProgram:
        """Return the tile program that an offer stands for.

        Raises:
            TextLimitError: the kernel's source would be too long.
        """
        found = self.found(group, offer)
        if found is not None:
            return found.program
        if (operator := operator_of(group.body.primitives)) in WHOLE:
            return WHOLE[operator][1](group, machine)
        return lower(group.body, offer.inputs, offer.outputs, machine, offer.variant == "keep")

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Lower and print the group."""
        machine = Machine.of(target)
        found = self.found(group, offer)
        remark = "" if found is None else "\nfound:\n" + "\n".join(found.steps) + "\n" + found.text
        try:
            program = self.program(group, offer, machine)
            return kernel_of(program, group, offer, target, stream_bytes=self.stream_bytes(target), remark=remark)
        except TextLimitError as error:
            return Refusal(str(error))
