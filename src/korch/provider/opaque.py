"""What the providers of opaque operators ask of a group."""

from __future__ import annotations

from collections.abc import Sequence

from korch.primitive.graph import Primitive
from korch.primitive.ops.opaque import OpaqueAttributes


def node_of(primitive: Primitive) -> OpaqueAttributes:
    """Return the node that an opaque primitive computes an output of.

    Raises:
        TypeError: it is not opaque.
    """
    if not isinstance(primitive.attributes, OpaqueAttributes):
        raise TypeError(f"{primitive.op} is not opaque")
    return primitive.attributes


def is_one_node(primitives: Sequence[Primitive]) -> bool:
    """Whether opaque primitives compute outputs of one node, of the same inputs."""
    return len({(node_of(p).node_alone, p.inputs) for p in primitives}) == 1
