"""Runs operators with bodies node by node: each node as the references of `agreed.py` agree on it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from korch.frontend.names import captured_names
from korch.primitive.agreed import agreed, opinions_of

Values = Mapping[str, Any]
RunBody = Callable[[onnx.GraphProto, Sequence[Any]], list[Any]]


def by_body(node: onnx.NodeProto, values: Values, opsets: Sequence[Any]) -> list[Any] | None:
    """Return the outputs of an If, Loop or Scan without the omitted ones; None if a node can't be computed.

    Args:
        node: the node.
        values: the values of the names that it and its bodies read.
        opsets: the opset imports of its model.
    """

    def run(graph: onnx.GraphProto, inputs: Sequence[Any]) -> list[Any]:
        known = {**values, **{tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}}
        known |= zip((item.name for item in graph.input), inputs, strict=True)
        for inner in graph.node:
            read = {name: known[name] for name in (*inner.input, *captured_names(inner)) if name}
            found = agreed(inner.op_type, opinions_of(_model(inner, read, opsets), read))
            if found is None:
                raise NotImplementedError(inner.op_type)
            known |= zip(filter(None, inner.output), found[0], strict=True)
        return [known[item.name] for item in graph.output]

    step = {"If": _branch, "Loop": _loop, "Scan": _scan}.get(node.op_type)
    given = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    try:
        found = step([values[name] if name else None for name in node.input], given, run) if step else None
    except NotImplementedError:
        return None
    return found and [value for value, name in zip(found, node.output, strict=False) if name]


def _model(node: onnx.NodeProto, read: Values, opsets: Sequence[Any]) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in read.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    return helper.make_model(helper.make_graph([node], "inner", inputs, outputs), opset_imports=opsets, ir_version=10)


def _branch(inputs: Sequence[Any], given: Values, run: RunBody) -> list[Any]:
    return run(given["then_branch" if inputs[0].item() else "else_branch"], ())


def _loop(inputs: Sequence[Any], given: Values, run: RunBody) -> list[Any]:
    trips, go, *states = inputs
    is_wanted, written = np.asarray(True if go is None else go).reshape(()), list[list[Any]]()
    while is_wanted and (trips is None or len(written) < trips.item()):
        is_wanted, *found = run(given["body"], [np.asarray(len(written), np.int64), is_wanted, *states])
        states = found[: len(states)]
        written.append(found[len(states) :])
    first = [np.asarray(0, np.int64), is_wanted, *states]
    return [*states, *_stacked(written, lambda: run(given["body"], first)[len(states) + 1 :])]


def _scan(inputs: Sequence[Any], given: Values, run: RunBody) -> list[Any]:
    count = given["num_scan_inputs"]
    states, sliced, written = [*inputs[:-count]], inputs[-count:], list[list[Any]]()
    none = [0] * len(given["body"].output)
    axes, backward = (given.get(f"scan_input_{name}", none) for name in ("axes", "directions"))
    order = [np.moveaxis(array, a, 0)[:: -1 if b else 1] for array, a, b in zip(sliced, axes, backward, strict=False)]
    for slices in zip(*order, strict=True):
        found = run(given["body"], [*states, *slices])
        states = found[: len(states)]
        written.append(found[len(states) :])
    axes, backward = (given.get(f"scan_output_{name}", none) for name in ("axes", "directions"))
    first = [*states, *(np.zeros(array.shape[1:], array.dtype) for array in order)]
    stacks = zip(_stacked(written, lambda: run(given["body"], first)[len(states) :]), axes, backward, strict=False)
    return [*states, *(np.moveaxis(stack[:: -1 if b else 1], 0, a) for stack, a, b in stacks)]


def _stacked(written: Sequence[Sequence[Any]], once: Callable[[], Sequence[Any]]) -> list[Any]:
    """Return what all iterations have written, by output; if there is none, `once` gives arrays of the shapes."""
    return [np.stack(values)[: len(written)] for values in zip(*(written or [once()]), strict=True)]
