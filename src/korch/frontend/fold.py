"""Folds nodes whose inputs are all known, and that are not split into primitives, by references that agree."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from korch import fission
from korch.errors import UnsupportedError
from korch.frontend.infer import static_type
from korch.frontend.names import node_label
from korch.frontend.operator import Operator
from korch.primitive.agreed import agreed, opinions_of
from korch.primitive.dispute import Dispute, note, noted_disputes
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

# Larger results are computed at run time, because a constant must be stored and loaded.
LIMIT_BYTES = 1 << 28


def constant_of(node: onnx.NodeProto) -> Array | None:
    """Return the elements of a Constant node; None if they are sparse."""
    (attribute,) = node.attribute
    if attribute.name == "sparse_value":
        return None
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        array: Array = onnx.numpy_helper.to_array(value)
        return array
    if attribute.name.startswith("value_float"):
        return np.asarray(value, np.float32)
    if attribute.name.startswith("value_int"):
        return np.asarray(value, np.int64)
    texts = value if isinstance(value, list) else [value]
    decoded = np.array([text.decode("utf-8", "replace") for text in texts], object)
    return decoded if isinstance(value, list) else decoded.reshape(())


def evaluate(
    node: onnx.NodeProto,
    opsets: Mapping[str, int],
    arrays: Mapping[str, Array],
    types: Mapping[str, onnx.TypeProto] | None = None,
) -> Sequence[Array] | None:
    """Return a node's outputs, or None if no reference computes them, or if references differ and none is in majority.

    Args:
        node: a NodeProto that reads constants only.
        opsets: the version of each domain.
        arrays: its inputs by name.
        types: the types of its outputs, if they are known.
    """
    named = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(arrays[name].dtype), arrays[name].shape
        )
        for name in named
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    for item in outputs:
        if types is not None and item.name in types:
            item.type.CopyFrom(types[item.name])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "fold", inputs, outputs),
        opset_imports=[onnx.helper.make_opsetid(*item) for item in opsets.items()],
        ir_version=8,
    )
    with noted_disputes() as disputes:
        found = agreed(node_label(node), opinions_of(model, {name: arrays[name] for name in named}))
    if found is None or not all(dispute.is_decided for dispute in disputes.values()):
        return None
    if any(isinstance(item, list | dict) or item is None for item in found[0]):
        return None
    if len(found[1]) == 1:
        note(Dispute(node_label(node), found[1], (), 0.0))
    results = iter(found[0])
    return [np.asarray(next(results)) if name else np.zeros(0) for name in node.output]


def evaluate_split(
    operator: Operator, types: Mapping[str, onnx.TypeProto], arrays: Mapping[str, Array], model: str
) -> Sequence[Array] | None:
    """Return an operator's outputs, computed by primitives; None if there are none for it or for its types.

    `arrays`: its inputs by name.
    """
    try:
        found = {name: static_type(types.get(name), name, operator.node, model) for name in operator.outputs if name}
        given = {
            name: ValueType(tuple(arrays[name].shape), DType.of(arrays[name].dtype)) for name in operator.inputs if name
        }
    except (UnsupportedError, KeyError):
        return None
    return fission.evaluate(operator, {**given, **found}, arrays)
