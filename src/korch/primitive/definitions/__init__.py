"""Operators computed with NumPy by their definitions, in any type that their inputs have."""

import numpy as np
import onnx

from korch.primitive.definitions import images, recurrences, tensors
from korch.primitive.definitions.node import OPSET, Definition, Inputs
from korch.primitive.op import Array

DEFINITIONS: dict[str, Definition] = {**images.ROWS, **recurrences.ROWS, **tensors.ROWS}
"""The definitions by the operator's name."""


def by_definition(node: onnx.NodeProto, inputs: Inputs, opset: int) -> list[Array] | None:
    """Return a node's outputs without the omitted ones; None if its operator, or this form of it, is not here.

    `inputs`: its inputs; None for an omitted one.
    """
    definition = DEFINITIONS.get(node.op_type) if not node.domain else None
    if definition is None:
        return None
    attributes = {OPSET: opset} | {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    try:
        with np.errstate(all="ignore"):
            found = definition(inputs, attributes)
    except NotImplementedError:
        return None
    if len(found) < len(node.output):
        return None
    return [array for array, name in zip(found, node.output, strict=False) if name]


__all__ = ["DEFINITIONS", "OPSET", "by_definition"]
