"""Selects the nodes that are needed and puts them in an order in which they can run.

Names are the edges of an ONNX graph: exactly one node, input or initializer must define each name.
"""

from collections.abc import Iterable, Iterator, Sequence

import onnx

from korch.errors import ModelError


def first_output(node: onnx.NodeProto) -> str:
    """Return the first output of a node that is not left out."""
    return next((output for output in node.output if output), "")


def node_label(node: onnx.NodeProto) -> str:
    """Return how messages name a node: its type, and its name or first output."""
    name = node.name or first_output(node)
    domain = f"{node.domain}::" if node.domain not in ("", "ai.onnx") else ""
    return f"node {name!r} ({domain}{node.op_type})"


def has_legal_names(graph: onnx.GraphProto) -> bool:
    """Return whether all names in a graph are valid text; protobuf returns an invalid one as bytes."""
    named = (*graph.input, *graph.output, *graph.initializer)
    return all(isinstance(item.name, str) for item in named) and all(
        all(isinstance(text, str) for text in (node.name, node.op_type, node.domain, *node.input, *node.output))
        and all(
            isinstance(attribute.name, str)
            and has_legal_names(attribute.g)
            and all(map(has_legal_names, attribute.graphs))
            for attribute in node.attribute
        )
        for node in graph.node
    )


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that are attributes of a node, such as the branches of an If."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def captured_names(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node's subgraphs read from outside."""
    for graph in subgraphs(node):
        yield from _free(graph)


def _free(graph: onnx.GraphProto) -> Iterator[str]:
    bound = {item.name for item in (*graph.input, *graph.initializer)}
    for node in graph.node:
        for name in (*node.input, *captured_names(node)):
            if name and name not in bound:
                yield name
        bound.update(node.output)
    yield from (item.name for item in graph.output if item.name not in bound)


def order_nodes(
    nodes: Sequence[onnx.NodeProto], given: Iterable[str], outputs: Sequence[str], model: str
) -> list[onnx.NodeProto]:
    """Return the nodes that the outputs need, each after those that it reads.

    Raises:
        ModelError: a name is defined twice or not at all, or nodes form a cycle.
    """
    producer: dict[str, int] = {}
    given = set(given)
    for position, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in given or name in producer:
                raise ModelError(
                    f"it computes {name!r}, which already has a value",
                    where=f"{model}: {node_label(node)}",
                    hint="Names must be unique; the exporter is at fault",
                )
            producer[name] = position
    for name in outputs:
        if name not in producer and name not in given:
            raise ModelError(f"no node computes the output {name!r}", where=model)
    return [nodes[p] for p in _depth_first(nodes, given, producer, outputs, model)]


def _depth_first(
    nodes: Sequence[onnx.NodeProto], given: set[str], producer: dict[str, int], outputs: Sequence[str], model: str
) -> list[int]:
    done: dict[int, bool] = {}  # False while its inputs are being ordered
    order: list[int] = []
    stack = [producer[name] for name in reversed(outputs) if name in producer]
    while stack:
        position = stack[-1]
        if position in done:
            stack.pop()
            if not done[position]:
                done[position] = True
                order.append(position)
            continue
        done[position] = False
        node = nodes[position]
        for name in (*node.input, *captured_names(node)):
            if not name or name in given:
                continue
            if name not in producer:
                raise ModelError(
                    f"no node or input of the model provides its input {name!r}", where=f"{model}: {node_label(node)}"
                )
            before = producer[name]
            if done.get(before) is False:
                raise ModelError(
                    f"it reads {name!r}, which depends on its own output",
                    where=f"{model}: {node_label(node)}",
                    expected="a graph without cycles",
                )
            if before not in done:
                stack.append(before)
    # The file's order is kept if it is legal, because users know it.
    place = {position: i for i, position in enumerate(order)}
    legal = all(producer.get(name, -1) < p for p in order for name in (*nodes[p].input, *captured_names(nodes[p])))
    return sorted(order) if legal else sorted(order, key=place.__getitem__)
