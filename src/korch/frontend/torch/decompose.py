"""Computes operators that PyTorch's ONNX exporter translates wrongly by other operators of PyTorch.

Each function has the signature of its operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from korch.frontend.torch.missing import MISSING, signbit
from korch.frontend.torch.special import SPECIAL

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return functions of tensors by the operator that they compute, for `ExportedProgram.run_decompositions`."""
    return _WRONG | MISSING | SPECIAL


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """A row whose keys are all masked gives 0; the exporter gives NaN or the mean of the values."""
    if dropout_p:
        return NotImplemented  # it draws random numbers, and is refused
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    root = math.sqrt(scale)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    seen = attn_mask
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    else:
        seen = attn_mask > -torch.inf
    result = (scores + attn_mask).softmax(-1) @ value
    # Each row of a causal mask has its first column.
    return result if is_causal else torch.where(seen.any(-1, keepdim=True), result, 0.0)


def _squeeze(x: Any, dim: int) -> Any:
    """An axis of several elements remains; the exporter removes it, which is illegal."""
    return NotImplemented if not x.dim() or x.shape[dim] == 1 else x.clone()


def _squeeze_axes(x: Any, dim: Sequence[int]) -> Any:
    return NotImplemented if dim else x.clone()


def _line(start: Any, end: Any, steps: int, *, dtype: Any = None, **options: Any) -> Any:
    """The exporter gives a line of one point no axis."""
    if steps != 1:
        return NotImplemented
    dtype = dtype or torch.get_default_dtype()
    return start.to(dtype).reshape(1) if isinstance(start, torch.Tensor) else torch.full((1,), start, dtype=dtype)


def _aligned(x: Any, sizes: Any, align_corners: bool, factors: Any, *, resize: Callable[..., Any]) -> Any:
    """Corners are aligned with whole elements; ONNX's definition takes the product of a size and its factor."""
    if not align_corners or factors is None:
        return NotImplemented
    return resize(x, [int(n * factor) for n, factor in zip(x.shape[2:], factors, strict=True)], True, None)


def _antialiased(
    x: Any, sizes: Any, align_corners: bool, factors: Any, *, reach: int, weigh: Callable[[Any], Any]
) -> Any:
    """The exporter ignores the factors and the corners. `weigh` gives an element's weight for its distance."""
    if factors is None and not align_corners:
        return NotImplemented
    for i, n in enumerate(x.shape[2:]):
        count = int(n * factors[i]) if sizes is None else sizes[i]
        step = n / count if factors is None else 1 / factors[i]
        if align_corners:
            step = (n - 1) / (count - 1) if count > 1 else 0.0
        stretch = max(step, 1.0)
        middle = step * (torch.arange(count, dtype=torch.float64).unsqueeze(1) + 0.5)
        away = (torch.arange(n, dtype=torch.float64) + 0.5 - middle).abs() / stretch
        weights = torch.where(away < reach, weigh(away), 0.0)
        weights = (weights / weights.sum(1, keepdim=True)).to(x.dtype)
        x = (x.movedim(2 + i, -1) @ weights.mT).movedim(-1, 2 + i)
    return x


def _triangle(away: Any) -> Any:
    return 1 - away


def _cubic(away: Any) -> Any:
    near, far = (1.5 * away - 2.5) * away * away + 1, ((2.5 - 0.5 * away) * away - 4) * away + 2
    return torch.where(away < 1, near, far)


def _pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """An axis that is cut and grown; ONNX Runtime cuts first, and PyTorch repeats or reflects what it cuts."""
    sides = list(zip(pad[::2], pad[1::2], strict=True))
    if mode not in ("replicate", "reflect") or all(min(side) >= 0 or max(side) <= 0 for side in sides):
        return NotImplemented
    for axis, (before, after) in enumerate(sides, 1):
        last = x.shape[-axis] - 1
        places = torch.arange(last + 1 + before + after) - before
        places = places.clamp(0, last) if mode == "replicate" else last - (last - places.abs()).abs()
        x = x.index_select(-axis, places)
    return x


def _image_columns(x: Any, kernel: Sequence[int], dilation: Any, padding: Any, stride: Any) -> Any:
    """The exporter divides by the size of the batch."""
    if x.numel():
        return NotImplemented
    lengths = zip(x.shape[-2:], kernel, dilation, padding, stride, strict=True)
    count = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in lengths)
    return x.new_zeros((*x.shape[:-3], x.shape[-3] * math.prod(kernel), count))


