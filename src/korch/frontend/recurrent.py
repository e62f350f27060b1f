"""Replaces LSTM, GRU and RNN nodes of layout 1 by transposes around nodes of layout 0.

ONNX Runtime does not run layout 1, in which the batch is the first axis. ONNX's reference evaluator does, but it
ignores lengths, clipping and activations there.
"""

from collections.abc import Iterable, Iterator

import onnx

from korch.frontend.names import first_output, subgraphs

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})

SWAPPED_INPUTS = (0, 5, 6)
"""The inputs that have a batch axis: the sequence and the initial states. Lengths have no other axis."""

OUTPUT_ORDERS = ((2, 0, 1, 3), (1, 0, 2), (1, 0, 2))
"""For each output, the axes of layout 0 in the order of layout 1."""


def replace_batch_first(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, also those of subgraphs, without a recurrent operator of layout 1; the given nodes stay unchanged.

    Source:
        ONNX, LSTM, GRU and RNN of opset 14, attribute `layout`.
    """
    for node in nodes:
        if next(subgraphs(node), None) is not None:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            for graph in subgraphs(copy):
                inner = list(replace_batch_first(graph.node))
                del graph.node[:]
                graph.node.extend(inner)
            yield copy
        elif _is_batch_first(node):
            yield from _transposed(node)
        else:
            yield node


def _is_batch_first(node: onnx.NodeProto) -> bool:
    is_recurrent = node.op_type in RECURRENT and node.domain in ("", "ai.onnx")
    return is_recurrent and any(attribute.name == "layout" and attribute.i for attribute in node.attribute)


def _transposed(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    first = first_output(node)
    copy.name = node.name or first
    del copy.attribute[:]
    copy.attribute.extend(attribute for attribute in node.attribute if attribute.name != "layout")
    for i in SWAPPED_INPUTS:
        if i < len(node.input) and node.input[i]:
            copy.input[i] = f"{first}/input {i}"
            yield onnx.helper.make_node("Transpose", [node.input[i]], [copy.input[i]], copy.input[i], perm=(1, 0, 2))
    results = []
    for i, (output, order) in enumerate(zip(node.output, OUTPUT_ORDERS, strict=False)):
        if output:
            copy.output[i] = f"{first}/output {i}"
            results.append(onnx.helper.make_node("Transpose", [copy.output[i]], [output], copy.output[i], perm=order))
    yield copy
    yield from results
