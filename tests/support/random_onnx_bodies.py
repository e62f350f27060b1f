"""Random operators with bodies, and calls of local functions."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from korch.primitive.op import Array
from tests.support.random_onnx_fragment import Writer
from tests.support.random_onnx_shapes import Rng, floats, pick


def _body(rng: Rng, names: list[str], out: str, scale: Any) -> list[Any]:
    """Return nodes that compute a value from others, which have the same shape."""
    nodes = [helper.make_node("Mul", [names[0], scale], [f"{out}_a"])]
    for i, name in enumerate(names[1:]):
        nodes.append(helper.make_node(pick(rng, "Add", "Sub", "Max"), [nodes[-1].output[0], name], [f"{out}_b{i}"]))
    return [*nodes, helper.make_node(pick(rng, "Tanh", "Sigmoid", "Relu"), [nodes[-1].output[0]], [out])]


def _value(name: str, array: Array, *shape: int) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


def scan(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.dtype != np.float32 or not x.size or x.ndim < 2:
        return False
    axis = int(rng.integers(0, x.ndim))
    one = [n for a, n in enumerate(x.shape) if a != axis]
    c = [numpy_helper.from_array(np.float32(0.5), "scale")]
    nodes = [*_body(rng, ["s", "v"], "t", "scale"), helper.make_node("Mul", ["t", "v"], ["y"])]
    ends = [[_value(n, x, *one) for n in names] for names in (("s", "v"), ("t", "y"))]
    body = helper.make_graph(nodes, "body", *ends, c)
    begin = w.constant(floats(rng, x, *one))
    given: dict[str, Any] = {"scan_input_axes": [axis], "scan_input_directions": [int(rng.integers(2))]}
    given |= {"scan_output_axes": [int(rng.integers(0, x.ndim))], "scan_output_directions": [int(rng.integers(2))]}
    outputs = int(rng.integers(1, 3))
    names = [f"{w.out}_state", w.out] if outputs == 2 else [w.out, f"{w.out}_all"]
    w.fragment.nodes.append(helper.make_node("Scan", [begin, source], names, body=body, num_scan_inputs=1, **given))
    return True


def loop(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.dtype != np.float32 or not x.size:
        return False
    trips = int(rng.integers(0, 6))
    nodes = _body(rng, ["v"], "t", "scale")
    constants = [numpy_helper.from_array(np.float32(0.7), "scale"), numpy_helper.from_array(np.int64(2), "limit")]
    is_cut = rng.random() < 0.3
    nodes.append(
        helper.make_node("Less", ["i", "limit"], ["go"]) if is_cut else helper.make_node("Identity", ["c"], ["go"])
    )
    nodes.append(helper.make_node("Identity", ["t"], ["y"]))
    i, c = (
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    )
    go = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    body = helper.make_graph(
        nodes, "body", [i, c, _value("v", x, *x.shape)], [go, *(_value(n, x, *x.shape) for n in ("t", "y"))], constants
    )
    is_all = bool(rng.integers(2)) and trips > 0
    names = [f"{w.out}_state", w.out] if is_all else [w.out, f"{w.out}_all"]
    count = w.constant(np.int64(trips))
    go_on = w.constant(np.array(rng.random() < 0.9)) if rng.integers(2) else ""
    w.fragment.nodes.append(helper.make_node("Loop", [count, go_on, source], names, body=body))
    return True


def branch(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add an If whose branches read values around it; the condition is a constant or depends on the data."""
    if x.dtype != np.float32 or not x.size:
        return False
    branches = {}
    for name in ("then_branch", "else_branch"):
        scale = numpy_helper.from_array(np.float32(rng.uniform(0.2, 0.9)), f"{name}_k")
        nodes = _body(rng, [source], f"{name}_y", scale.name)
        branches[name] = helper.make_graph(nodes, name, [], [_value(f"{name}_y", x, *x.shape)], [scale])
    if rng.integers(2):
        condition = w.constant(np.array(bool(rng.integers(2))))
    else:
        total = w.node("ReduceMax", [source], keepdims=0)
        condition = w.node("Greater", [total, w.constant(np.float32(0.3))])
    w.node("If", [condition], last=True, **branches)
    return True


def in_functions(rng: Rng, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with some nodes as calls of local functions, whose attributes may have defaults.

    A function may be called by another one. Nodes with bodies stay as they are, since bodies read values around them.
    """
    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.graph.node[:]
    imports = [helper.make_opsetid("", model.opset_import[0].version), helper.make_opsetid("local", 1)]
    for number, node in enumerate(model.graph.node):
        has_body = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if has_body or rng.random() < 0.4:
            found.graph.node.append(node)
            continue
        name, inputs = f"F{number}", [f"i{i}" if n else "" for i, n in enumerate(node.input)]
        outputs = [f"o{i}" if n else "" for i, n in enumerate(node.output)]
        inner = helper.make_node(node.op_type, inputs, outputs, domain=node.domain)
        given: list[Any] = []
        defaults: list[Any] = []
        names: list[str] = []
        for attribute in node.attribute:
            own = onnx.AttributeProto()
            match int(rng.integers(3)):
                case 0:
                    own.CopyFrom(attribute)
                case way:
                    own.name, own.type, own.ref_attr_name = attribute.name, attribute.type, attribute.name
                    (defaults if way == 1 else given).append(attribute)
                    names += [attribute.name] if way == 2 else []
            inner.attribute.append(own)
        params = [n for n in inputs if n]
        results = [n for n in outputs if n]
        made = helper.make_function("local", name, params, results, [inner], imports, names, defaults)
        found.functions.append(made)
        if rng.random() < 0.3 and not given:
            call = helper.make_node(name, params, results, domain="local")
            found.functions.append(helper.make_function("local", f"{name}o", params, results, [call], imports))
            name = f"{name}o"
        call = helper.make_node(name, [n for n in node.input if n], [n for n in node.output if n], domain="local")
        call.attribute.extend(given)
        found.graph.node.append(call)
    if found.functions:
        found.opset_import.append(helper.make_opsetid("local", 1))
    return found
