"""ONNX model of PyTorch's exporter -> the same model with operators only of types that ONNX's definitions have.

The exporter adds, sorts and compares booleans and small integers, which many operators of ONNX don't take. Their
operands are converted to wider types, and their results back. Integers of 8 and 16 bits wrap then, as in PyTorch, and
any number but 0 is true.
"""

from collections.abc import Iterator

import onnx

_KINDS = onnx.TensorProto
_SMALL = (_KINDS.BOOL, _KINDS.UINT8, _KINDS.INT8, _KINDS.UINT16, _KINDS.INT16)
_WIDER = {
    **dict.fromkeys(_SMALL, (_KINDS.INT32, _KINDS.INT64, _KINDS.FLOAT)),
    _KINDS.INT32: (_KINDS.INT64, _KINDS.DOUBLE),
}
"""For a type the types that hold all of its numbers, the best first."""


def widen_types(model: onnx.ModelProto) -> None:
    """Convert the operands of nodes whose types ONNX's definitions lack to wider types, and the results back."""
    graph = model.graph
    opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    nodes = [part for node in graph.node for part in _widened(node, types, opset)]
    del graph.node[:]
    graph.node.extend(nodes)


def _widened(node: onnx.NodeProto, types: dict[str, int], opset: int) -> Iterator[onnx.NodeProto]:
    """Yield a node, with conversions around it if its types are not legal."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset):
        yield node
        return
    schema = onnx.defs.get_schema(node.op_type, opset)
    legal = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
    kinds = [schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(node.input))]
    wide: dict[str, tuple[int, int]] = {}
    own_types = dict[str, int]()
    for name, kind in zip(node.input, kinds, strict=True):
        given = types.get(name, 0)
        if kind in legal and _text(given) not in legal[kind]:
            better = [each for each in _WIDER.get(given, ()) if _text(each) in legal[kind]]
            wide |= {kind: (given, better[0])} if better else {}
        own_types.setdefault(kind, given)
    own = onnx.NodeProto()
    own.CopyFrom(node)
    after = []
    for i, (name, kind) in enumerate(zip(node.input, kinds, strict=True)):
        if name and kind in wide:
            own.input[i] = f"{node.output[0]}:wide_input_{i}"
            yield onnx.helper.make_node("Cast", [name], [own.input[i]], to=wide[kind][1])
    for i, name in enumerate(node.output):
        kind = schema.outputs[min(i, len(schema.outputs) - 1)].type_str
        types.setdefault(name, own_types.get(kind, 0))  # the results of the exporter's functions are not declared
        if name and kind in wide:
            own.output[i] = f"{name}:wide"
            after.append(onnx.helper.make_node("Cast", [own.output[i]], [name], to=wide[kind][0]))
    yield own
    yield from after


def _text(kind: int) -> str:
    """Return a type as in ONNX's definitions."""
    return f"tensor({_KINDS.DataType.Name(kind).lower()})"
