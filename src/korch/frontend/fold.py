"""Folds nodes whose inputs are all known, and that are not split into primitives, by ONNX's reference evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from korch.primitive.op import Array

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


def evaluate(node: onnx.NodeProto, opsets: Mapping[str, int], arrays: Mapping[str, Array]) -> Sequence[Array] | None:
    """Return a node's outputs, or None if the evaluator can't compute them.

    Args:
        node: a NodeProto that reads constants only.
        opsets: the version of each domain.
        arrays: its inputs by name.
    """
    named = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(arrays[name].dtype), arrays[name].shape
        )
        for name in named
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "fold", inputs, outputs),
        opset_imports=[onnx.helper.make_opsetid(*item) for item in opsets.items()],
    )
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = ReferenceEvaluator(model).run(None, {name: arrays[name] for name in named})
        except Exception:  # noqa: BLE001 - foreign code; the node then stays as it is
            return None
    if any(isinstance(item, list | dict) or item is None for item in found):
        return None
    results = iter(found)
    return [np.asarray(next(results)) if name else np.zeros(0) for name in node.output]
