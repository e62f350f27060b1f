"""Queries on groups that the providers of opaque operators share."""

from collections.abc import Sequence

import onnx

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


def operator_of(primitives: Sequence[Primitive]) -> str:
    """Return the name of the ONNX operator that all primitives compute outputs of; "" if there is none."""
    if not primitives or any(not isinstance(p.attributes, OpaqueAttributes) for p in primitives):
        return ""
    node = node_of(primitives[0])
    return node.op_type if not node.domain and is_one_node(primitives) else ""


def attributes_of(node: OpaqueAttributes) -> dict[str, int]:
    """Return the integer attributes that a node has."""
    attributes = onnx.NodeProto.FromString(bytes.fromhex(node.node)).attribute
    return {item.name: item.i for item in attributes}