def _topmost(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Without an order, any order is right; ONNX has no order of a scalar."""
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    return NotImplemented if sorted else aten.topk.default(x, k, dim, largest, True)


def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    """The exporter's sum into a scalar has no axis."""
    return NotImplemented if x.dim() else aten.scatter_add.default(x.reshape(1), 0, index.reshape(1), src.reshape(1))[0]


def _scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """The exporter computes a sum for a mean."""
    if reduce != "mean":
        return NotImplemented
    ones = torch.ones_like(src)
    count = (torch.ones_like(x) if include_self else torch.zeros_like(x)).scatter_add(dim, index, ones)
    total = aten.scatter_reduce.two(x, dim, index, src, "sum", include_self=include_self)
    mode = None if x.is_floating_point() else "floor"
    return torch.div(total, count.clamp(min=1), rounding_mode=mode).to(x.dtype)


def _cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """The exporter ignores the smoothing of labels, and takes probabilities for labels."""
    classes = 0 if x.dim() == 1 else 1
    logs, count = x.log_softmax(classes), x.shape[classes]
    weights = None if weight is None else weight.reshape([-1] + [1] * (x.dim() - classes - 1))
    weighted = logs if weights is None else logs * weights
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / count
        losses = -(weighted * target).sum(classes)
        return (losses, losses.sum() / (x.numel() // count), losses.sum())[reduction]
    kind = ("none", "mean", "sum")[reduction]
    loss = torch.nn.functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=kind)
    if label_smoothing == 0:
        return loss
    kept = target != ignore_index
    smooth = torch.where(kept, -weighted.sum(classes), 0.0)
    if reduction:
        smooth = smooth.sum()
    if reduction == 1:
        ones = kept if weight is None else torch.where(kept, weight[torch.where(kept, target, 0)], 0.0)
        smooth = smooth / ones.sum()
    return loss * (1 - label_smoothing) + smooth * (label_smoothing / count)


def _multilabel_margin(x: Any, target: Any, reduction: int = 1) -> Any:
    """The labels of a row end at the first negative one."""
    x, target = torch.atleast_1d(x), torch.atleast_1d(target)
    is_label = (target < 0).cumsum(-1) == 0
    labels = torch.where(is_label, target, 0)
    is_wanted = ((labels.unsqueeze(-1) == torch.arange(x.shape[-1])) & is_label.unsqueeze(-1)).any(-2)
    margins = (1 - x.gather(-1, labels).unsqueeze(-1) + x.unsqueeze(-2)).clamp(min=0)
    counted = is_label.unsqueeze(-1) & ~is_wanted.unsqueeze(-2)
    losses = torch.where(counted, margins, 0.0).sum((-2, -1)) / x.shape[-1]
    return (losses, losses.mean(), losses.sum())[reduction]


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
    """ONNX takes no integers, so they are gathered for a product.

    Args:
        x: the input.
        weight: the filters.
        bias: a number for each filter; None for none.
        stride: the steps of the windows.
        padding: the padding of both sides of each axis, or the name of a rule.
        dilation: the distances of the elements of a window.
        groups: the number of groups of channels.
        grown: how much longer the padding behind each axis is; None for none.
    """
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

    Args:
        x: the input.
        rank: how many axes the windows have.
        sizes: the lengths, steps, paddings and dilations of the windows.
        fill: the value of the padding.
        ceil_mode: whether a last window may be incomplete.
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


def _sign(x: Any) -> Any:
    """The sign of NaN is 0 in PyTorch, and NaN in ONNX."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype) if x.is_floating_point() else NotImplemented


def _arc_tangent(y: Any, x: Any) -> Any:
    """The exporter has another sign where y is 0, and NaN where both are 0 or infinite."""
    dtype = torch.result_type(y, x)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    y, x = torch.broadcast_tensors(y.to(dtype), x.to(dtype))
    up, across = y.abs(), x.abs()
    ratio = torch.where(up == across, torch.where(up == 0, 0.0, 1.0), up / across)
    ratio = torch.where(torch.isnan(x + y) & ~(torch.isinf(x) & torch.isinf(y)), torch.nan, ratio)
    angle = torch.atan(ratio)
    angle = torch.where(signbit(x), math.pi - angle, angle)
    return torch.where(signbit(y), -angle, angle)


def _cross(x: Any, y: Any, dim: int | None = None) -> Any:
    """The axis is the first of size 3 by default; the exporter takes the last axis."""
    x, y = torch.broadcast_tensors(x, y)
    return torch.linalg.cross(x, y, dim=list(x.shape).index(3) if dim is None else dim)


def _hamming(n: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any) -> Any:
    """ONNX's window has other coefficients."""
    options = {"dtype": torch.get_default_dtype()} | {k: v for k, v in options.items() if v is not None}
    places = torch.arange(n, **options) * (2 * math.pi / max(1, n if periodic else n - 1))
    return (alpha - beta * torch.cos(places)) if n != 1 else torch.ones(1, **options)


def _reversed(x: Any, other: Any, alpha: float = 1) -> Any:
    """The exporter knows no types of a difference of an integer and a float."""
    return x.to(torch.result_type(x, other)) * -alpha + other


_ALIASES = {
    "divide": aten.div,
    "multiply": aten.mul,
    "subtract": aten.sub,
    "greater": aten.gt,
    "greater_equal": aten.ge,
    "less": aten.lt,
    "less_equal": aten.le,
    "not_equal": aten.ne,
}
"""Operators with another name. The exporter does not promote the types of the operands under this name."""

_WRONG: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze_axes,
    **dict.fromkeys([aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor], _line),
    **{
        resize: partial(_aligned, resize=resize)
        for resize in (
            aten.upsample_linear1d.vec,
            aten.upsample_bilinear2d.vec,
            aten.upsample_trilinear3d.vec,
            aten.upsample_bicubic2d.vec,
        )
    },
    aten._upsample_bilinear2d_aa.vec: partial(_antialiased, reach=1, weigh=_triangle),
    aten._upsample_bicubic2d_aa.vec: partial(_antialiased, reach=2, weigh=_cubic),
    aten.pad.default: _pad,
    aten.im2col.default: _image_columns,
    **{
        getattr(getattr(aten, name), overload): getattr(same, overload)
        for name, same in _ALIASES.items()
        for overload in getattr(aten, name).overloads()
        if overload in same.overloads() and "out" not in overload
    },
    aten.rsub.Scalar: _reversed,
    aten.topk.default: _topmost,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
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
    aten.multilabel_margin_loss.default: _multilabel_margin,
    aten.sign.default: _sign,
    aten.signbit.default: signbit,
    aten.atan2.default: _arc_tangent,
    aten.arctan2.default: _arc_tangent,
    aten.cross.default: _cross,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.hamming_window.default: _hamming,
    aten.hamming_window.periodic: _hamming,
    aten.hamming_window.periodic_alpha: _hamming,
    aten.hamming_window.periodic_alpha_beta: _hamming,
}
"""Operators that the exporter translates wrongly."""
