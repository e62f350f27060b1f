"""Cuts a walk with host nodes into segments that run one after another.

Segments of the static graph and segments of the host alternate. An item runs in the earliest
segment that the values it reads allow, so that there are few segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from korch.frontend.infer import type_proto
from korch.frontend.names import captured_names
from korch.frontend.operator import Operator, OperatorGraph
from korch.frontend.propagate import HostNode, Propagation
from korch.primitive.op import Array


@dataclass(frozen=True, eq=False)
class HostSegment:
    """Nodes that ONNX Runtime or ONNX's reference evaluator runs."""

    model: onnx.ModelProto  # the nodes and the constants that they read; an input's type may be missing
    nodes: tuple[tuple[str, str], ...]  # each node's name and operator, and why the host runs it

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the values that the segment reads."""
        return tuple(item.name for item in self.model.graph.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the values that the segment computes."""
        return tuple(item.name for item in self.model.graph.output)


Segment = OperatorGraph | HostSegment


@dataclass(frozen=True, eq=False)
class SegmentedModel:
    """A model as segments."""

    name: str  # where the model came from, for messages
    inputs: tuple[tuple[str, onnx.TypeProto | None], ...]  # name and type, as ONNX writes it, of each input
    # name and type of each output; the type is None if it is unknown
    outputs: tuple[tuple[str, onnx.TypeProto | None], ...]
    segments: tuple[Segment, ...]  # in an order in which they can run
    constants: Mapping[str, Array]  # outputs that are known at build time
    # elements of the inputs that need not be given at run time, by name
    defaults: Mapping[str, Array] = field(default_factory=dict)


def cut_segments(
    name: str, walk: Propagation, inputs: Sequence[str], outputs: Sequence[str], ir_version: int
) -> SegmentedModel:
    """Cut the operators and host nodes of a walk into segments."""
    stages: list[list[Operator | HostNode]] = []
    stage_of: dict[str, int] = {}
    for item in _needed(walk, outputs):
        parity = int(isinstance(item, HostNode))
        earliest = max((stage_of.get(value, 0) for value in _reads(item)), default=0)
        stage = earliest + (earliest % 2 != parity)
        stage_of |= dict.fromkeys(_writes(item), stage)
        stages += [[] for _ in range(stage + 1 - len(stages))]
        stages[stage].append(item)
    segments = []
    for number, items in enumerate(stages):
        later = {value for rest in stages[number + 1 :] for item in rest for value in _reads(item)}
        if items:
            segments.append(_segment(name, walk, items, later.union(outputs), ir_version))
    return SegmentedModel(
        name,
        tuple((value, _type(walk, value)) for value in inputs),
        tuple((value, _type(walk, value)) for value in outputs),
        tuple(segments),
        {value: walk.constants[value] for value in outputs if value in walk.constants},
    )


def _needed(walk: Propagation, outputs: Sequence[str]) -> list[Operator | HostNode]:
    needed, kept = set(outputs), list[Operator | HostNode]()
    for item in reversed(walk.items):
        if needed.intersection(_writes(item)):
            needed.update(_reads(item))
            kept.append(item)
    kept.reverse()
    return kept


def _reads(item: Operator | HostNode) -> list[str]:
    if isinstance(item, Operator):
        return [name for name in item.inputs if name]
    return [name for name in (*item.node.input, *captured_names(item.node)) if name]


def _writes(item: Operator | HostNode) -> list[str]:
    outputs = item.outputs if isinstance(item, Operator) else item.node.output
    return [name for name in outputs if name]


def _type(walk: Propagation, value: str) -> onnx.TypeProto | None:
    if value in walk.types:
        return type_proto(walk.types[value])
    return walk.untyped.get(value)


def _segment(
    name: str, walk: Propagation, items: Sequence[Operator | HostNode], later: set[str], ir_version: int
) -> Segment:
    made = list(dict.fromkeys(value for item in items for value in _writes(item)))
    read = list(dict.fromkeys(value for item in items for value in _reads(item)))
    outside = [value for value in read if value not in made]
    constants = {value: walk.constants[value] for value in outside if value in walk.constants}
    inputs = [value for value in outside if value not in constants]
    outputs = [value for value in made if value in later]
    operators = [item for item in items if isinstance(item, Operator)]
    if operators:
        types = {value: walk.types[value] for value in (*outside, *made) if value in walk.types}
        return OperatorGraph(name, tuple(operators), tuple(inputs), tuple(outputs), types, constants)
    return _host_segment(walk, [i for i in items if isinstance(i, HostNode)], inputs, outputs, constants, ir_version)


def _host_segment(
    walk: Propagation,
    items: Sequence[HostNode],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, Array],
    ir_version: int,
) -> HostSegment:
    graph = onnx.helper.make_graph(
        [item.node for item in items],
        "host",
        [_value(walk, value) for value in inputs],
        [_value(walk, value) for value in outputs],
        [onnx.numpy_helper.from_array(array, value) for value, array in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid(*item) for item in walk.opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    labels = ((f"{item.node.op_type} {item.name}".strip(), item.reason) for item in items)
    return HostSegment(model, tuple(labels))


def _value(walk: Propagation, value: str) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto()
    info.name = value
    proto = _type(walk, value)
    if proto is not None:
        info.type.CopyFrom(proto)
    return info
