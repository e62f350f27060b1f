"""Computes operators that PyTorch's ONNX exporter translates wrongly by other operators of PyTorch.

Each function has the signature of its operator.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from korch.frontend.torch.missing import MISSING, running, signbit
from korch.frontend.torch.special import SPECIAL
from korch.frontend.torch.strided import STRIDED
from korch.frontend.torch.windows import WINDOWS

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return functions of tensors by the operator that they compute, for `ExportedProgram.run_decompositions`."""
    return _WRONG | WINDOWS | STRIDED | MISSING | SPECIAL | _of_transformers()


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
    root = math.sqrt(abs(scale))
    scores = (query * root) @ (key.transpose(-2, -1) * math.copysign(root, scale))
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


def _powers_of(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, **options: Any) -> Any:
    if steps != 1:
        return NotImplemented
    return (float(base) ** _line(start, end, steps, dtype=torch.float64)).to(dtype or torch.get_default_dtype())


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


def _resized(
    x: Any,
    sizes: Any,
    align_corners: bool,
    factors: Any,
    *,
    kernel: tuple[int, Callable[[Any], Any]],
    resize: Callable[..., Any] | None = None,
) -> Any:
    """The exporter's antialiased resize ignores the factors and the corners; bytes are rounded after each axis.

    `kernel`: how far an element reaches, and its weight for a distance. `resize`: the operator, unless antialiased.
    """
    is_byte = x.dtype is torch.uint8
    if not is_byte and resize is not None:
        return _aligned(x, sizes, align_corners, factors, resize=resize)
    if not is_byte and factors is None and not align_corners:
        return NotImplemented
    for i in reversed(range(x.dim() - 2)):
        n = x.shape[2 + i]
        count = int(n * factors[i]) if sizes is None else sizes[i]
        step = n / count if factors is None else 1 / factors[i]
        if align_corners:
            step = (n - 1) / (count - 1) if count > 1 else 0.0
        shift = 0.0 if align_corners and resize is not None else 0.5
        middle = step * (torch.arange(count, dtype=torch.float64).unsqueeze(1) + shift) - shift
        weights = _spread(n, middle, step, kernel) if resize is None else _taps(n, middle, kernel)
        rows = x.movedim(2 + i, -1)
        rows = _product_of_bytes(rows, weights.mT) if is_byte else rows @ weights.mT.to(x.dtype)
        x = rows.movedim(-1, 2 + i)
    return x


def _spread(n: int, middle: Any, step: float, kernel: tuple[int, Callable[[Any], Any]]) -> Any:
    """Return the weights of `n` elements for each place between them, where a kernel is as wide as a step."""
    away = (torch.arange(n, dtype=torch.float64) - middle).abs() / max(step, 1.0)
    weights = torch.where(away < kernel[0], kernel[1](away), 0.0)
    return weights / weights.sum(1, keepdim=True)


def _taps(n: int, middle: Any, kernel: tuple[int, Callable[[Any], Any]]) -> Any:
    """Return the weights of `n` elements for each place between them; those of elements outside count for the ends."""
    reach, weigh = kernel
    middle = middle.clamp(min=0) if reach == 1 else middle
    first, places = middle.floor(), torch.arange(n, dtype=torch.float64)
    return sum(
        torch.where((first + k).clamp(0, n - 1) == places, weigh((first + k - middle).abs()), 0.0)
        for k in range(1 - reach, reach + 1)
    )


def _product_of_bytes(rows: Any, weights: Any) -> Any:
    """Return sums of bytes whose weights are integers of 15 bits, with as many bits behind the point as that allows."""
    bits = 22 - (0.5 + weights.max() * 2.0 ** torch.arange(1, 23) >= 1 << 15).sum()
    whole = (weights * 2.0**bits + weights.sign() * 0.5).to(torch.int32)
    half, bits = (2 ** (bits - 1)).to(torch.int32), bits.to(torch.int32)
    total = (rows.to(torch.int32) @ whole + half) >> bits
    return total.clamp(0, 255).to(torch.uint8)


def _triangle(away: Any) -> Any:
    return 1 - away


def _cubic(away: Any, a: float) -> Any:
    near = ((a + 2) * away - (a + 3)) * away * away + 1
    return torch.where(away < 1, near, a * (((away - 5) * away + 8) * away - 4))


def _pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """An axis that is cut and grown; ONNX Runtime cuts first, and PyTorch repeats or reflects what it cuts.

    The exporter pads no complex numbers.
    """
    if x.is_complex():
        return torch.complex(*(aten.pad.default(side, pad, mode, value) for side in (x.real, x.imag)))
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


def _scattered(x: Any, dim: int, index: Any, src: Any, *, scatter: Callable[..., Any]) -> Any:
    """The exporter's scatter into a scalar has no axis."""
    if x.dim():
        return NotImplemented
    return scatter(x.reshape(1), 0, index.reshape(-1), src.reshape(-1) if isinstance(src, torch.Tensor) else src)[0]


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


