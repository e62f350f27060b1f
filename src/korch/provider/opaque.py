"""Queries on groups that the providers of opaque operators share."""

from __future__ import annotations

from collections.abc import Sequence

from korch.primitive.graph import Primitive
from korch.primitive.ops.opaque import OpaqueAttributes


def node_of(primitive: Primitive) -> OpaqueAttributes:
    """Return the ONNX node of which an opaque primitive computes one output.

    Raises:
        TypeError: the primitive is not opaque.
    """
    if not isinstance(primitive.attributes, OpaqueAttributes):
        raise TypeError(f"{primitive.op} is not opaque")
    return primitive.attributes


def is_one_node(primitives: Sequence[Primitive]) -> bool:
    """Return whether all opaque primitives compute outputs of the same node from the same inputs."""
    return len({(node_of(p).without_output, p.inputs) for p in primitives}) == 1
