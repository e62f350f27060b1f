"""Random changes that make ONNX models hostile, drawn from a seeded generator."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

HUGE = (-1, 0, 1 << 31, 1 << 62, (1 << 63) - 1)
FLOAT = onnx.TensorProto.FLOAT


def mutate(rng: np.random.Generator, content: bytes) -> bytes:
    """Return a model with one or two random changes to its content or, in one of four cases, to its bytes."""
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
