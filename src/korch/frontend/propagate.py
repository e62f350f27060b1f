"""One walk over a model's nodes that infers static types, folds constants and expands composite operators."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from korch.errors import ModelError, UnsupportedError
from korch.frontend.attributes import NodeAttributes
from korch.frontend.cached import define_attention
from korch.frontend.classical import define_classical
from korch.frontend.contributed import define_contributed
from korch.frontend.definition import Definition, set_constant
from korch.frontend.expand import COMPOSITES, embed_captured, expand_composite, take_branch
from korch.frontend.fold import LIMIT_BYTES, constant_of, evaluate, evaluate_split
from korch.frontend.infer import Known, find_schema, infer_types, static_type
from korch.frontend.loops import read_loop
from korch.frontend.names import captured_names, first_output, node_label
from korch.frontend.operator import Operator, OperatorGraph
from korch.frontend.shapes import check_size, dtype_of
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

logger = logging.getLogger("korch.frontend")


@dataclass(frozen=True, slots=True, eq=False)
class HostNode:
    """A node that can't be in a graph of static tensors, so the host runs it."""

    node: onnx.NodeProto  # the node as ONNX writes it
    reason: str  # why it can't

    @property
    def name(self) -> str:
        """The node's name, or that of its first output."""
        return self.node.name or first_output(self.node)


@dataclass(frozen=True, slots=True)
class Host:
    """What the host runs, outside of the static graph."""

    forced: Mapping[str, str] = field(default_factory=dict)  # names of nodes that the host must run, with the reasons
    # inputs that are not tensors of numbers, with their TypeProtos
    untyped: Mapping[str, onnx.TypeProto] = field(default_factory=dict)


