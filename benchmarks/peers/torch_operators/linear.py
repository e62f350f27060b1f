"""Convolution, matrix products and pooling as PyTorch functions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.peers.torch_operators.node import OperatorNode, TensorFunction, Translator

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}


@dataclass(frozen=True, slots=True)
class _Window:
    """The padding, stride and dilation of a convolution or pooling."""

    rank: int
    before: list[int]
    after: list[int]
    stride: list[int]
    dilation: list[int]

    @property
    def is_even(self) -> bool:
        """Whether each axis has equal padding before and after, as PyTorch requires."""
        return self.before == self.after

    @property
    def pads(self) -> list[int]:
        """The paddings in the order of `functional.pad`: last axis first, before and after."""
        pairs = reversed(list(zip(self.before, self.after, strict=True)))
        return [amount for pair in pairs for amount in pair]


def _window(node: OperatorNode) -> _Window:
    """Read the attributes; automatic paddings are refused."""
    node.expect("auto_pad", ("NOTSET", "VALID"), "NOTSET")
    rank = node.window_rank()
    pads = list(node.attributes.integers("pads", (0,) * (2 * rank)))
    stride = list(node.attributes.integers("strides", (1,) * rank))
    dilation = list(node.attributes.integers("dilations", (1,) * rank))
    return _Window(rank, pads[:rank], pads[rank:], stride, dilation)


def _conv(node: OperatorNode) -> TensorFunction:
    window, group = _window(node), node.attributes.integer("group", 1)
    convolve = _CONVOLUTIONS[window.rank]
    stride, dilation, before = window.stride, window.dilation, window.before
    if window.is_even:
        return lambda x, weight, bias=None: convolve(x, weight, bias, stride, before, dilation, group)
    pads = window.pads
    return lambda x, weight, bias=None: convolve(functional.pad(x, pads), weight, bias, stride, 0, dilation, group)


def _gemm(node: OperatorNode) -> TensorFunction:
    alpha, beta = node.attributes.number("alpha", 1.0), node.attributes.number("beta", 1.0)
    transposes_a, transposes_b = node.attributes.integer("transA", 0), node.attributes.integer("transB", 0)

    def gemm(a: Any, b: Any, c: Any = None) -> Any:
        a = a.t() if transposes_a else a
        b = b.t() if transposes_b else b
        if c is None:
            return alpha * torch.mm(a, b)
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)

    return gemm


def _max_pool(node: OperatorNode) -> TensorFunction:
    if node.output_count > 1:
        raise node.unsupported("a second output")
    window, kernel = _window(node), list(node.attributes.integers("kernel_shape"))
    stride, dilation, before = window.stride, window.dilation, window.before
    ceil = bool(node.attributes.integer("ceil_mode", 0))
    pool = _MAX_POOLS[window.rank]
    if window.is_even and all(2 * p <= k for p, k in zip(before, kernel, strict=True)):
        return lambda x: pool(x, kernel, stride, before, dilation, ceil_mode=ceil)
    pads = window.pads

    def max_pool(x: Any) -> Any:
        padded = functional.pad(x, pads, value=float("-inf"))
        return pool(padded, kernel, stride, 0, dilation, ceil_mode=ceil)

    return max_pool


def _global_average_pool(x: Any) -> Any:
    return torch.mean(x, dim=tuple(range(2, x.dim())), keepdim=True)


LINEAR: dict[str, Translator] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": lambda node: torch.matmul,
    "MaxPool": _max_pool,
    "GlobalAveragePool": lambda node: _global_average_pool,
}
