"""Operators of the domain com.microsoft that ONNX Runtime's optimizer writes in place of several of the standard."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from korch.errors import UnsupportedError
from korch.frontend.definition import Definition

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}
"""The attributes of activations, in the order of an operator's parameters; those of Clip are inputs."""


def _activated(d: Definition, x: str, parameters: tuple[float, ...]) -> None:
    """Make an activation of `x` the node's output."""
    name = d.attributes.text("activation", "")
    if name not in _PARAMETERS and name:
        raise UnsupportedError(f"its activation is {name}", d.where, "one of " + ", ".join(_PARAMETERS))
    if name == "Clip":
        d.end(d.op(name, x, *map(d.number, parameters)))
    else:
        given: dict[str, Any] = dict(zip(_PARAMETERS.get(name, ()), parameters, strict=False))
        d.end(d.op(name, x, **given) if name else x)


def _convolution(d: Definition) -> None:
    names = [d.needed(0, "the data"), d.needed(1, "the weights"), *filter(None, [d.optional(2)])]
    y = d.rest("Conv", *names, without=("activation", "activation_params"))
    if d.optional(3):
        y = d.op("Add", y, d.optional(3))
    _activated(d, y, d.attributes.numbers("activation_params", ()))


def _product_of_matrices(d: Definition) -> None:
    kinds = [f"activation_{kind}" for kind in ("alpha", "beta", "gamma")]
    y = d.rest("Gemm", *filter(None, d.node.input), without=("activation", *kinds))
    _activated(d, y, tuple(d.attributes.number(kind) for kind in kinds if kind in d.attributes))


def _product(d: Definition) -> None:
    sides = []
    for i, side in enumerate("AB"):
        name, rank = d.needed(i, "a factor"), len(d.shape(d.node.input[i]))
        if d.attributes.get(f"transBatch{side}", 0):
            raise UnsupportedError(f"it moves the batch of {side} (transBatch{side})", d.where, "0")
        if d.attributes.get(f"trans{side}", 0) and rank > 1:
            name = d.op("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])
        sides.append(name)
    y, alpha = d.op("MatMul", *sides), d.attributes.number("alpha", 1.0)
    d.end(d.op("Mul", y, _like(d, alpha)) if alpha != 1 else y)


def _like(d: Definition, value: float) -> str:
    """Add a constant of the type of the node's first input."""
    return d.constant(np.array(value, d.dtype(d.node.input[0])))


def _gelu(d: Definition) -> None:
    """x/2 (1 + erf(x/sqrt 2)), of `x` plus a bias if there is one."""
    x = d.needed(0, "the data")
    x = d.op("Add", x, d.optional(1)) if d.optional(1) else x
    both = d.op("Add", d.op("Erf", d.op("Mul", x, _like(d, math.sqrt(0.5)))), _like(d, 1.0))
    d.end(d.op("Mul", d.op("Mul", x, _like(d, 0.5)), both))


def _fast_gelu(d: Definition) -> None:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), of `x` plus a bias if there is one."""
    x = d.needed(0, "the data")
    x = d.op("Add", x, d.optional(1)) if d.optional(1) else x
    square = d.op("Mul", d.op("Mul", x, x), _like(d, 0.044715 * math.sqrt(2 / math.pi)))
    bent = d.op("Tanh", d.op("Mul", x, d.op("Add", square, _like(d, math.sqrt(2 / math.pi)))))
    d.end(d.op("Mul", d.op("Mul", x, _like(d, 0.5)), d.op("Add", bent, _like(d, 1.0))))


def _quick_gelu(d: Definition) -> None:
    x = d.needed(0, "the data")
    d.end(d.op("Mul", x, d.op("Sigmoid", d.op("Mul", x, _like(d, d.attributes.number("alpha", 1.702))))))


def _skipped(d: Definition, scale: int, bias: int) -> tuple[str, str]:
    """Return the sum of two inputs, and of a bias if there is one, and the scale of a normalization of the sum."""
    outputs = [*d.node.output, "", "", ""]
    if any(outputs[1:3]):
        raise UnsupportedError("its outputs of means are read", d.where, hint="Export the model without them")
    x = d.op("Add", d.needed(0, "the data"), d.needed(1, "what is skipped"))
    x = d.op("Add", x, d.optional(bias)) if d.optional(bias) else x
    if outputs[3]:
        d.op("Identity", x, output=outputs[3])
    return x, d.needed(scale, "the scale")


def _skip_normalization(d: Definition) -> None:
    """The layer normalization of a sum, and the sum."""
    if d.opset < 17:
        raise UnsupportedError(f"the model uses opset {d.opset}", d.where, "at least 17")
    names = [*_skipped(d, 2, 4), *filter(None, [d.optional(3)])]
    d.end(d.op("LayerNormalization", *names, axis=-1, epsilon=d.attributes.number("epsilon", 1e-12)))


def _skip_root(d: Definition) -> None:
    """The normalization of a sum by its root mean square, and the sum."""
    _root(d, *_skipped(d, 2, 3), d.attributes.number("epsilon", 1e-12))


def _normalization(d: Definition) -> None:
    rank = len(d.shape(d.needed(0, "the data")))
    if d.attributes.integer("axis", -1) % rank != rank - 1 or any(d.node.output[1:2]):
        what = "it normalizes several axes, or its output of roots is read"
        raise UnsupportedError(what, d.where, "the last axis, and one output")
    _root(d, d.node.input[0], d.needed(1, "the scale"), d.attributes.number("epsilon", 1e-5))


def _root(d: Definition, x: str, scale: str, epsilon: float) -> None:
    """Make `x` divided by the root of its mean square along the last axis, times a scale, the node's output."""
    wide, size = d.widened(x), d.shape(scale)[-1]
    total = d.op("ReduceSum", d.op("Mul", wide, wide), d.constant(np.array([-1])), keepdims=1)
    mean = d.op("Add", d.op("Mul", total, d.number(1 / size)), d.number(epsilon))
    d.end(d.op("Mul", d.narrowed(d.op("Div", wide, d.op("Sqrt", mean))), scale))


FUSED: Mapping[str, Callable[[Definition], None]] = {
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "FusedConv": _convolution,
    "FusedGemm": _product_of_matrices,
    "FusedMatMul": _product,
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _normalization,
    "SkipLayerNormalization": _skip_normalization,
    "SkipSimplifiedLayerNormalization": _skip_root,
}
