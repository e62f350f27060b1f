"""Normalizations, softmax and reductions as PyTorch functions."""

from typing import Any

import torch
from torch.nn import functional

from benchmarks.peers.torch_operators.node import OperatorNode, TensorFunction, Translator


def _batch_normalization(node: OperatorNode) -> TensorFunction:
    node.expect("training_mode", (0,), 0)
    epsilon = node.attributes.number("epsilon", 1e-5)
    return lambda x, scale, shift, mean, variance: functional.batch_norm(
        x, mean, variance, scale, shift, training=False, eps=epsilon
    )


def _instance_normalization(node: OperatorNode) -> TensorFunction:
    epsilon = node.attributes.number("epsilon", 1e-5)
    return lambda x, scale, shift: functional.instance_norm(x, weight=scale, bias=shift, eps=epsilon)


def _layer_normalization(node: OperatorNode) -> TensorFunction:
    axis, epsilon = node.attributes.integer("axis", -1), node.attributes.number("epsilon", 1e-5)
    if node.output_count > 1:
        raise node.unsupported("more than one output")

    def layer_normalization(x: Any, scale: Any, shift: Any = None) -> Any:
        return functional.layer_norm(x, x.shape[axis:], scale, shift, epsilon)

    return layer_normalization


def _softmax(node: OperatorNode) -> TensorFunction:
    if node.opset >= 13:
        axis = node.attributes.integer("axis", -1)
        return lambda x: torch.softmax(x, dim=axis)
    first = node.attributes.integer("axis", 1)  # before opset 13: over this axis and all later ones
    return lambda x: torch.softmax(x.flatten(first), dim=-1).reshape(x.shape)


def _reduction(function: TensorFunction) -> Translator:
    """Return a translator for a reduction `function(x, axes, keeps)`."""

    def translate(node: OperatorNode) -> TensorFunction:
        axes, keeps = node.integers(1, "axes"), bool(node.attributes.integer("keepdims", 1))
        if not axes and node.attributes.integer("noop_with_empty_axes", 0):
            return lambda x: x

        def reduce_(x: Any) -> Any:
            return function(x, tuple(axes or range(x.dim())), keeps)

        return reduce_

    return translate


def _arg_max(node: OperatorNode) -> TensorFunction:
    node.expect("select_last_index", (0,), 0)
    axis, keeps = node.attributes.integer("axis", 0), bool(node.attributes.integer("keepdims", 1))
    return lambda x: torch.argmax(x, dim=axis, keepdim=keeps)


NORMALIZATION: dict[str, Translator] = {
    "BatchNormalization": _batch_normalization,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "Softmax": _softmax,
    "ReduceMean": _reduction(torch.mean),
    "ReduceSum": _reduction(torch.sum),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMin": _reduction(torch.amin),
    "ArgMax": _arg_max,
}
