"""Group shapes: the kinds of groups that providers ask for.

A provider lists them as `group_shapes`; without the list it gets `COMMON`. The enumeration finds the sets of
primitives that have one of the shapes. Groups of a single primitive, and of the outputs of one opaque
operator, are always passed to every provider.
"""

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
    """A kind of convex set of primitives, given by the primitives that it may contain."""

    # names of linear operations; a set has exactly one primitive of these. Sets without a linear primitive are found
    # too, since the others are grown from them.
    anchors: tuple[str, ...] = ()
    # categories of the primitives that the anchor depends on
    before: frozenset[Category] = frozenset({Category.LAYOUT})
    # categories of all other primitives
    beside: frozenset[Category] = frozenset({Category.ELEMENTWISE, Category.BROADCAST, Category.LAYOUT})
    # whether casts from 16-bit floats and from constants of bytes may also stand before the anchor
    widens: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.anchors).difference(LINEAR):
            raise ValueError(f"{', '.join(sorted(unknown))}: not linear operations; these are {', '.join(LINEAR)}")


def around(*anchors: str, widens: bool = False) -> GroupShape:
    """Return the shape of a linear primitive with layout primitives before it and elementwise primitives after it.

    `widens`: whether casts to float32, from 16-bit floats or from constants of bytes, may also stand before it.
    """
    return GroupShape(anchors, widens=widens)


FUSED = GroupShape(beside=frozenset({Category.ELEMENTWISE, Category.BROADCAST, Category.REDUCE, Category.LAYOUT}))
"""Any primitives but linear and opaque ones."""

COMMON = (FUSED, around(*LINEAR))
"""The shapes for a provider that declares none."""

Compose = Callable[[PrimitiveGraph, Sequence[Group]], Iterable[Group]]
"""Function: a graph and its groups of all shapes -> further groups, with several linear primitives."""


def shapes_of(providers: Iterable[object]) -> tuple[GroupShape | Compose, ...]:
    """Return the shapes that the providers ask for, without duplicates."""
    found = (shape for provider in providers for shape in getattr(provider, "group_shapes", COMMON))
    return tuple(dict.fromkeys(found))