class Propagation:
    """One walk over a model's nodes.

    Attributes:
        types: the type of each value so far, without constants of element types that Korch lacks.
        constants: the values known so far.
        operators: the operators that remain to be run.
        items: the operators and the host's nodes, in order.
        untyped: the values that are not static tensors, with what ONNX knows about their types.
        sized: the constants that follow from sizes, if what is computed from them may be left for each run.
    """

    def __init__(
        self,
        model: str,
        opsets: Mapping[str, int],
        types: dict[str, ValueType],
        constants: dict[str, Array],
        outputs: Sequence[str],
        host: Host | None = None,
    ) -> None:
        """Begin a walk.

        `host`: what the host runs; None if all nodes must be in the static graph.
        """
        self.model, self.opsets, self.wanted = model, opsets, set(outputs)
        self.types = types
        self.constants: dict[str, Array] = {}
        self.operators: list[Operator] = []
        self.items: list[Operator | HostNode] = []
        self.host = host
        self.sized: set[str] | None = None
        self._places: set[str] = set()  # those among `sized` that are computed from ranges of numbers
        self.untyped: dict[str, onnx.TypeProto] = dict(host.untyped) if host else {}
        for name, array in constants.items():
            self.set_constant(name, array)

    def walk(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Process nodes, which must be in an order in which they can run."""
        waiting = deque(nodes)
        read: set[str] = set(self.wanted)
        for node in nodes:
            read.update((*node.input, *captured_names(node)))
        while waiting:
            more = self._visit(waiting.popleft(), read)
            for node in more:
                read.update((*node.input, *captured_names(node)))
            waiting.extendleft(reversed(more))

    def _visit(self, node: onnx.NodeProto, read: set[str]) -> list[onnx.NodeProto]:
        """Process a node, or leave it to the host if there is one; return the nodes to process in its place."""
        if self.host is None:
            return self._node(node, read)
        name = node.name or first_output(node)
        reason = self.host.forced.get(name, "")
        if not reason and (foreign := self.untyped.keys() & {*node.input, *captured_names(node)}):
            reason = f"it reads {min(foreign)!r}, which is no tensor of static shape"
        if not reason:
            try:
                return self._node(node, read)
            except UnsupportedError as error:
                reason = error.what
        self._leave(_normal(node), reason)
        return []

    def _leave(self, node: onnx.NodeProto, reason: str) -> None:
        """Leave a node to the host; its outputs may still be static tensors."""
        self.items.append(HostNode(node, reason))
        found = self._infer_left(node)
        for name in filter(None, node.output):
            try:
                self.types[name] = static_type(found.get(name), name, node, self.model)
            except UnsupportedError:
                self.untyped[name] = found.get(name)

    def _infer_left(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        """Return the types that ONNX infers for the outputs of a node that the host runs."""
        types = {n: self.types[n] for n in node.input if n in self.types}
        others = {n: self.untyped.get(n) for n in node.input if n not in self.types}
        is_known = all(proto is not None or n in self.constants or not n for n, proto in others.items())
        if not is_known or any(captured_names(node)):
            return {}
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opsets[node.domain], node.domain)
            untyped = {n: proto for n, proto in others.items() if proto is not None}
            return infer_types(node, schema, Known(self.opsets, types, self.constants, self.model, untyped))
        except (ModelError, KeyError, onnx.defs.SchemaError):
            return {}

    @property
    def _known(self) -> Known:
        return Known(self.opsets, self.types, self.constants, self.model)

    def _node(self, node: onnx.NodeProto, read: set[str]) -> list[onnx.NodeProto]:
        node = _normal(node)
        if node.op_type == "Constant" and not node.domain:
            self._constant_node(node)
            return []
        definition = Definition(node, self.opsets, self.types, self.constants, self.model)
        if any(define(definition) for define in (define_contributed, define_classical, define_attention)):
            return definition.nodes
        schema = find_schema(node, self.opsets, self.model)
        if node.op_type in ("Loop", "Scan") and not node.domain and self._loop(node):
            return []
        captured = sorted(set(captured_names(node)))
        if captured and not (node.op_type == "If" and node.input[0] in self.constants):
            node = self._closed(node, captured)
        if node.op_type == "If" and not node.domain and node.input[0] in self.constants:
            return take_branch(node, bool(self.constants[node.input[0]].reshape(-1)[0]))
        self._widen_stored(node)
        if node.op_type in COMPOSITES:
            parts = expand_composite(node, self.opsets, self.types, self.constants)
            if parts is not None:
                return parts
        if self._fold(node, schema):
            return []
        self._keep(node, schema, read)
        return []

    def _constant_node(self, node: onnx.NodeProto) -> None:
        if len(node.attribute) != 1:
            raise ModelError(
                f"it has {len(node.attribute)} attributes",
                where=f"{self.model}: {node_label(node)}",
                expected="one, the constant's value",
            )
        array = constant_of(node)
        if array is None:
            raise UnsupportedError(
                "sparse tensors are not supported",
                where=f"{self.model}: {node_label(node)}",
                hint="Store the tensor dense",
            )
        self.set_constant(node.output[0], array)

    def inner(self, types: dict[str, ValueType], constants: dict[str, Array], outputs: Sequence[str]) -> Propagation:
        """Return a new walk for the nodes of a subgraph; the arguments are as in `__init__`."""
        return Propagation(self.model, self.opsets, types, constants, outputs)

    def graph(self, inputs: Sequence[str], outputs: Sequence[str]) -> OperatorGraph:
        """Return the graph of a finished walk without the operators and values that no output needs."""
        needed, kept = set(outputs), list[Operator]()
        for operator in reversed(self.operators):
            if needed.intersection(operator.outputs):
                needed.update(operator.inputs)
                kept.append(operator)
        kept.reverse()
        constants: dict[str, Array] = {n: a for n, a in self.constants.items() if n in needed}
        for output in outputs:
            if output not in self.types:
                raise UnsupportedError(
                    f"the output {output!r} has elements of type {constants[output].dtype}", where=self.model
                )
        visible = needed.union(inputs, *(operator.outputs for operator in kept))
        types = {n: t for n, t in self.types.items() if n in visible}
        sized = frozenset(self.sized or ()) & constants.keys()
        return OperatorGraph(self.model, tuple(kept), tuple(inputs), tuple(outputs), types, constants, sized=sized)

    def _loop(self, node: onnx.NodeProto) -> bool:
        """Add the operator of a loop with a known number of iterations; return whether it is one."""
        read = [name for name in (*node.input, *captured_names(node)) if name]
        if all(name in self.constants for name in read):
            return False  # it is computed now, if its results are small
        try:
            inputs, loop = read_loop(self, node)
        except UnsupportedError as error:
            logger.info("%s stays one operator: %s", node_label(node), error)
            return False
        found = [loop.graph.types[name] for name in loop.graph.outputs]
        for i, (type_, stream) in enumerate(zip(found[loop.states :], loop.writes, strict=True), loop.states):
            shape = (*type_.shape[: stream.axis], loop.trips, *type_.shape[stream.axis :])
            found[i] = ValueType(shape, type_.dtype)
            check_size(found[i], f"{self.model}: {node_label(node)}")
        self.types |= {name: type_ for name, type_ in zip(node.output, found, strict=False) if name}
        self._add(replace(Operator.of(node, self.opsets[node.domain], node.output), inputs=inputs, iteration=loop))
        return True

    def _closed(self, node: onnx.NodeProto, captured: Sequence[str]) -> onnx.NodeProto:
        for name in captured:
            if name not in self.constants:
                raise UnsupportedError(
                    f"its subgraph reads {name!r} from outside",
                    where=f"{self.model}: {node_label(node)}",
                    expected="control flow that reads its inputs only",
                    hint="Export the model without control flow, or for one fixed case",
                )
        return embed_captured(node, captured, self.constants)

    def _fold(self, node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> bool:
        """Compute a node whose inputs are all known; return whether that was possible."""
        is_sized = self.sized is not None and not self.sized.isdisjoint(node.input)
        if is_sized and self._is_read_late(node):
            return False
        if not (self._fold_shape(node) or self._fold_known(node, schema)):
            return False
        if self.sized is not None and (is_sized or node.op_type in ("Shape", "Size")):
            self.sized.update(node.output)
            if node.op_type == "Range" or not self._places.isdisjoint(node.input):
                self._places.update(node.output)
        return True

    def _is_read_late(self, node: onnx.NodeProto) -> bool:
        """Return whether a node with a constant that follows from sizes is left for each run.

        It reads rows of a matrix of real numbers, or makes real numbers of places, such as those of rotary angles: the
        results at all sizes have no short form.
        """
        if node.domain or node.op_type not in ("Gather", "Cast"):
            return False
        if node.op_type == "Cast":
            to = dtype_of(NodeAttributes(node).integer("to"))
            return node.input[0] in self._places and to is not None and to.is_float
        table = self.constants.get(node.input[0])
        dtype = None if table is None else _dtype(table)
        return table is not None and table.ndim > 1 and dtype is not None and dtype.is_float

    def _fold_known(self, node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> bool:
        """Compute a node whose inputs are all known; return whether that was possible."""
        is_known = all(name in self.constants for name in node.input if name)
        if not is_known or self._is_weight(node):
            return False
        try:
            types = infer_types(node, schema, self._known)
        except ModelError:
            # In practice Range accepts a vector of one element as a scalar, although its definition does not.
            results = evaluate(node, self.opsets, self.constants)
            if node.op_type != "Range" or results is None:
                raise
            self.set_constant(node.output[0], results[0])
            return True
        if any(_size_bytes(proto) > LIMIT_BYTES for proto in types.values()):
            return False
        operator = Operator.of(node, self.opsets[node.domain], node.output)
        results = evaluate_split(operator, types, self.constants, self.model)
        results = results or evaluate(node, self.opsets, self.constants, types)
        if results is None or not all(
            _agrees(types.get(name), array) for name, array in zip(node.output, results, strict=True) if name
        ):
            return False
        for name, array in zip(node.output, results, strict=True):
            if name:
                self.set_constant(name, array)
        return True

    def _widen_stored(self, node: onnx.NodeProto) -> None:
        """Widen a dequantization's constants of fewer than 8 bits to bytes; later stages pack them again."""
        if node.op_type != "DequantizeLinear" or node.domain:
            return
        places = [i for i in (0, 2) if i < len(node.input) and node.input[i]]
        arrays = [self.constants.get(node.input[i]) for i in places]
        for i, array in zip(places, arrays, strict=True):
            if any(each is None or each.dtype.name not in NARROW for each in arrays) or array is None:
                return
            name = f"{node.input[i]}:bytes"
            self.set_constant(name, array.astype(NARROW[array.dtype.name]))
            node.input[i] = name

    def _is_weight(self, node: onnx.NodeProto) -> bool:
        """Return whether a node dequantizes a stored array, which is not folded: a kernel may read the bytes."""
        is_dequantized = node.op_type == "DequantizeLinear" and not node.domain
        return is_dequantized and self.constants[node.input[0]].ndim > 1 and node.input[0] in self.types

    def _fold_shape(self, node: onnx.NodeProto) -> bool:
        """Fold a Shape or Size, which needs only the type of its input; return whether that was possible."""
        if node.domain or node.op_type not in ("Shape", "Size") or node.input[0] not in self.types:
            return False
        type_ = self.types[node.input[0]]
        if node.op_type == "Size":
            self.set_constant(node.output[0], np.array(type_.size, np.int64))
            return True
        attributes = NodeAttributes(node)
        part = slice(attributes.integer("start", 0), attributes.integer("end", type_.rank))
        self.set_constant(node.output[0], np.array(type_.shape[part], np.int64))
        return True

    def _keep(self, node: onnx.NodeProto, schema: onnx.defs.OpSchema, read: set[str]) -> None:
        where = f"{self.model}: {node_label(node)}"
        for name in node.input:
            if name and name not in self.types:
                raise UnsupportedError(
                    f"its input {name!r} has elements of type {self.constants[name].dtype}",
                    where=where,
                    hint="Korch computes with numbers and booleans only",
                )
        if not any(node.input):
            raise UnsupportedError("it has no input and can't be computed ahead", where=where)
        found = infer_types(node, schema, self._known)
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
        self._add(Operator.of(node, self.opsets[node.domain], outputs))

    def _add(self, operator: Operator) -> None:
        self.operators.append(operator)
        self.items.append(operator)

    def set_constant(self, name: str, array: Array) -> None:
        """Record the elements of a value, and its type."""
        set_constant(self.types, self.constants, name, array)


NARROW = {"int4": np.int8, "uint4": np.uint8, "int2": np.int8, "uint2": np.uint8}
"""The byte types that hold integers of fewer bits."""


def _normal(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.domain = "" if node.domain == "ai.onnx" else node.domain
    for names in (copy.input, copy.output):
        while names and not names[-1]:
            del names[-1]
    return copy


def _size_bytes(proto: onnx.TypeProto) -> int:
    tensor = proto.tensor_type
    if proto.WhichOneof("value") != "tensor_type" or dtype_of(tensor.elem_type) is None:
        return 0
    size = dtype_of(tensor.elem_type).size_bytes  # type: ignore[union-attr]
    for dim in tensor.shape.dim:
        size *= max(dim.dim_value, 0)
    return size


def _agrees(proto: onnx.TypeProto | None, array: Array) -> bool:
    if proto is None or proto.WhichOneof("value") != "tensor_type":
        return False
    tensor = proto.tensor_type
    if dtype_of(tensor.elem_type) is not None and dtype_of(tensor.elem_type) != _dtype(array):
        return False
    if not tensor.HasField("shape"):
        return True
    dims = tensor.shape.dim
    return len(dims) == array.ndim and all(
        not dim.HasField("dim_value") or dim.dim_value == size for dim, size in zip(dims, array.shape, strict=True)
    )


def _dtype(array: Array) -> DType | None:
    try:
        return DType.of(array.dtype)
    except KeyError:
        return None
