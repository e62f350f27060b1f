"""Providers that make some of the offers of another provider."""

from collections.abc import Sequence
from itertools import count

from korch.candidate.candidate import Group, Offer, Refusal
from korch.provider.provider import Kernel, Provider
from korch.target import Target


class InTurn:
    """Makes one of a provider's offers for each group, so that offers and groups vary together."""

    def __init__(self, provider: Provider[Target, Kernel]) -> None:
        self.provider, self.name = provider, provider.name
        self._turn = count()

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Return the first offer for the first group, the second offer for the second group, and so on."""
        offers = self.provider.offer(group, target)
        return offers if isinstance(offers, Refusal) else [offers[next(self._turn) % len(offers)]]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return the kernel that the wrapped provider builds."""
        return self.provider.build(group, offer, target)


class OnUnits(InTurn):
    """Makes a provider's offers whose products are of components, on matrix units."""

    def offer(self, group: Group, target: Target) -> Sequence[Offer]:
        """Return these offers; none if the provider makes none for the group."""
        offers = self.provider.offer(group, target)
        return [] if isinstance(offers, Refusal) else [offer for offer in offers if offer.pairs]
