"""Normalizations, softmax and reductions as PyTorch functions."""

from __future__ import annotations

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


def _group_normalization(node: OperatorNode) -> TensorFunction:
    epsilon, groups = node.attributes.number("epsilon", 1e-5), node.attributes.integer("num_groups")
    if node.opset < 21:
        raise node.unsupported("one scale a group (before opset 21)")
    return lambda x, scale, shift: functional.group_norm(x, groups, scale, shift, epsilon)


def _layer_normalization(node: OperatorNode) -> TensorFunction:
    axis, epsilon = node.attributes.integer("axis", -1), node.attributes.number("epsilon", 1e-5)
    if node.output_count > 1:
        raise node.unsupported("more than one output")

    def layer_normalization(x: Any, scale: Any, shift: Any = None) -> Any:
        return functional.layer_norm(x, x.shape[axis:], scale, shift, epsilon)

    return layer_normalization


def _softmax(function: TensorFunction) -> Translator:
    def translate(node: OperatorNode) -> TensorFunction:
        if node.opset >= 13:
            axis = node.attributes.integer("axis", -1)
            return lambda x: function(x, dim=axis)
        first = node.attributes.integer("axis", 1)  # before opset 13: over this axis and all later ones

        def over_tail(x: Any) -> Any:
            return function(x.flatten(first), dim=-1).reshape(x.shape)

        return over_tail

    return translate


def _axes_of(node: OperatorNode) -> list[int] | None:
    """Return the axes of a reduction: an input in newer opsets, an attribute in older ones."""
    return node.integers(1, "axes")


def _reduction(function: TensorFunction) -> Translator:
    """Return a translator for a reduction `function(x, axes, keeps)`."""

    def translate(node: OperatorNode) -> TensorFunction:
        axes, keeps = _axes_of(node), bool(node.attributes.integer("keepdims", 1))
        if not axes and node.attributes.integer("noop_with_empty_axes", 0):
            return lambda x: x

        def reduce_(x: Any) -> Any:
            return function(x, tuple(axes or range(x.dim())), keeps)

        return reduce_

    return translate


def _product(x: Any, axes: tuple[int, ...], keeps: bool) -> Any:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keeps)
    return x


def _arg(function: TensorFunction) -> Translator:
    def translate(node: OperatorNode) -> TensorFunction:
        node.expect("select_last_index", (0,), 0)
        axis, keeps = node.attributes.integer("axis", 0), bool(node.attributes.integer("keepdims", 1))
        return lambda x: function(x, dim=axis, keepdim=keeps)

    return translate


NORMALIZATION: dict[str, Translator] = {
    "BatchNormalization": _batch_normalization,
    "InstanceNormalization": _instance_normalization,
    "GroupNormalization": _group_normalization,
    "LayerNormalization": _layer_normalization,
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceSum": _reduction(torch.sum),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMin": _reduction(torch.amin),
    "ReduceL2": _reduction(lambda x, axes, keeps: torch.linalg.vector_norm(x, 2, axes, keeps)),
    "ReduceProd": _reduction(_product),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
}
