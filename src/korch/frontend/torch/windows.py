"""Computes convolutions and pools that PyTorch's ONNX exporter translates wrongly or ONNX lacks."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten


def _average_pool(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    rank: int = 2,
) -> Any:
    """The exporter ignores the divisor, and ONNX takes no integers."""
    if not x.is_floating_point():
        return _integer_average(x, rank, (kernel_size, stride, padding), ceil_mode, count_include_pad, divisor_override)
    if divisor_override is None:
        return NotImplemented
    kernel, strides, x, _ = _padded(x, rank, (kernel_size, stride, padding, (1,)), 0.0, ceil_mode=ceil_mode)
    pool = (aten.avg_pool2d, aten.avg_pool3d)[rank - 2].default
    return pool(x, kernel, strides) * (math.prod(kernel) / divisor_override)


def _integer_average(
    x: Any, rank: int, sizes: Sequence[Sequence[int]], ceil_mode: bool, is_padding_counted: bool, divisor: int | None
) -> Any:
    """Return quotients of sums of windows and their numbers of elements, rounded towards zero."""
    kernel, strides, padded, pads = _padded(x, rank, (*sizes, (1,)), 0, ceil_mode=ceil_mode)
    windows = _windows(padded, kernel, strides, [1] * rank)
    counts = torch.ones((), dtype=torch.int64)
    for axis, (k, s, p) in enumerate(zip(kernel, strides, pads, strict=True), x.dim() - rank):
        n, count = x.shape[axis], windows.shape[axis]
        first = torch.arange(count) * s - p
        last = (first + k).clamp(max=n + p)
        own = last - first if is_padding_counted else last.clamp(max=n) - first.clamp(min=0)
        counts = counts.unsqueeze(-1) * own
    total = windows.flatten(-rank).sum(-1, dtype=x.dtype)
    return torch.div(total, counts if divisor is None else divisor, rounding_mode="trunc").to(x.dtype)


def _windows(x: Any, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Any:
    """Return the elements of windows of the last axes, with the axes of a window last."""
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True), x.dim() - len(kernel)):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x


def _integer_convolution(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Any = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
    *,
    grown: Sequence[int] | None = None,
) -> Any:
    """ONNX takes no integers, so they are gathered for a product; `grown`: more padding behind each axis."""
    if x.is_floating_point():
        return NotImplemented
    rank, kernel = weight.dim() - 2, weight.shape[2:]
    if x.dim() == rank + 1:
        return _integer_convolution(
            x.unsqueeze(0), weight, bias, stride, padding, dilation, groups, grown=grown
        ).squeeze(0)
    strides, dilations = _each(stride, rank), _each(dilation, rank)
    totals = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
    pads = [t // 2 for t in totals] if isinstance(padding, str) else _each(padding, rank)
    ends: list[int] = []
    for total, before, extra in zip(totals, pads, grown or [0] * rank, strict=True):
        ends = [before, total - before if isinstance(padding, str) else before + extra, *ends]
    windows = _windows(torch.constant_pad_nd(x, ends), kernel, strides, dilations)
    batch, space = x.shape[0], windows.shape[2 : 2 + rank]
    rows = windows.reshape(batch, groups, x.shape[1] // groups, math.prod(space), math.prod(kernel))
    filters = weight.reshape(groups, weight.shape[0] // groups, -1)
    found = (rows.transpose(2, 3).flatten(3) @ filters.mT).mT.reshape(batch, weight.shape[0], *space)
    return found if bias is None else found + bias.reshape(-1, *[1] * rank)


def _integer_transposed(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Any:
    """A convolution of the input with zeros between its elements, by the filters turned around."""
    if x.is_floating_point():
        return NotImplemented
    rank = weight.dim() - 2
    dilations, pads = _each(dilation, rank), _each(padding, rank)
    for axis, s in enumerate(_each(stride, rank), x.dim() - rank):
        spread = torch.constant_pad_nd(x.unsqueeze(axis + 1), [0, 0] * (x.dim() - axis - 1) + [0, s - 1])
        x = spread.flatten(axis, axis + 1).narrow(axis, 0, (x.shape[axis] - 1) * s + 1)
    turned = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1).flip(list(range(2, 2 + rank)))
    around = [d * (k - 1) - p for k, d, p in zip(weight.shape[2:], dilations, pads, strict=True)]
    return _integer_convolution(x, turned, bias, (1,), around, dilations, groups, grown=_each(output_padding, rank))


def _max_pool(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    rank: int = 2,
) -> tuple[Any, Any]:
    """ONNX's places count through the whole tensor; those of windows of one element are computed differently."""
    sizes = kernel_size, stride, padding, dilation
    fill = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    kernel, strides, padded, starts = _padded(x, rank, sizes, fill, ceil_mode=ceil_mode)
    dilations = _each(dilation, rank)
    windows = _windows(padded, kernel, strides, dilations)
    flat = windows.flatten(-rank)
    best, places = flat.argmax(-1), flat.new_zeros((), dtype=torch.int64)
    if padded.shape != x.shape:  # an element may be as small as the padding, which is never chosen
        inside = _padded(torch.ones(x.shape[-rank:], dtype=torch.bool), rank, sizes, 0, ceil_mode=ceil_mode)[2]
        inside = _windows(inside, kernel, strides, dilations).flatten(-rank)
        is_least = (flat == fill) & inside
        best = torch.where(flat.amax(-1) == fill, is_least.int().argmax(-1), best)
    if x.is_floating_point():
        last = torch.where(torch.isnan(flat), torch.arange(flat.shape[-1]), -1).amax(-1)
        best = torch.where(last >= 0, last, best)  # the last NaN, the first of other equal elements
    for axis in range(rank):
        inner = math.prod(kernel[axis + 1 :])
        shape = [1] * rank
        shape[axis] = -1
        own = best // inner % kernel[axis] * dilations[axis] - starts[axis]
        own = own + (torch.arange(windows.shape[axis - 2 * rank]) * strides[axis]).reshape(shape)
        places = places * x.shape[axis - rank] + own
    return flat.amax(-1), places


