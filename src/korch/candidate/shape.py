"""The kinds of groups that providers ask for.

A provider lists them as `group_shapes`; one without the list gets `COMMON`. The enumeration grows
the sets of primitives that have one of the shapes. A group of a single primitive, or of the outputs
of one opaque operator, is always offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops import OPS

LINEAR = tuple(op.name for op in OPS.values() if op.category is Category.LINEAR)
"""The names of all linear operations."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Convex sets of primitives, by what they may consist of.

    Attributes:
        anchors: names of linear operations, of which a set has exactly one primitive. Sets without
            a linear primitive are found too: the others are grown from them.
        before: categories of the primitives that the anchor depends on.
        beside: categories of all other primitives.
        widens: whether casts from 16-bit floats and from constants of bytes may also stand before the anchor.
    """

    anchors: tuple[str, ...] = ()
    before: frozenset[Category] = frozenset({Category.LAYOUT})
    beside: frozenset[Category] = frozenset({Category.ELEMENTWISE, Category.BROADCAST, Category.LAYOUT})
    widens: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.anchors).difference(LINEAR):
            raise ValueError(f"{', '.join(sorted(unknown))}: not linear operations; these are {', '.join(LINEAR)}")


def around(*anchors: str, widens: bool = False) -> GroupShape:
    """Return the shape of a linear primitive with moves before it and elementwise steps after.

    Args:
        anchors: names of linear operations.
        widens: whether casts from 16-bit floats may also stand before it.
    """
    return GroupShape(anchors, widens=widens)


FUSED = GroupShape(beside=frozenset({Category.ELEMENTWISE, Category.BROADCAST, Category.REDUCE, Category.LAYOUT}))
"""Any primitives but linear and opaque ones."""

COMMON = (FUSED, around(*LINEAR))
"""What a provider is offered that declares no shapes."""

Compose = Callable[[PrimitiveGraph, Sequence[Group]], Iterable[Group]]
"""From a graph and its groups of all shapes to further groups, of several linear primitives."""


def shapes_of(providers: Iterable[object]) -> tuple[GroupShape | Compose, ...]:
    """Return the shapes that some providers ask for, each once."""
    found = (shape for provider in providers for shape in getattr(provider, "group_shapes", COMMON))
    return tuple(dict.fromkeys(found))
