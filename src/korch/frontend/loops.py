"""Reads a Loop or Scan whose number of iterations is known as the operators of one iteration.

The condition of a Loop is assumed to hold; if the next condition then is a constant, the number of iterations is known.
The number of an iteration becomes an input of which each iteration reads one element. If a body gathers from an outer
value with this number as the index, it reads a slice of that value instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from korch.errors import UnsupportedError
from korch.frontend.attributes import NodeAttributes
from korch.frontend.names import captured_names, first_output, node_label, order_nodes
from korch.frontend.operator import Iteration, OperatorGraph, Stream
from korch.frontend.tensors import read_tensor
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

if TYPE_CHECKING:
    from korch.frontend.propagate import Propagation

FIRST_SCAN = 9
"""The opset from which on Scan has no axis of batches."""

FIRST = Stream(0, False)
"""The slices of the number of the iteration, and of the results of a Loop."""


def read_loop(walk: Propagation, node: onnx.NodeProto) -> tuple[tuple[str, ...], Iteration]:
    """Return the values that a loop reads, in the order of its iteration's inputs, and the iteration.

    `walk`: the walk that the node belongs to; a constant is added to it for the numbers of the iterations.

    Raises:
        UnsupportedError: the number of iterations or a shape depends on data, or a state changes its type.
        ModelError: the body breaks the rules of ONNX.
    """
    body = _Body.of(walk, node)
    return _read_scan(walk, node, body) if node.op_type == "Scan" else _read_loop(walk, node, body)


@dataclass(eq=False)
class _Body:
    """The parts of a loop's body."""

    where: str  # the node, for messages
    inputs: list[str]  # the names of its inputs
    outputs: list[str]  # the names of its outputs
    nodes: list[onnx.NodeProto]  # its nodes
    constants: dict[str, Array]  # the values known in it, its own and outer ones
    captured: list[str]  # the outer values that it reads and that are not known
    types: dict[str, ValueType] = field(default_factory=dict)  # the types of its inputs that each iteration is given

    @staticmethod
    def of(walk: Propagation, node: onnx.NodeProto) -> _Body:
        graph = next(a.g for a in node.attribute if a.name == "body")
        where, outer = f"{walk.model}: {node_label(node)}", list(dict.fromkeys(captured_names(node)))
        constants = {tensor.name: read_tensor(tensor, None, walk.model) for tensor in graph.initializer}
        constants |= {name: walk.constants[name] for name in outer if name in walk.constants}
        captured = [name for name in outer if name not in walk.constants]
        for name in captured:
            if name not in walk.types:
                raise UnsupportedError(f"its body reads {name!r}, which is no tensor of static shape", where=where)
        inputs, outputs = ([item.name for item in side] for side in (graph.input, graph.output))
        return _Body(where, inputs, outputs, list(graph.node), constants, captured)

    def read(self, walk: Propagation, outputs: Sequence[str]) -> OperatorGraph:
        """Return the operators that compute some values; the outputs of the graph have names of their own."""
        made = [f"{self.where}, output {i}" for i in range(len(outputs))]
        copies = [helper.make_node("Identity", [name], [new]) for name, new in zip(outputs, made, strict=True)]
        types = self.types | {name: walk.types[name] for name in self.captured}
        inputs = list(types)
        nodes = order_nodes([*self.nodes, *copies], [*inputs, *self.constants], made, walk.model)
        inner = walk.inner(types, self.constants, made)
        inner.walk(nodes)
        return inner.graph(inputs, made)

    def states_keep_types(self, graph: OperatorGraph, states: Iterable[str]) -> None:
        """Raise an error if an iteration changes the type of a state."""
        for name, output in zip(states, graph.outputs, strict=False):
            if graph.types[output] != self.types[name]:
                text = f"its state {name!r} begins as {self.types[name]} and becomes {graph.types[output]}"
                raise UnsupportedError(text, where=self.where)


