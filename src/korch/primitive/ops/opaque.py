"""Opaque operations: one output of an ONNX operator that is kept whole.

An operator with several outputs becomes several opaque primitives that differ only in `output`; a
provider may run all of them in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from korch.primitive.op import Array, Attributes, Category, Op, OutputOfSeveral, Sample, no_flop, require
from korch.primitive.types import DType, ValueType


@dataclass(frozen=True, slots=True)
class OpaqueAttributes(OutputOfSeveral, Attributes):
    """An ONNX node as data.

    Attributes:
        op_type: the operator's name.
        domain: its domain; "" for ONNX's own.
        opset: the version of the domain.
        node: the serialized NodeProto in hexadecimal, with names x0, x1, ... and y0, y1, ...
            ("" where an optional input is left out).
        inputs: the types of the inputs that are present, as text.
        outputs: the types of all of its outputs, as text ("" where one is omitted).
        output: the position of the output that this primitive computes.
    """

    op_type: str
    domain: str
    opset: int
    node: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output: int


def onnx_type(dtype: DType) -> int:
    """Return ONNX's number for an element type."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype.numpy))


def opaque_model(attributes: OpaqueAttributes) -> onnx.ModelProto:
    """Return a model of only this operator, with inputs x0, x1, ... and outputs y0, y1, ...."""
    node = onnx.NodeProto.FromString(bytes.fromhex(attributes.node))

    def describe(names: Sequence[str], texts: Sequence[str]) -> list[onnx.ValueInfoProto]:
        types = [ValueType.parse(text) for text in texts if text]
        given = [name for name in dict.fromkeys(names) if name]
        return [
            onnx.helper.make_tensor_value_info(name, onnx_type(type_.dtype), type_.shape)
            for name, type_ in zip(given, types, strict=True)
        ]

    graph = onnx.helper.make_graph(
        [node], attributes.op_type, describe(node.input, attributes.inputs), describe(node.output, attributes.outputs)
    )
    opsets = [onnx.helper.make_opsetid(attributes.domain, attributes.opset)]
    if attributes.domain:
        opsets.append(onnx.helper.make_opsetid("", 17))
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _infer(inputs: Sequence[ValueType], attributes: OpaqueAttributes) -> ValueType:
    given = tuple(str(type_) for type_ in inputs)
    require(given == attributes.inputs, f"opaque: inputs are {given}, not {attributes.inputs}")
    inside = 0 <= attributes.output < len(attributes.outputs)
    require(inside, f"opaque: there is no output {attributes.output}")
    return ValueType.parse(attributes.outputs[attributes.output])


def _gathered_elements(inputs: Sequence[Array], axis: int = 0) -> Array:
    """Return the elements along an axis that indices choose; `onnx.reference` fails for more than 32 elements."""
    data, index = inputs
    size, axis = data.shape[axis], axis % data.ndim
    part = data[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(index.shape))]
    places = np.clip(np.where(index < 0, index + size, index), 0, size - 1).astype(np.int64)
    return np.take_along_axis(part, places, axis)


def _running(accumulate: Callable[..., Array], first: int) -> Callable[..., Array]:
    def running(inputs: Sequence[Array], exclusive: int = 0, reverse: int = 0) -> Array:
        axis = int(inputs[1].reshape(-1)[0])
        x = np.moveaxis(inputs[0], axis, -1)[..., :: -1 if reverse else 1]
        wide = x.astype(np.float64) if DType.of(x.dtype).is_float else x
        if exclusive:
            wide = np.concatenate([np.full((*x.shape[:-1], 1), first, wide.dtype), wide], -1)[..., : x.shape[-1]]
        found = accumulate(wide, -1, dtype=wide.dtype).astype(x.dtype)
        return np.moveaxis(found[..., :: -1 if reverse else 1], -1, axis)

    return running


_DEFINITIONS: dict[str, Callable[..., Array]] = {
    "GatherElements": _gathered_elements,
    "CumSum": _running(np.cumsum, 0),
    "CumProd": _running(np.cumprod, 1),
}
"""Operators that are computed here, exactly and in any type that inputs have: by name, of inputs and attributes."""


def _reference(inputs: Sequence[Array], attributes: OpaqueAttributes) -> Array:
    if attributes.op_type in _DEFINITIONS and not attributes.domain:
        node = onnx.NodeProto.FromString(bytes.fromhex(attributes.node))
        given = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        return _DEFINITIONS[attributes.op_type](inputs, **given)
    # An opaque operator runs in its own types, even if all other primitives run in float64.
    types = [ValueType.parse(text) for text in attributes.inputs]
    evaluator = ReferenceEvaluator(opaque_model(attributes))
    with np.errstate(all="ignore"):
        feeds = {f"x{i}": x.astype(type_.dtype.numpy) for i, (x, type_) in enumerate(zip(inputs, types, strict=True))}
        result = evaluator.run([f"y{attributes.output}"], feeds)[0]
    out: Array = result
    return out


def _sample(input_text: str, output_text: str) -> Sample:
    node = onnx.helper.make_node("Elu", ["x0"], ["y0"], alpha=2.0)
    attributes = OpaqueAttributes("Elu", "", 17, node.SerializeToString().hex(), (input_text,), (output_text,), 0)
    return Sample(("f32[2,3]",), attributes)


ROWS: tuple[Op, ...] = (
    Op(
        name="opaque",
        category=Category.OPAQUE,
        arity=None,
        attributes=OpaqueAttributes,
        infer=_infer,
        reference=_reference,
        work_flop=no_flop,
        source="the ONNX operator that it holds",
        samples=(_sample("f32[2,3]", "f32[2,3]"),),
        refusals=(_sample("f32[3,2]", "f32[3,2]"),),
    ),
)
