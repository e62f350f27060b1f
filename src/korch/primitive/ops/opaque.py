"""Opaque operations: one output of an ONNX operator that is kept whole.

An operator with several outputs becomes several opaque primitives that differ only in `output`; a
provider may run all of them in one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from korch.primitive.agreed import REFERENCE, RUNTIME, agreed, opinions_of
from korch.primitive.definitions import by_definition
from korch.primitive.dispute import Dispute, note
from korch.primitive.op import Array, Attributes, Category, Op, OutputOfSeveral, no_flop, require
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


REFERENCE_SECONDS = 2.0
"""The time after which `onnx.reference` is given up if two others compute a node."""


def _reference(inputs: Sequence[Array], attributes: OpaqueAttributes) -> Array:
    model = opaque_model(attributes)
    (node,), names = model.graph.node, [item.name for item in model.graph.output]
    named = dict(zip((item.name for item in model.graph.input), inputs, strict=True))
    found: Sequence[Any] | None = by_definition(
        node, [named[name] if name else None for name in node.input], attributes.opset
    )
    if found is None:
        # Other references compute in the node's types, even if all other primitives run in float64.
        types = [ValueType.parse(text).dtype.numpy for text in attributes.inputs]
        with np.errstate(all="ignore"):
            feeds = {name: x.astype(type_) for (name, x), type_ in zip(named.items(), types, strict=True)}
        opinions = opinions_of(model, feeds, REFERENCE_SECONDS)
        # The runtime runs the node in plans, so it can't be the only reference.
        opinions = {REFERENCE: opinions.pop(REFERENCE), **opinions}
        found, by = agreed(attributes.op_type, opinions) or (None, ())
        if found is None or by == (RUNTIME,):
            found, by = ReferenceEvaluator(model).run(names, feeds), (REFERENCE,)  # its error is the reason
        if len(by) == 1:
            note(Dispute(attributes.op_type, by, (), 0.0))
    out: Array = found[names.index(f"y{attributes.output}")]
    return out


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
    ),
)
