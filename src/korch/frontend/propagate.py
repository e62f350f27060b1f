"""Nodes in order -> operators with static types, by one walk that infers, folds and expands."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from korch.errors import ModelError, UnsupportedError
from korch.frontend.expand import COMPOSITES, embed_captured, expand_composite, take_branch
from korch.frontend.fold import LIMIT_BYTES, constant_of, evaluate
from korch.frontend.infer import find_schema, infer_types, static_type
from korch.frontend.names import captured_names, node_label
from korch.frontend.operator import Operator, read_attributes
from korch.frontend.shapes import dtype_of
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})


class Propagation:
    """One walk over a model's nodes.

    Attributes:
        types: the type of each value so far, constants of other element types left out.
        constants: the values known so far.
        operators: what is left to run.
    """

    def __init__(
        self, model: str, opsets: Mapping[str, int], types: dict[str, ValueType],
        constants: dict[str, Array], outputs: Sequence[str],
    ) -> None:  # fmt: skip
        self.model, self.opsets, self.wanted = model, opsets, set(outputs)
        self.types = types
        self.constants: dict[str, Array] = {}
        self.operators: list[Operator] = []
        for name, array in constants.items():
            self._set_constant(name, array)

    def walk(self, nodes: Sequence[Any]) -> None:
        """Process nodes that stand in an order in which they can run."""
        waiting = deque(nodes)
        read: set[str] = set(self.wanted)
        for node in nodes:
            read.update((*node.input, *captured_names(node)))
        while waiting:
            more = self._node(waiting.popleft(), read)
            for node in more:
                read.update((*node.input, *captured_names(node)))
            waiting.extendleft(reversed(more))

    def _node(self, node: Any, read: set[str]) -> list[Any]:
        node = _normal(node)
        if node.op_type == "Constant" and not node.domain:
            self._constant_node(node)
            return []
        schema = find_schema(node, self.opsets, self.model)
        captured = sorted(set(captured_names(node)))
        if captured and not (node.op_type == "If" and node.input[0] in self.constants):
            node = self._closed(node, captured)
        if node.op_type == "If" and not node.domain and node.input[0] in self.constants:
            return take_branch(node, bool(self.constants[node.input[0]].reshape(-1)[0]))
        if self._fold(node, schema):
            return []
        if node.op_type in COMPOSITES:
            parts = expand_composite(node, self.opsets, self.types, self.constants)
            if parts is not None:
                return parts
        self._keep(node, schema, read)
        return []

    def _constant_node(self, node: Any) -> None:
        if len(node.attribute) != 1:
            raise ModelError(
                f"it has {len(node.attribute)} attributes", where=f"{self.model}: "
                f"{node_label(node)}", expected="one, the constant's value",
            )  # fmt: skip
        array = constant_of(node)
        if array is None:
            raise UnsupportedError(
                "sparse tensors are not supported", where=f"{self.model}: {node_label(node)}",
                hint="Store the tensor dense",
            )  # fmt: skip
        self._set_constant(node.output[0], array)

    def _closed(self, node: Any, captured: Sequence[str]) -> Any:
        for name in captured:
            if name not in self.constants:
                raise UnsupportedError(
                    f"its subgraph reads {name!r} from outside", where=f"{self.model}: "
                    f"{node_label(node)}", expected="control flow that reads its inputs only",
                    hint="Export the model without control flow, or for one fixed case",
                )  # fmt: skip
        return embed_captured(node, captured, self.constants)

    def _fold(self, node: Any, schema: Any) -> bool:
        """Compute a node whose inputs are all known; say whether that was possible."""
        is_known = all(name in self.constants for name in node.input if name)
        if not is_known:
            return self._fold_shape(node)
        types = infer_types(node, schema, self.opsets, self.types, self.constants, self.model)
        if any(_size_bytes(proto) > LIMIT_BYTES for proto in types.values()):
            return False
        results = evaluate(node, self.opsets, self.constants)
        if results is None or not all(
            _agrees(types.get(name), array)
            for name, array in zip(node.output, results, strict=True) if name
        ):  # fmt: skip
            return False
        for name, array in zip(node.output, results, strict=True):
            if name:
                self._set_constant(name, array)
        return True

    def _fold_shape(self, node: Any) -> bool:
        """Answer Shape and Size, which need no elements."""
        if node.domain or node.op_type not in ("Shape", "Size") or node.input[0] not in self.types:
            return False
        type_ = self.types[node.input[0]]
        if node.op_type == "Size":
            self._set_constant(node.output[0], np.array(type_.size, np.int64))
            return True
        attributes = read_attributes(node)
        part = slice(attributes.get("start", 0), attributes.get("end"))
        self._set_constant(node.output[0], np.array(type_.shape[part], np.int64))
        return True

    def _keep(self, node: Any, schema: Any, read: set[str]) -> None:
        where = f"{self.model}: {node_label(node)}"
        for name in node.input:
            if name and name not in self.types:
                raise UnsupportedError(
                    f"its input {name!r} has elements of type {self.constants[name].dtype}",
                    where=where, hint="Korch computes with numbers and booleans only",
                )  # fmt: skip
        if not any(node.input):
            raise UnsupportedError("it has no input and can't be computed ahead", where=where)
        found = infer_types(node, schema, self.opsets, self.types, self.constants, self.model)
        outputs = []
        for name in node.output:
            try:
                if name:
                    self.types[name] = static_type(found.get(name), name, node, self.model)
                outputs.append(name)
            except UnsupportedError:
                if name in read:
                    raise
                outputs.append("")
        self.operators.append(
            Operator(
                node.name or next(filter(None, node.output), ""), node.op_type, node.domain,
                self.opsets[node.domain],
                tuple(node.input), tuple(outputs), read_attributes(node), node,
            )
        )  # fmt: skip

    def _set_constant(self, name: str, array: Array) -> None:
        self.constants[name] = array
        try:
            self.types[name] = ValueType(tuple(array.shape), DType.of(array.dtype))
        except KeyError:
            self.types.pop(name, None)


def _normal(node: Any) -> Any:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.domain = "" if node.domain == "ai.onnx" else node.domain
    for names in (copy.input, copy.output):
        while names and not names[-1]:
            del names[-1]
    return copy


def _size_bytes(proto: Any) -> int:
    tensor = proto.tensor_type
    if proto.WhichOneof("value") != "tensor_type" or dtype_of(tensor.elem_type) is None:
        return 0
    size = dtype_of(tensor.elem_type).size_bytes  # type: ignore[union-attr]
    for dim in tensor.shape.dim:
        size *= max(dim.dim_value, 0)
    return size


def _agrees(proto: Any, array: Array) -> bool:
    if proto is None or proto.WhichOneof("value") != "tensor_type":
        return False
    tensor = proto.tensor_type
    if dtype_of(tensor.elem_type) is not None and dtype_of(tensor.elem_type) != _dtype(array):
        return False
    if not tensor.HasField("shape"):
        return True
    dims = tensor.shape.dim
    return len(dims) == array.ndim and all(
        not dim.HasField("dim_value") or dim.dim_value == size
        for dim, size in zip(dims, array.shape, strict=True)
    )


def _dtype(array: Array) -> DType | None:
    try:
        return DType.of(array.dtype)
    except KeyError:
        return None
