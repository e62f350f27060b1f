"""Replaces the calls of a model's local functions by their bodies.

ONNX's inliner does the replacement, but it drops the defaults of a function's attributes, and it copies a
function as often as it is called before it returns. So defaults are added to the calls first, from the
outermost functions inwards, since a call in a body may pass an attribute on; and the nodes are counted first.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import onnx
from onnx import inliner

from korch.errors import ModelError, UnsupportedError, quoted
from korch.frontend.infer import REFUSALS
from korch.frontend.names import all_nodes

MOST_NODES = 1 << 16
"""The most nodes that the calls of functions may become; nested calls can double them at each level."""

Key: TypeAlias = tuple[str, str, str]


def inline_functions(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return a model without local functions.

    `proto`: the model; it is returned itself if it has no functions, and never changed.

    Raises:
        ModelError: functions call each other in a cycle, or ONNX can't inline one.
        UnsupportedError: the calls become more than `MOST_NODES` nodes.

    Source:
        ONNX, IR specification, "Functions": an attribute that a call lacks has its default; without a default,
        the attributes that refer to it are left out.
    """
    if not proto.functions:
        return proto
    levels = _levels({_key(f): f for f in proto.functions}, name)
    _check_count(proto.graph, levels, name)
    result = _without_elements(proto)
    for level in levels:
        _add_defaults(result.graph.node, level)
        result.functions.extend(level.values())
        try:
            result = inliner.inline_local_functions(result, convert_version=True)
        except REFUSALS as error:
            raise ModelError(f"its functions can't be inlined ({' '.join(str(error).split())})", where=name) from error
        del result.functions[:]
    del result.graph.initializer[:]
    result.graph.initializer.extend(proto.graph.initializer)
    return result


def _key(item: onnx.FunctionProto | onnx.NodeProto) -> Key:
    """Return what identifies a function, of its definition or of a call."""
    domain = "" if item.domain == "ai.onnx" else item.domain
    return domain, item.name if isinstance(item, onnx.FunctionProto) else item.op_type, item.overload


def _levels(functions: Mapping[Key, onnx.FunctionProto], name: str) -> list[dict[Key, onnx.FunctionProto]]:
    """Return the functions so that each one comes after all that call it."""
    calls = {key: {_key(node) for node in all_nodes(f.node)} & functions.keys() for key, f in functions.items()}
    levels = []
    while calls:
        called = set().union(*calls.values())
        first = calls.keys() - called
        if not first:
            names = quoted(sorted(key[1] for key in called if calls[key]))
            raise ModelError("a function calls itself, or functions call each other in a cycle: " + names, where=name)
        levels.append({key: functions[key] for key in calls if key in first})
        calls = {key: callees for key, callees in calls.items() if key not in first}
    return levels


def _check_count(graph: onnx.GraphProto, levels: list[dict[Key, onnx.FunctionProto]], name: str) -> None:
    counts: dict[Key, int] = {}
    for level in reversed(levels):
        counts |= {key: sum(counts.get(_key(n), 1) for n in all_nodes(f.node)) for key, f in level.items()}
    count = sum(counts.get(_key(node), 1) for node in all_nodes(graph.node))
    if count > MOST_NODES:
        raise UnsupportedError(
            f"its functions call each other so often that it has {count} nodes",
            where=name,
            expected=f"at most {MOST_NODES}",
        )


def _without_elements(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model without functions whose initializers have only names, so that none is copied often."""
    result = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    result.graph.initializer.extend(onnx.TensorProto(name=tensor.name) for tensor in proto.graph.initializer)
    for part in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(result.graph, part).extend(getattr(proto.graph, part))
    return result


def _add_defaults(nodes: Iterable[onnx.NodeProto], functions: Mapping[Key, onnx.FunctionProto]) -> None:
    """Give each call of the functions the attributes that it lacks and that have a default."""
    for node in all_nodes(nodes):
        function = functions.get(_key(node))
        if function is not None:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(item for item in function.attribute_proto if item.name not in given)
