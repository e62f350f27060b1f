"""Errors that providers raise: each is a bug of the provider, and excludes one group, not the model.

The first error of a kind is logged as a warning. All of them are counted for the report.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import Compose
from korch.errors import ProviderError
from korch.primitive.graph import PrimitiveGraph
from korch.provider.provider import Provider

logger = logging.getLogger("korch.provider")

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Fault(Refusal):
    """The refusal of a group for which a provider raised an error."""


@dataclass
class Faults:
    """The errors that providers raised in one search."""

    groups: dict[str, list[str]] = field(default_factory=dict)  # the groups of each error, by its text

    def offers(self, provider: Provider[T, K], group: Group, target: T) -> Sequence[Offer] | Refusal:
        """Return what a provider offers for a group; a refusal if it raises an error or its answer is invalid."""

        def ask() -> Sequence[Offer] | Refusal:
            answer = provider.offer(group, target)
            return answer if isinstance(answer, Refusal) else _checked(tuple(answer), group)

        return self.survive(provider.name, group, ask)

    def kernel(self, provider: Provider[T, K], group: Group, offer: Offer, target: T) -> K | Refusal:
        """Return the kernel that a provider builds for an offer; a refusal if it raises an error or gives None."""

        def build() -> K | Refusal:
            built = provider.build(group, offer, target)
            if built is None:
                raise ProviderError("it builds None", expected="a kernel or a Refusal")
            return built

        return self.survive(provider.name, group, build)

    def composed(self, provider: str, compose: Compose) -> Compose:
        """Return a provider's function for further groups, which gives none if it raises an error."""

        def run(graph: PrimitiveGraph, groups: Sequence[Group]) -> Iterable[Group]:
            try:
                yield from compose(graph, groups)
            except Exception as error:  # noqa: BLE001 - whatever a provider does wrong
                self._add(provider, "groups of its own", error)

        return run

    def survive(self, provider: str, group: Group, call: Callable[[], R]) -> R | Fault:
        """Return the result of a call for a group; a refusal with the error if it raises one."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - whatever a provider does wrong
            operations = ", ".join(primitive.op for primitive in group.body.primitives) or "a change of layout"
            types = ", ".join(map(str, group.input_types)) or "no input"
            return self._add(provider, f"{operations} on {types}", error)

    def counts(self) -> dict[str, int]:
        """Return the number of groups of each error, by its text with the first group."""
        return {f"{text} for {groups[0]}": len(groups) for text, groups in self.groups.items()}

    def _add(self, provider: str, group: str, error: Exception) -> Fault:
        if isinstance(error, MemoryError):
            raise error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
        reason = f"it raised {type(error).__name__} ({error}) at {where}"
        text = f"provider {provider!r}: {reason}"
        if text not in self.groups:
            logger.warning("%s for %s; it gets no kernel there", text, group, extra={"fault": True})
            logger.info("provider %r failed", provider, exc_info=error)
        self.groups.setdefault(text, []).append(group)
        return Fault(reason)


def _checked(offers: tuple[Offer, ...], group: Group) -> tuple[Offer, ...]:
    """Return a provider's offers; raise an error if one is not an offer for the group."""
    ranks = [[type_.rank for type_ in types] for types in (group.input_types, group.output_types)]
    for offer in offers:
        if not isinstance(offer, Offer):
            raise ProviderError(f"it offers {offer!r}", expected="Offers or a Refusal")
        if [[len(layout.order) for layout in layouts] for layouts in (offer.inputs, offer.outputs)] != ranks:
            raise ProviderError("an offer's layouts do not fit the group", expected=f"layouts of ranks {ranks}")
        if min(offer.work_flop, offer.pairs, offer.vector_flop) < 0:
            raise ProviderError("an offer has a negative number of operations")
    return offers
