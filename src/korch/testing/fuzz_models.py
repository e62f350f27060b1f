"""Generators of hostile and of random ONNX models, all from a seeded generator of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

SIZES = (0, 1, 2, 3, 7)
HUGE = (-1, 0, 1 << 31, 1 << 62, (1 << 63) - 1)
FLOAT = onnx.TensorProto.FLOAT


def mutate(rng: np.random.Generator, content: bytes) -> bytes:
    """Return a model with one thing changed, or a few bytes."""
    if rng.integers(4) == 0:
        return _bytes(rng, content)
    model = onnx.ModelProto.FromString(content)
    for _ in range(int(rng.integers(1, 3))):
        change = _CHANGES[int(rng.integers(len(_CHANGES)))]
        change(rng, model)
    return bytes(model.SerializeToString())


def _bytes(rng: np.random.Generator, content: bytes) -> bytes:
    data = bytearray(content)
    match int(rng.integers(3)):
        case 0:
            del data[int(rng.integers(len(data))) :]
        case 1:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        case _:
            at = int(rng.integers(len(data)))
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(data)


def _pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))] if len(items) else None


def _attribute(rng: np.random.Generator, model: Any) -> None:
    attribute = _pick(rng, _pick(rng, model.graph.node).attribute)
    if attribute is None:
        return
    match int(rng.integers(5)):
        case 0:
            attribute.i = int(_pick(rng, HUGE))
        case 1:
            attribute.f = float(_pick(rng, (np.nan, np.inf, -1e30, 0.0)))
        case 2:
            attribute.s = b"\xff\xfe"
        case 3:
            attribute.ints.append(int(_pick(rng, HUGE)))
        case _:
            attribute.type = int(rng.integers(0, 15))


def _drop_attribute(rng: np.random.Generator, model: Any) -> None:
    node = _pick(rng, model.graph.node)
    if node.attribute:
        del node.attribute[int(rng.integers(len(node.attribute)))]


def _dimension(rng: np.random.Generator, model: Any) -> None:
    item = _pick(rng, [*model.graph.input, *model.graph.output])
    dims = item.type.tensor_type.shape.dim
    if dims and rng.integers(4):
        _pick(rng, dims).dim_value = int(_pick(rng, (*HUGE, 2, 3)))
    else:
        dims.add().dim_value = int(_pick(rng, (0, 1, 3)))


def _element_type(rng: np.random.Generator, model: Any) -> None:
    item = _pick(rng, [*model.graph.input, *model.graph.output])
    item.type.tensor_type.elem_type = int(rng.integers(0, 26))


def _wire(rng: np.random.Generator, model: Any) -> None:
    node = _pick(rng, model.graph.node)
    names = [n for other in model.graph.node for n in (*other.input, *other.output)]
    names += ["", "nowhere", *(item.name for item in model.graph.input)]
    fields = node.input if rng.integers(3) else node.output
    if fields:
        fields[int(rng.integers(len(fields)))] = _pick(rng, names)


def _extra_node(rng: np.random.Generator, model: Any) -> None:
    node = model.graph.node.add()
    node.CopyFrom(_pick(rng, model.graph.node[:-1]) or helper.make_node("Relu", ["a"], ["a"]))


def _operator(rng: np.random.Generator, model: Any) -> None:
    node = _pick(rng, model.graph.node)
    names = ("Relu", "Conv", "Reshape", "Loop", "If", "Nonsense", "MatMul", "Resize", "Gather")
    node.op_type = _pick(rng, names)
    if rng.integers(4) == 0:
        node.domain = _pick(rng, ("ai.onnx", "ai.onnx.ml", "my.own", "com.microsoft"))


def _initializer(rng: np.random.Generator, model: Any) -> None:
    tensor = _pick(rng, model.graph.initializer)
    if tensor is None:
        item = _pick(rng, model.graph.input)
        if item is None:
            return
        tensor = model.graph.initializer.add()
        tensor.name, tensor.data_type = item.name, FLOAT
        tensor.dims.append(3)
    match int(rng.integers(4)):
        case 0:
            tensor.raw_data = rng.bytes(int(rng.integers(0, 20)))
        case 1:
            tensor.dims.append(int(_pick(rng, HUGE)))
        case 2:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (
                ("location", _pick(rng, ("../../etc/passwd", "/etc/passwd", "none", ""))),
                ("offset", str(_pick(rng, HUGE))),
                ("length", str(_pick(rng, HUGE))),
            ):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, value
        case _:
            tensor.data_type = int(rng.integers(0, 26))


def _opset(rng: np.random.Generator, model: Any) -> None:
    _pick(rng, model.opset_import).version = int(_pick(rng, (0, 1, 5, 7, 11, 25, 999, -3)))


def _outputs(rng: np.random.Generator, model: Any) -> None:
    names = [output.name for output in model.graph.output]
    if rng.integers(2):
        del model.graph.output[:]
    else:
        model.graph.output.add().name = _pick(rng, ("nowhere", *names[:1]))


_CHANGES: tuple[Callable[[np.random.Generator, Any], None], ...] = (
    _attribute,
    _attribute,
    _drop_attribute,
    _dimension,
    _dimension,
    _element_type,
    _wire,
    _wire,
    _extra_node,
    _operator,
    _initializer,
    _initializer,
    _opset,
    _outputs,
)


def random_model(rng: np.random.Generator, steps: int | None = None) -> onnx.ModelProto:
    """Return a model of operators of random types and attributes on small float32 tensors."""
    shape = [int(_pick(rng, SIZES)) for _ in range(int(rng.integers(1, 5)))]
    nodes: list[Any] = []
    constants: list[Any] = []
    known = {"x": shape}
    for i in range(steps or int(rng.integers(1, 7))):
        source = _pick(rng, list(known))
        made = _pick(rng, _STEPS)(rng, source, known, f"v{i}", constants)
        nodes += made[0]
        known[f"v{i}"] = made[1]
    last = f"v{i}"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info(last, FLOAT, known[last])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


Made = tuple[list[Any], list[int]]
Known = dict[str, list[int]]


def _constant(constants: list[Any], name: str, array: Any) -> str:
    constants.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return name


def _unary(rng: np.random.Generator, x: str, known: Known, out: str, _: list[Any]) -> Made:
    op = _pick(
        rng,
        (
            "Relu",
            "Sigmoid",
            "Tanh",
            "Neg",
            "Abs",
            "Sqrt",
            "Softplus",
            "Erf",
            "Elu",
            "HardSwish",
            "Floor",
            "Mish",
            "Softsign",
            "Exp",
        ),
    )
    return [helper.make_node(op, [x], [out])], known[x]


def _binary(rng: np.random.Generator, x: str, known: Known, out: str, constants: list[Any]) -> Made:
    same = [name for name, shape in known.items() if shape == known[x]]
    other = _pick(rng, same)
    if rng.integers(2):
        small = [n if rng.integers(2) else 1 for n in known[x]]
        other = _constant(constants, f"{out}_c", rng.uniform(0.5, 2, small).astype(np.float32))
    op = _pick(rng, ("Add", "Sub", "Mul", "Div", "Max", "Min"))
    return [helper.make_node(op, [x, other], [out])], known[x]


def _transpose(rng: np.random.Generator, x: str, known: Known, out: str, _: list[Any]) -> Made:
    perm = [int(i) for i in rng.permutation(len(known[x]))]
    return [helper.make_node("Transpose", [x], [out], perm=perm)], [known[x][i] for i in perm]


def _reduce(rng: np.random.Generator, x: str, known: Known, out: str, constants: list[Any]) -> Made:
    shape = known[x]
    axis = int(rng.integers(len(shape)))
    if not shape[axis]:
        return _unary(rng, x, known, out, constants)
    op = _pick(rng, ("ReduceSum", "ReduceMax", "ReduceMean", "ReduceL2", "Softmax", "LogSoftmax"))
    if "Softmax" in op:
        return [helper.make_node(op, [x], [out], axis=axis)], shape
    if op == "ReduceSum":
        axes = _constant(constants, f"{out}_axes", np.array([axis]))
        node = helper.make_node(op, [x, axes], [out], keepdims=1)
    else:
        axes = _constant(constants, f"{out}_axes", np.array([axis]))
        node = helper.make_node(op, [x, axes], [out], keepdims=1)
    return [node], [*shape[:axis], 1, *shape[axis + 1 :]]


def _reshape(rng: np.random.Generator, x: str, known: Known, out: str, constants: list[Any]) -> Made:
    shape = [int(np.prod(known[x])), 1]
    wanted = _constant(constants, f"{out}_shape", np.array(shape))
    return [helper.make_node("Reshape", [x, wanted], [out], allowzero=1)], shape


def _matmul(rng: np.random.Generator, x: str, known: Known, out: str, constants: list[Any]) -> Made:
    shape = known[x]
    if len(shape) < 2:
        return _unary(rng, x, known, out, constants)
    n = int(rng.integers(1, 20))
    weights = rng.standard_normal((shape[-1], n)).astype(np.float32)
    name = _constant(constants, f"{out}_w", weights)
    return [helper.make_node("MatMul", [x, name], [out])], [*shape[:-1], n]


def _conv(rng: np.random.Generator, x: str, known: Known, out: str, constants: list[Any]) -> Made:
    shape = known[x]
    if len(shape) != 4 or 0 in shape:
        return _unary(rng, x, known, out, constants)
    n, k = int(rng.integers(1, 20)), int(_pick(rng, (1, 3)))
    weights = rng.standard_normal((n, shape[1], k, k)).astype(np.float32)
    name = _constant(constants, f"{out}_w", weights)
    node = helper.make_node("Conv", [x, name], [out], pads=[k // 2] * 4)
    return [node], [shape[0], n, *shape[2:]]


def _concat(rng: np.random.Generator, x: str, known: Known, out: str, _: list[Any]) -> Made:
    axis = int(rng.integers(len(known[x])))
    shape = list(known[x])
    shape[axis] *= 2
    return [helper.make_node("Concat", [x, x], [out], axis=axis)], shape


def _pad(rng: np.random.Generator, x: str, known: Known, out: str, constants: list[Any]) -> Made:
    rank = len(known[x])
    pads = rng.integers(0, 3, 2 * rank)
    name = _constant(constants, f"{out}_pads", pads.astype(np.int64))
    shape = [n + int(a + b) for n, a, b in zip(known[x], pads[:rank], pads[rank:], strict=True)]
    return [helper.make_node("Pad", [x, name], [out])], shape


_STEPS: tuple[Callable[..., Made], ...] = (
    _unary,
    _unary,
    _binary,
    _binary,
    _transpose,
    _reduce,
    _reshape,
    _matmul,
    _conv,
    _concat,
    _pad,
)
