"""Elementwise ONNX operators as PyTorch functions."""

from functools import reduce
from typing import Any

import onnx
import torch
from torch.nn import functional

from benchmarks.peers.torch_operators.node import OperatorNode, TensorFunction, Translator


def _direct(function: TensorFunction) -> Translator:
    """Return a translator for an operator for which PyTorch has a function with the same meaning."""
    return lambda node: function


def _variadic(function: TensorFunction) -> Translator:
    return lambda node: lambda *tensors: reduce(function, tensors)


def _divide(node: OperatorNode) -> TensorFunction:
    def divide(a: Any, b: Any) -> Any:
        # ONNX divides integers towards zero.
        return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")

    return divide


def _clip(node: OperatorNode) -> TensorFunction:
    low, high = node.number(1, "min"), node.number(2, "max")
    if low is None and high is None:
        return lambda x: x
    return lambda x: torch.clamp(x, low, high)


def _leaky_relu(node: OperatorNode) -> TensorFunction:
    slope = node.attributes.number("alpha", 0.01)
    return lambda x: functional.leaky_relu(x, slope)


def _hard_sigmoid(node: OperatorNode) -> TensorFunction:
    alpha, beta = node.attributes.number("alpha", 0.2), node.attributes.number("beta", 0.5)
    return lambda x: torch.clamp(alpha * x + beta, 0.0, 1.0)


def _gelu(node: OperatorNode) -> TensorFunction:
    approximate = node.expect("approximate", ("none", "tanh"), "none")
    return lambda x: functional.gelu(x, approximate=approximate)


def _cast(node: OperatorNode) -> TensorFunction:
    to = node.attributes.integer("to")
    kinds = {
        onnx.TensorProto.FLOAT: torch.float32,
        onnx.TensorProto.DOUBLE: torch.float64,
        onnx.TensorProto.FLOAT16: torch.float16,
        onnx.TensorProto.INT32: torch.int32,
        onnx.TensorProto.INT64: torch.int64,
        onnx.TensorProto.BOOL: torch.bool,
    }
    if to not in kinds:
        raise node.unsupported(f"to={onnx.TensorProto.DataType.Name(to)}")
    dtype = kinds[to]
    return lambda x: x.to(dtype)


_UNARY: dict[str, TensorFunction] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "Identity": lambda x: x,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": functional.softplus,
    "Sqrt": torch.sqrt,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, TensorFunction] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Pow": torch.pow,
    "Sub": torch.sub,
    "Where": torch.where,
}
ELEMENTWISE: dict[str, Translator] = {
    **{name: _direct(function) for name, function in (_UNARY | _BINARY).items()},
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Sum": _variadic(torch.add),
    "Cast": _cast,
    "Clip": _clip,
    "Div": _divide,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _leaky_relu,
}
