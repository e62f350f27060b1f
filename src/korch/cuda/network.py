"""Converts a group into a network for TensorRT: an ONNX model of operators that TensorRT supports.

Weights are inputs of the model until `with_constants` makes them constants. So layers that differ in their
weights only share a kernel, and engines are still built with constant weights. Element types are
preserved: TensorRT is asked for a strongly typed network.
"""

from collections.abc import Mapping

import onnx

from korch.candidate.candidate import Group, Refusal
from korch.primitive.as_onnx import OnnxNodes, onnx_tensor
from korch.primitive.graph import Constant, Primitive, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.layout import PadAttributes, SliceAttributes
from korch.primitive.types import DType

FLOATS = (DType.F32, DType.F16, DType.BF16)
ELEMENTWISE = frozenset(
    (
        "neg",
        "abs",
        "sqrt",
        "exp",
        "log",
        "erf",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "floor",
        "ceil",
        "reciprocal",
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "max",
        "min",
        "cast",
        "round_tf32",
    )
)
OTHERS = frozenset(("broadcast", "reshape", "transpose", "slice", "pad", "concat", "reduce_sum", "matmul", "conv"))
MOST_RANK = 8


def refusal_of(group: Group) -> Refusal | None:
    """Return why a group can't be a network for TensorRT; None if it can."""
    body = group.body
    linear = body.linear
    if not linear:
        return Refusal("it has no product or convolution")
    for type_ in body.types:
        if type_.dtype not in FLOATS:
            return Refusal(f"{type_.dtype.value} is not a type that TensorRT networks take")
        if type_.rank > MOST_RANK:
            return Refusal(f"it has {type_.rank} axes, at most {MOST_RANK} are possible")
        if not type_.size:
            return Refusal("a tensor is empty")
    for primitive in body.primitives:
        if primitive.op not in ELEMENTWISE | OTHERS:
            return Refusal(f"{primitive.op} is not among its operators")
        reason = _trouble(group, primitive)
        if reason:
            return Refusal(reason)
    return None


def _trouble(group: Group, p: Primitive) -> str:
    """Return why a primitive's attributes or arguments are not supported; "" if they are."""
    body = group.body
    match p.attributes:
        case SliceAttributes(_, _, step) if min(step, default=1) < 1:
            return "a slice goes backwards"
        case PadAttributes(_, _, mode, _) if mode != "constant":
            return f"a pad repeats elements ({mode})"
    if p.op in ("max", "min") and not any(_number(body, v) for v in p.inputs):
        return f"its {p.op} of two tensors would lose a NaN"
    if p.op == "conv":
        known = {body.inputs[i][1] for i in group.constant_inputs}
        if p.inputs[1] not in known:
            return "the weights of a convolution are computed"
        if len(body.types[p.inputs[0]].shape) > 5:
            return "a convolution has more than three axes"
    return ""


def _number(body: PrimitiveGraph, value: int) -> bool:
    """Return whether a value is a uniform constant other than NaN."""
    constant = body.constants.get(value)
    return constant is not None and constant.is_uniform and bool(constant.scalar == constant.scalar)


def network_of(group: Group) -> onnx.ModelProto:
    """Return the network of a group that `refusal_of` accepts.

    Its inputs and outputs are those of the group's body, i0, i1, ... and o0, o1, ....
    """
    model = _Nodes(group.body).model()
    onnx.checker.check_model(model)
    return model


def with_constants(model: onnx.ModelProto, constants: Mapping[str, Array]) -> onnx.ModelProto:
    """Return a copy of a network in which some inputs are constants."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    inputs = [item for item in made.graph.input if item.name not in constants]
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    made.graph.initializer.extend(onnx_tensor(name, array, DType.of(array.dtype)) for name, array in constants.items())
    return made


class _Nodes(OnnxNodes):
    """Makes the nodes in forms that TensorRT fuses well and that propagate NaN."""

    def __init__(self, body: PrimitiveGraph) -> None:
        super().__init__(body, "a network for TensorRT")

    def constant(self, value: int, constant: Constant) -> str:
        """Return the name of a constant; a uniform constant has only one element where that is allowed."""
        dtype = self.body.types[value].dtype
        if constant.is_uniform and self.may_be_spread(value):
            one = constant.array.reshape(-1)[:1].reshape((1,) * constant.array.ndim)
            return self.literal(one, dtype)
        return self.literal(constant.array, dtype)

    def primitive(self, p: Primitive) -> str:
        """Add the nodes of a primitive; return the name of its output."""
        if p.op == "broadcast" and self.may_be_spread(p.output):
            return self.names[p.inputs[0]]
        if p.op in ("max", "min"):  # TensorRT's own max and min do not both propagate NaN
            number = next(v for v in p.inputs if _number(self.body, v))
            other = next((v for v in p.inputs if v != number), number)
            a, b = self.names[other], self.names[number]
            is_other = self.add("Less", [a, b] if p.op == "max" else [b, a])
            return self.add("Where", [is_other, b, a])
        return super().primitive(p)

    def may_be_spread(self, value: int) -> bool:
        """Return whether a value may stay unbroadcast: all readers are elementwise with an argument of full shape."""
        body = self.body
        if value in {v for _, v in body.outputs}:
            return False
        readers = [body.primitives[i] for i in body.consumers[value]]
        return all(
            reader.op in ELEMENTWISE and any(v != value and not self.is_spread(v) for v in reader.inputs)
            for reader in readers
        )

    def is_spread(self, value: int) -> bool:
        """Return whether a value may have fewer elements in the network: it is a constant or a broadcast."""
        made_by = [p.op for p in self.body.primitives if p.output == value]
        return value in self.body.constants or made_by == ["broadcast"]
