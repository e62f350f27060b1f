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
from korch.frontend.torch.windows import WINDOWS

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return functions of tensors by the operator that they compute, for `ExportedProgram.run_decompositions`."""
    return _WRONG | WINDOWS | MISSING | SPECIAL | _of_transformers()


def _of_transformers() -> dict[Any, Callable[..., Any]]:
    """Return functions by the operators of the library transformers, if it is loaded."""
    found = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {} if found is None else {found.default: _grouped_product}


def _grouped_product(input: Any, weight: Any, offs: Any = None, bias: Any = None, dtype: Any = None) -> Any:
    """Rows up to each end are multiplied by a weight of their own; rows after the last end give 0."""
    if offs is None or bias is not None or input.dim() != 2 or weight.dim() != 3:
        return NotImplemented
    number = (offs <= torch.arange(input.shape[0]).unsqueeze(1)).sum(1)
    own = weight.index_select(0, number.clamp(max=weight.shape[0] - 1))
    found = torch.where((number < weight.shape[0]).unsqueeze(1), (input.unsqueeze(1) @ own).squeeze(1), 0.0)
    return found.to(input.dtype if dtype is None else dtype)


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


def _places(start: float, end: float, step: float = 1, *, dtype: Any = None, **options: Any) -> Any:
    """The exporter counts the elements in the type of the result."""
    is_exact = all(isinstance(n, int | torch.SymInt) for n in (start, end, step))
    if is_exact or any(isinstance(n, torch.SymFloat) for n in (start, end, step)):
        return NotImplemented
    dtype = dtype or torch.get_default_dtype()
    if dtype is torch.int64:
        start, end, step = int(start), int(end), int(step)
    count = max(0, math.ceil((end - start) / step))
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    first, each = (start, step) if dtype.is_floating_point else (int(start), int(step))
    return (torch.arange(count).to(wide) * each + first).to(dtype)


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


def _group_norm(x: Any, groups: int, *rest: Any) -> Any:
    """The exporter divides the number of elements."""
    return NotImplemented if x.numel() else x.clone()


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


def _blocks_to_channels(x: Any, factor: int) -> Any:
    """PyTorch leaves an empty tensor as it is; the exporter divides by a size of 0."""
    return NotImplemented if x.numel() else x.clone()


def _square(x: Any) -> Any:
    """The exporter multiplies booleans; PyTorch's result is of 64 bits."""
    return x.to(torch.int64) if x.dtype is torch.bool else NotImplemented


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
    aten.arange.default: lambda end, **options: _places(0, end, **options),
    aten.arange.start: _places,
    aten.arange.start_step: _places,
    aten.group_norm.default: _group_norm,
    aten._grouped_mm.default: _grouped_product,
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
    aten.multilabel_margin_loss.default: _multilabel_margin,
    aten.pixel_unshuffle.default: _blocks_to_channels,
    aten.square.default: _square,
    aten.squeeze_copy.default: lambda x: x.squeeze().clone(),
    aten.squeeze_copy.dim: lambda x, dim: x.squeeze(dim).clone(),
    aten.squeeze_copy.dims: lambda x, dim: x.squeeze(dim).clone(),
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
