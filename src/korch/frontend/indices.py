"""Checks of constant indices and sizes, and the limits of inputs that are indices.

Without these checks an index out of range would be detected when the model runs, if at all, and a
negative size would make ONNX's inference report that the shape depends on data.
"""

from collections.abc import Collection, Mapping

import numpy as np
import onnx

from korch.errors import ModelError
from korch.frontend.operator import OperatorGraph
from korch.primitive.op import Array
from korch.primitive.types import ValueType

# Operators whose second input has indices along one axis of the first, by default axis 0.
_ALONG_AXIS = frozenset({"Gather", "GatherElements", "ScatterElements", "Scatter"})
_LEADING = frozenset({"GatherND", "ScatterND"})  # indices along the leading axes
# Operators of PyTorch that take no negative indices.
_POSITIVE = frozenset({"aten.embedding.default", "aten.gather.default", "aten.index_select.default"})
# Operators whose result has the elements of their first input, perhaps as another integer type.
_MOVES = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def check_elements(
    node: onnx.NodeProto, types: Mapping[str, ValueType], constants: Mapping[str, Array], where: str
) -> None:
    """Refuse constant indices that are out of range for the first input, and negative sizes.

    Raises:
        ModelError: an element is out of range.
    """
    if node.domain not in ("", "ai.onnx") or len(node.input) < 2 or node.input[1] not in constants:
        return
    first, given = node.input[0], constants[node.input[1]]
    shape = types[first].shape if first in types else np.shape(constants.get(first, ()))
    attributes = {item.name: item.i for item in node.attribute}
    if node.op_type in _ALONG_AXIS:
        axis = attributes.get("axis", 0)
        if -len(shape) <= axis < len(shape):
            _check(given, np.array([shape[axis]]), f"axis {axis}", where)
    elif node.op_type in _LEADING and given.ndim:
        begin = attributes.get("batch_dims", 0)
        sizes = shape[begin : begin + given.shape[-1]]
        if len(sizes) == given.shape[-1]:
            _check(given, np.array(sizes, np.int64), f"axes of {list(sizes)}", where)
    elif node.op_type == "Expand" and given.size and given.min() < 0:
        raise ModelError(f"its shape is {given.tolist()}", where, "sizes of at least 0")


def _check(indices: Array, sizes: Array, what: str, where: str) -> None:
    indices = np.atleast_1d(indices)
    outside = (indices < -sizes) | (indices >= sizes)
    if outside.any():
        wrong = indices[outside].flat[0]
        size = int((sizes + np.zeros_like(indices))[outside].flat[0])
        raise ModelError(
            f"its constant index {wrong} is outside of the first input",
            where,
            f"{-size} to {size - 1} along {what}" if size else "none: the input is empty",
        )


def index_limits(
    graph: OperatorGraph, unsure: Collection[str] = (), *, is_module: bool = False
) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest element of each input of a graph that is used as indices, by its name.

    `unsure`: values of which the shape may be another one when the model runs; indices into these have no limits.
    `is_module`: whether the graph is a module of PyTorch, some of whose operators take no negative indices.
    """
    integers = {name for name, type_ in graph.types.items() if type_.dtype.numpy.kind in "iu"}
    origin = {name: name for name in graph.inputs if name in integers}
    found: dict[str, tuple[int, int]] = {}
    for operator in graph.operators:
        given = operator.inputs
        if operator.domain or not given:
            continue
        if operator.op_type in _MOVES and given[0] in origin and operator.outputs[0] in integers:
            origin[operator.outputs[0]] = origin[given[0]]
        if len(given) < 2 or given[1] not in origin or given[0] in unsure:
            continue
        shape, axis = graph.types[given[0]].shape, operator.attributes.integer("axis", 0)
        if operator.op_type in _LEADING:
            is_single = graph.types[given[1]].shape[-1:] == (1,)
            axis = operator.attributes.integer("batch_dims", 0) if is_single else len(shape)
        elif operator.op_type not in _ALONG_AXIS:
            continue
        # Random inputs are 0 or 1, also for an axis of one element.
        if axis < len(shape) and (size := shape[axis]) > 1:
            least = 0 if is_module and _is_of(operator.node, _POSITIVE) else -size
            low, high = found.get(origin[given[1]], (least, size - 1))
            found[origin[given[1]]] = max(low, least), min(high, size - 1)
    return found


def _is_of(node: onnx.NodeProto, targets: Collection[str]) -> bool:
    """Return whether PyTorch's exporter made a node of one of these operators, which it notes in the node."""
    notes = (item.value for item in node.metadata_props if item.key.endswith(".class_hierarchy"))
    return any(f"'{target}'" in note for note in notes for target in targets)