def _integer_maximum(x: Any, *sizes: Any, rank: int, **options: Any) -> Any:
    if x.is_floating_point():
        return NotImplemented
    return partial(_max_pool, rank=rank)(x, *sizes, **options)[0]


def _padded(
    x: Any, rank: int, sizes: Sequence[Sequence[int]], fill: float, *, ceil_mode: bool
) -> tuple[list[int], list[int], Any, list[int]]:
    """Return the lengths and the steps of a pool's windows, the padded input, and the padding before each axis.

    `ceil_mode`: whether a last window may be incomplete.
    """
    kernel, strides, pads, dilations = (_each(v, rank) for v in (sizes[0], sizes[1] or sizes[0], *sizes[2:]))
    ends: list[int] = []
    for n, k, s, p, d in zip(x.shape[-rank:], kernel, strides, pads, dilations, strict=True):
        reach = d * (k - 1) + 1
        count = (n + 2 * p - reach + (s - 1 if ceil_mode else 0)) // s + 1
        count -= ceil_mode and (count - 1) * s >= n + p
        ends = [p, (count - 1) * s + reach - n - p, *ends]
    return kernel, strides, torch.constant_pad_nd(x, ends, fill), pads


def _each(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


WINDOWS: dict[Any, Callable[..., Any]] = {
    **{
        operator: _integer_convolution
        for convolution in (aten.conv1d, aten.conv2d, aten.conv3d)
        for operator in (convolution.default, convolution.padding)
    },
    aten.conv_transpose1d.default: _integer_transposed,
    aten.conv_transpose2d.input: _integer_transposed,
    aten.conv_transpose3d.input: _integer_transposed,
    aten.max_pool2d.default: partial(_integer_maximum, rank=2),
    aten.max_pool3d.default: partial(_integer_maximum, rank=3),
    aten.avg_pool1d.default: partial(_average_pool, rank=1),
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool3d.default: partial(_average_pool, rank=3),
    aten.max_pool1d_with_indices.default: partial(_max_pool, rank=1),
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool3d_with_indices.default: partial(_max_pool, rank=3),
}
"""Convolutions and pools; each function has the signature of its operator."""
