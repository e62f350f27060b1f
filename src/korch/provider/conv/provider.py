"""The provider of generated convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import around
from korch.provider.content import content_version
from korch.provider.conv.bytes import ByteConvolutions, multiplies_bytes
from korch.provider.conv.matrix_units import split_plans
from korch.provider.conv.vectors import OfferPlan, plans_of
from korch.provider.provider import Kernel
from korch.ranges.live import count_of
from korch.target import Target


class ConvProvider:
    """Makes kernels for groups around one convolution."""

    name = "conv"
    version = content_version("provider/conv")
    group_shapes = (around("conv", widens=True),)

    def __init__(self) -> None:
        """Begin without plans; plans that `offer` makes are cached for `build`."""
        self._plans: dict[tuple[str, Target, bool], tuple[OfferPlan, ...] | Refusal] = {}
        self._bytes = ByteConvolutions()

    def __reduce__(self) -> tuple[type[ConvProvider], tuple[()]]:
        """Leave the plans out of copies for other processes."""
        return ConvProvider, ()

    def _windows(self, group: Group, target: Target) -> tuple[OfferPlan, ...] | Refusal:
        """Return the ways to compute a group with one float convolution by a tile program."""
        is_live = any(count_of(n) for type_ in group.body.types for n in type_.shape)
        key = (group.key, target, is_live)
        if key not in self._plans:
            plans = plans_of(group, target)
            self._plans[key] = plans if isinstance(plans, Refusal) else (*plans, *split_plans(group, target))
        return self._plans[key]

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer blocked and channels-last layouts, with rows or channels divided among the threads."""
        if multiplies_bytes(group):
            return self._bytes.offers(group, target)
        plans = self._windows(group, target)
        if isinstance(plans, Refusal):
            return plans
        return tuple(plan.offer for plan in plans)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        if multiplies_bytes(group):
            return self._bytes.build(group, offer, target)
        whole = self._plans.get((group.key, target, False), ())
        plans = (self._windows(group, target), whole)  # blocks for a part may have other layouts of weights
        found = [plan for own in plans if not isinstance(own, Refusal) for plan in own if plan.offer == offer]
        return found[0].kernel(group, target) if found else Refusal("this was not offered")