def _read_scan(walk: Propagation, node: onnx.NodeProto, body: _Body) -> tuple[tuple[str, ...], Iteration]:
    at, version = NodeAttributes(node), walk.opsets[""]
    if version < FIRST_SCAN:
        raise UnsupportedError(f"Scan of opset {version} has an axis of batches", where=body.where)
    states = len(node.input) - at.integer("num_scan_inputs")
    sources = [walk.types[name] for name in node.input]
    reads = _streams(at, "input", [type_.rank for type_ in sources[states:]])
    lengths = {type_.shape[stream.axis] for type_, stream in zip(sources[states:], reads, strict=True)}
    if len(lengths) != 1 or len(body.inputs) != len(sources):
        raise UnsupportedError(f"it reads {sorted(lengths)} slices of its inputs", where=body.where)
    each = [*sources[:states], *(_without(t, stream.axis) for t, stream in zip(sources[states:], reads, strict=True))]
    body.types |= zip(body.inputs, each, strict=True)
    graph = body.read(walk, body.outputs)
    body.states_keep_types(graph, body.inputs[:states])
    writes = _streams(at, "output", [graph.types[name].rank + 1 for name in graph.outputs[states:]])
    return (*node.input, *body.captured), Iteration(graph, lengths.pop(), states, reads, writes)


def _streams(at: NodeAttributes, side: str, ranks: Sequence[int]) -> tuple[Stream, ...]:
    axes, backward = (at.integers(f"scan_{side}_{name}", (0,) * len(ranks)) for name in ("axes", "directions"))
    return tuple(Stream(axis % rank, bool(b)) for axis, rank, b in zip(axes, ranks, backward, strict=True))


def _without(type_: ValueType, axis: int) -> ValueType:
    return ValueType((*type_.shape[:axis], *type_.shape[axis + 1 :]), type_.dtype)


def _read_loop(walk: Propagation, node: onnx.NodeProto, body: _Body) -> tuple[tuple[str, ...], Iteration]:
    given = [*node.input, "", ""]
    most = _known(walk, given[0], "number of iterations", body)
    begins = _known(walk, given[1], "condition", body) != 0
    (number, condition, *states), sources = body.inputs, list(node.input[2:])
    body.types |= {name: walk.types[source] for name, source in zip(states, sources, strict=True)}
    body.constants[condition] = np.array(True)
    found = _gathered(walk, body, number, most)
    sources, reads = [*sources, *(name for name, _ in found)], [stream for _, stream in found]
    uses_number = number in {*body.outputs, *(name for n in body.nodes for name in (*n.input, *captured_names(n)))}
    if uses_number:
        body.types[number] = ValueType((), DType.I64)
        sources, reads = [*sources, f"{first_output(node)}, iterations"], [*reads, FIRST]
    graph = body.read(walk, body.outputs)
    following = graph.constants.get(graph.outputs[0])
    graph = replace(graph, outputs=graph.outputs[1:])
    if following is None:
        raise UnsupportedError("its condition depends on data", where=body.where)
    body.states_keep_types(graph, states)
    trips = most if following.all() else 1 if most is None else min(1, most)
    if trips is None:
        raise UnsupportedError("it has no end", where=body.where)
    trips = max(0, trips) if begins else 0
    if uses_number:
        walk.set_constant(sources[-1], np.arange(trips))
    writes = (FIRST,) * (len(graph.outputs) - len(states))
    return (*sources, *body.captured), Iteration(graph, trips, len(states), tuple(reads), writes)


def _known(walk: Propagation, name: str, what: str, body: _Body) -> int | None:
    """Return a constant as a number; None if it is omitted."""
    if name and name not in walk.constants:
        raise UnsupportedError(f"its {what} depends on data", where=body.where)
    return int(walk.constants[name].reshape(-1)[0]) if name else None


def _gathered(walk: Propagation, body: _Body, number: str, most: int | None) -> list[tuple[str, Stream]]:
    """Turn what gathers an iteration's part of an outer value into an input; return these values and their slices."""
    found: list[tuple[str, Stream]] = []
    for node in list(body.nodes):
        if node.op_type != "Gather" or node.domain not in ("", "ai.onnx") or node.input[1] != number:
            continue
        type_ = walk.types.get(node.input[0]) if node.input[0] not in body.types else None
        if type_ is None or most is None or not type_.rank:
            continue
        axis = NodeAttributes(node).integer("axis", 0) % type_.rank
        if type_.shape[axis] >= most:
            body.nodes.remove(node)
            body.types[node.output[0]] = _without(type_, axis)
            found.append((node.input[0], Stream(axis, False)))
    return found