def _whole_power(x: Any, y: Any) -> Any:
    """Integers wrap around, and have no fractions; the exporter's power is a rounded float's."""
    dtype = torch.result_type(x, y)
    if dtype.is_floating_point or dtype.is_complex:
        return NotImplemented
    x, y = (side.to(dtype) if isinstance(side, torch.Tensor) else side for side in (x, y))
    if isinstance(y, torch.Tensor):
        info = torch.iinfo(dtype)
        x = x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype)
        square, found = x, torch.ones_like(y)
        bits = max(3, info.bits // 2 - 2)
        for bit in range(bits):
            found = torch.where(y & (1 << bit) != 0, found * square, found)
            square = square * square
        # Now the square is 0, or 1 + d with d * d = 0, whose power n is 1 + n * d.
        rest = y >> bits
        found = found * torch.where(x & 1 != 0, 1 + rest * (square - 1), (rest == 0).to(dtype))
        of_one = torch.where(x == -1, 1 - 2 * (y & 1), (x == 1).to(dtype))
        return torch.where(y < 0, of_one, found) if info.min < 0 else found
    found = torch.ones_like(x)
    while y:
        found, x, y = (found * x if y & 1 else found), x * x, y >> 1
    return found


def _composed(operator: Any) -> Callable[..., Any]:
    """Return a function that computes an operator by those that PyTorch composes it of."""
    return partial(operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def _einsum(equation: str, tensors: Sequence[Any], *, path: Any = None) -> Any:
    """PyTorch's sums of integers have 64 bits, if they are no products."""
    if tensors[0].is_floating_point():
        return NotImplemented
    return _composed(aten.einsum.default)(equation, tensors, path=path)


def _is_close(x: Any, y: Any, *limits: Any) -> Any:
    """The exporter compares booleans exactly."""
    if x.dtype is not torch.bool:
        return NotImplemented
    return aten.isclose.default(x.to(torch.float32), y.to(torch.float32), *limits)


def _shifted(x: Any, y: Any, *, shift: Callable[..., Any]) -> Any:
    """The exporter's result of bytes has signs."""
    if torch.result_type(x, y) is not torch.uint8:
        return NotImplemented
    wide = y.to(torch.int32).clamp(max=31) if isinstance(y, torch.Tensor) else min(y, 31)
    return shift(x.to(torch.int32), wide).to(torch.uint8)


def _square(x: Any) -> Any:
    """The exporter multiplies booleans; PyTorch's result is of 64 bits."""
    return x.to(torch.int64) if x.dtype is torch.bool else NotImplemented


def _masked_index(x: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    """Places where the mask is False may be outside."""
    inside = [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]
    return torch.where(mask, aten.index.Tensor(x, inside), fill).to(x.dtype)


def _norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """ONNX has no norm of a scalar along an axis; the exporter's norms of all elements keep no axes."""
    if not x.dim():
        return torch.linalg.vector_norm(x.reshape(1), ord, 0, dtype=dtype)
    if not math.isinf(ord):
        if dim is not None or not keepdim:
            return NotImplemented
        return aten.linalg_vector_norm.default(x, ord, list(range(x.dim())), keepdim, dtype=dtype)
    sizes = x.abs() if dtype is None else x.to(dtype).abs()
    return (torch.amax if ord > 0 else torch.amin)(sizes, list(range(x.dim())) if dim is None else dim, keepdim)


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
    **dict.fromkeys(
        [aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor], _powers_of
    ),
    **{
        resize: partial(_aligned, resize=resize)
        for resize in (aten.upsample_linear1d.vec, aten.upsample_trilinear3d.vec)
    },
    aten.upsample_bilinear2d.vec: partial(_resized, kernel=(1, _triangle), resize=aten.upsample_bilinear2d.vec),
    aten.upsample_bicubic2d.vec: partial(
        _resized, kernel=(2, partial(_cubic, a=-0.75)), resize=aten.upsample_bicubic2d.vec
    ),
    aten._upsample_bilinear2d_aa.vec: partial(_resized, kernel=(1, _triangle)),
    aten._upsample_bicubic2d_aa.vec: partial(_resized, kernel=(2, partial(_cubic, a=-0.5))),
    aten._unsafe_masked_index.default: _masked_index,
    aten.linalg_vector_norm.default: _norm,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: lambda x, pad, value=0: (
        _pad(x, pad, value=value) if x.is_complex() else NotImplemented
    ),
    **dict.fromkeys([aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar], _whole_power),
    aten.einsum.default: _einsum,
    # The exporter pads inputs as complex numbers, its norm keeps no axes, its gradient has one result, its cross
    # product is along the last axis, and it has no translation of those that stack tensors.
    **{
        operator: _composed(operator)
        for operator in (
            aten.hstack.default,
            aten.vstack.default,
            aten.dstack.default,
            aten.column_stack.default,
            aten.cross.default,
            aten.linalg_norm.default,
            *(getattr(aten.gradient, overload) for overload in aten.gradient.overloads()),
            *(
                getattr(aten, f"fft_{kind}fft{axes}").default
                for kind in ("", "i", "r", "ir", "h", "ih")
                for axes in ("", "2", "n")
            ),
        )
    },
    aten.addr.default: torch._refs.addr,
    aten.isclose.default: _is_close,
    **{
        getattr(shift, overload): partial(_shifted, shift=shift)
        for shift in (aten.bitwise_left_shift, aten.bitwise_right_shift)
        for overload in ("Tensor", "Tensor_Scalar")
    },
    aten.logcumsumexp.default: lambda x, dim: running(x, dim, lambda rows: rows.logsumexp(-1), -torch.inf),
    aten.im2col.default: _image_columns,
    **{
        getattr(getattr(aten, name), overload): getattr(same, overload)
        for name, same in _ALIASES.items()
        for overload in getattr(aten, name).overloads()
        if overload in same.overloads() and "out" not in overload
    },
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.rsub.Scalar: _reversed,
    aten.topk.default: _topmost,
    **{
        scatter: partial(_scattered, scatter=scatter)
        for scatter in (aten.scatter_add.default, aten.scatter.src, aten.scatter.value)
    },
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
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.hamming_window.default: _hamming,
    aten.hamming_window.periodic: _hamming,
    aten.hamming_window.periodic_alpha: _hamming,
    aten.hamming_window.periodic_alpha_beta: _hamming,
}
"""Operators that the exporter translates wrongly."""
