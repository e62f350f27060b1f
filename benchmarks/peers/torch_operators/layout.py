"""Operators that move, slice and concatenate data, as PyTorch functions."""

from typing import Any

import torch
from torch.nn import functional

from benchmarks.peers.torch_operators.node import OperatorNode, TensorFunction, Translator


def _reshape(node: OperatorNode) -> TensorFunction:
    shape = node.integers(1) or []
    copies_zero = not node.attributes.integer("allowzero", 0)

    def reshape(x: Any) -> Any:
        if copies_zero and 0 in shape:
            return x.reshape([n or x.shape[i] for i, n in enumerate(shape)])
        return x.reshape(shape)

    return reshape


def _transpose(node: OperatorNode) -> TensorFunction:
    order = node.attributes.get("perm")
    return lambda x: x.permute(order or tuple(reversed(range(x.dim()))))


def _flatten(node: OperatorNode) -> TensorFunction:
    axis = node.attributes.integer("axis", 1)

    def flatten(x: Any) -> Any:
        rows = 1
        for size in x.shape[:axis]:
            rows *= size
        return x.reshape(rows, -1)

    return flatten


def _unsqueeze(node: OperatorNode) -> TensorFunction:
    axes = node.integers(1, "axes") or []

    def unsqueeze(x: Any) -> Any:
        rank = x.dim() + len(axes)
        for axis in sorted(a % rank for a in axes):
            x = x.unsqueeze(axis)
        return x

    return unsqueeze


def _concat(node: OperatorNode) -> TensorFunction:
    axis = node.attributes.integer("axis")
    return lambda *tensors: torch.cat(tensors, dim=axis)


def _split(node: OperatorNode) -> TensorFunction:
    axis, sizes = node.attributes.integer("axis", 0), node.integers(1, "split")
    parts = node.output_count

    def split(x: Any) -> Any:
        return torch.split(x, sizes or -(-x.shape[axis] // parts), dim=axis)

    return split


def _slice(node: OperatorNode) -> TensorFunction:
    starts, ends = node.integers(1, "starts") or [], node.integers(2, "ends") or []
    axes = node.integers(3, "axes") or list(range(len(starts)))
    steps = node.integers(4) or [1] * len(starts)
    # Starts and ends far outside of the axis are clamped, because PyTorch warns about the largest integers.
    starts, ends = ([min(max(n, -(1 << 62)), 1 << 62) for n in own] for own in (starts, ends))
    cuts = list(zip(axes, starts, ends, steps, strict=True))

    def slice_(x: Any) -> Any:
        for axis, start, end, step in cuts:
            if step > 0:
                x = x[(*[slice(None)] * (axis % x.dim()), slice(start, end, step))]
            else:  # PyTorch has no negative steps
                # Not `slice.indices`, which the tracer of `torch.compile` does not support in all versions.
                first, last = (max(-1, min(n + x.shape[axis] * (n < 0), x.shape[axis] - 1)) for n in (start, end))
                x = torch.index_select(x, axis, torch.arange(first, min(first, last), step, device=x.device))
        return x

    return slice_


def _gather(node: OperatorNode) -> TensorFunction:
    axis = node.attributes.integer("axis", 0)

    def gather(x: Any, indices: Any) -> Any:
        place = axis % x.dim()
        indices = torch.where(indices < 0, indices + x.shape[place], indices)
        shape = x.shape[:place] + indices.shape + x.shape[place + 1 :]
        return torch.index_select(x, place, indices.reshape(-1)).reshape(shape)

    return gather


def _pad(node: OperatorNode) -> TensorFunction:
    mode = node.expect("mode", ("constant", "reflect", "edge"), "constant")
    pads, axes = node.integers(1, "pads") or [], node.integers(3)
    value = node.number(2, "value", 0.0)
    count = len(pads) // 2

    def pad(x: Any) -> Any:
        amounts = {a % x.dim(): i for i, a in enumerate(axes or range(count))}
        pairs = [(pads[amounts[a]], pads[amounts[a] + count]) if a in amounts else (0, 0) for a in range(x.dim())]
        while pairs and pairs[0] == (0, 0):
            pairs.pop(0)
        if not pairs:
            return x
        order = [amount for pair in reversed(pairs) for amount in pair]
        if mode == "constant":
            return functional.pad(x, order, value=value)
        return functional.pad(x, order, mode="reflect" if mode == "reflect" else "replicate")

    return pad


def _expand(node: OperatorNode) -> TensorFunction:
    shape = node.integers(1) or []
    return lambda x: x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


LAYOUT: dict[str, Translator] = {
    "Concat": _concat,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
