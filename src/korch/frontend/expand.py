"""Replaces a node by the nodes that define it.

Composite operators are replaced by their definition in the ONNX standard, so that their parts can
be optimized. An If whose condition is known is replaced by the branch that it takes.
"""

from collections.abc import Mapping, Sequence

import onnx
from onnx import inliner

from korch.frontend.infer import array_type_proto, type_proto
from korch.frontend.names import first_output, subgraphs
from korch.primitive.op import Array
from korch.primitive.types import ValueType

COMPOSITES = frozenset(
    {
        "Attention",
        "CausalConvWithState",
        "CenterCropPad",
        "FlexAttention",
        "NegativeLogLikelihoodLoss",
        "RotaryEmbedding",
        "SoftmaxCrossEntropyLoss",
        "SwiGLU",
    }
)


def expand_composite(
    node: onnx.NodeProto, opsets: Mapping[str, int], types: Mapping[str, ValueType], constants: Mapping[str, Array]
) -> list[onnx.NodeProto] | None:
    """Return the nodes of a composite operator's definition, or None if it has none here."""
    named = [name for name in dict.fromkeys(node.input) if name]
    protos = [type_proto(types[n]) if n in types else array_type_proto(constants[n]) for n in named]
    inputs = [onnx.helper.make_value_info(n, proto) for n, proto in zip(named, protos, strict=True)]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "expand", inputs, outputs),
        opset_imports=[onnx.helper.make_opsetid(*item) for item in opsets.items()],
    )
    try:
        flat = inliner.inline_selected_functions(
            model, [(node.domain, node.op_type)], exclude=False, inline_schema_functions=True
        )
    except (RuntimeError, ValueError):
        return None
    nodes = list(flat.graph.node)
    if len(nodes) == 1 and nodes[0].op_type == node.op_type:
        return None
    same_version = all(opsets.get("" if o.domain == "ai.onnx" else o.domain) == o.version for o in flat.opset_import)
    if not same_version:
        return None
    return _renamed(nodes, {*named, *node.output}, node)


def take_branch(node: onnx.NodeProto, condition: bool) -> list[onnx.NodeProto]:
    """Return the nodes of the branch that an If takes; their outputs have the names of the If's outputs."""
    branches = {attribute.name: attribute.g for attribute in node.attribute}
    graph = branches["then_branch" if condition else "else_branch"]
    nodes = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    nodes += graph.node
    inner = {name for n in nodes for name in n.output}
    result = _renamed(nodes, set(), node)
    for item, name in zip(graph.output, node.output, strict=True):
        source = f"{first_output(node)}/{item.name}" if item.name in inner else item.name
        if name:
            result.append(onnx.helper.make_node("Identity", [source], [name]))
    return result


def _renamed(nodes: Sequence[onnx.NodeProto], keep: set[str], whole: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return copies of the nodes that replace a `whole` one, with its name before theirs.

    Its first output is put before the names of all outputs not in `keep`: names of nodes need not be unique.
    """
    first = first_output(whole)
    table = {name: f"{first}/{name}" for node in nodes for name in node.output if name and name not in keep}
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        _rename(copy, table)
        copy.name = f"{whole.name or first}/{node.name or node.op_type}"
        copies.append(copy)
    return copies


def _rename(node: onnx.NodeProto, table: Mapping[str, str]) -> None:
    # Names are unique across nested graphs, so one table serves all of them.
    node.input[:] = [table.get(name, name) for name in node.input]
    node.output[:] = [table.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        for inner in graph.node:
            _rename(inner, table)
        for item in graph.output:
            item.name = table.get(item.name, item.name)


def embed_captured(node: onnx.NodeProto, captured: Sequence[str], constants: Mapping[str, Array]) -> onnx.NodeProto:
    """Return a copy of a node whose subgraphs contain the constants that they read from outside."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for graph in subgraphs(copy):
        for name in captured:
            graph.initializer.append(onnx.numpy_helper.from_array(constants[name], name))
    return copy
