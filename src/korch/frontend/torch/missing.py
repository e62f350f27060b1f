"""Computes operators that PyTorch's ONNX exporter has no translation of by other operators of PyTorch."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

aten = torch.ops.aten


def _index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    if not x.dim():
        return _index_reduce(x.reshape(1), 0, index, source.reshape(1), reduce, include_self=include_self)[0]
    places = _along(index, source, dim)
    return aten.scatter_reduce.two(x, dim, places, source, reduce.replace("mul", "prod"), include_self=include_self)


def _along(index: Any, like: Any, dim: int) -> Any:
    """Return an index of places along one axis, expanded to the shape of a tensor."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return index.reshape(shape).expand(like.shape)


def _repeated(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    """The exporter takes no size of the output; without it, the size depends on data."""
    if output_size is None:
        return NotImplemented
    if dim is None:
        x, dim = x.reshape(-1), 0
    return x.index_select(dim, _numbers_of_parts(repeats.expand(x.shape[dim]), output_size=output_size))


def _numbers_of_parts(repeats: Any, *, output_size: int | None = None) -> Any:
    if output_size is None:
        return NotImplemented
    places = torch.arange(output_size)
    return (repeats.cumsum(0) <= places.unsqueeze(1)).sum(1).to(repeats.dtype)


def _scatter_with(x: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    src = src if isinstance(src, torch.Tensor) else x.new_full(index.shape, src)
    kinds = {"add": "sum", "multiply": "prod"}
    src = src[tuple(slice(0, n) for n in index.shape)]
    return aten.scatter_reduce.two(x, dim, index, src, kinds[reduce], include_self=True)


def _adaptive(x: Any, sizes: Sequence[int], pool: Callable[[Any, int, int, int], Any]) -> Any:
    """Pool windows of different lengths along one axis after another: `pool` takes the axis, start and length."""
    for axis, count in enumerate(sizes, -len(sizes)):
        n = x[0].shape[axis] if isinstance(x, tuple) else x.shape[axis]
        ends = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
        parts = [pool(x, axis, a, b - a) for a, b in ends]
        x = (
            tuple(torch.cat(side, axis) for side in zip(*parts, strict=True))
            if isinstance(x, tuple)
            else torch.cat(parts, axis)
        )
    return x


def _adaptive_mean(x: Any, output_size: Sequence[int]) -> Any:
    return _adaptive(x, output_size, lambda part, axis, start, n: part.narrow(axis, start, n).mean(axis, keepdim=True))


def _adaptive_max(x: Any, output_size: Sequence[int]) -> Any:
    def pool(pair: tuple[Any, Any], axis: int, start: int, n: int) -> tuple[Any, Any]:
        values, places = (side.narrow(axis, start, n) for side in pair)
        most = values.amax(axis, keepdim=True)
        first = torch.where(values == most, places, math.prod(space)).amin(axis, keepdim=True)
        last = torch.where(torch.isnan(values), places, -1).amax(axis, keepdim=True)
        return most, torch.where(last >= 0, last, first)  # the first of equal elements of a window, the last NaN

    space = x.shape[-len(output_size) :]
    places = torch.arange(math.prod(space)).reshape(space).expand(x.shape)
    return _adaptive((x, places), output_size, pool)


def signbit(x: Any) -> Any:
    """Return whether numbers are negative or -0."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def _copysign(x: Any, y: Any) -> Any:
    dtype = torch.result_type(x, y)
    x = x.to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    if not isinstance(y, torch.Tensor):
        return x.abs() if math.copysign(1, y) > 0 else -x.abs()
    return torch.where(signbit(y), -x.abs(), x.abs())


def _fmax(x: Any, y: Any) -> Any:
    return torch.where(torch.isnan(x), y, torch.where(torch.isnan(y), x, torch.maximum(x, y)))


def _fmin(x: Any, y: Any) -> Any:
    return torch.where(torch.isnan(x), y, torch.where(torch.isnan(y), x, torch.minimum(x, y)))


def _hypot(x: Any, y: Any) -> Any:
    """The larger side is factored out, so that squares do not overflow."""
    x, y = x.abs(), y.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(large == 0, 0.0, small / large)
    return torch.where(torch.isinf(x) | torch.isinf(y), torch.inf, large * torch.sqrt(1 + ratio * ratio))


def _is_special(x: Any, *, of_integers: bool) -> Any:
    """ONNX's tests for NaN and infinities take no integers."""
    return NotImplemented if x.is_floating_point() else torch.full_like(x, of_integers, dtype=torch.bool)


def _rounded(x: Any) -> Any:
    """ONNX does not round integers."""
    return NotImplemented if x.is_floating_point() else x.clone()


def _angle(x: Any) -> Any:
    """The exporter gives an angle of an integer its type."""
    return torch.where(x < 0, math.pi, 0.0) if not (x.is_floating_point() or x.is_complex()) else NotImplemented


def _softmax(x: Any, dim: int, dtype: Any = None, *, compute: Callable[..., Any]) -> Any:
    """The exporter converts the result, and ONNX takes no integers."""
    return NotImplemented if dtype in (None, x.dtype) else compute(x.to(dtype), dim)


def _extreme(x: Any, dim: Sequence[int] = (), keepdim: bool = False, *, reduce: Callable[..., Any]) -> Any:
    if not x.dim():
        return x.clone()
    return NotImplemented if len(dim) else reduce(x, list(range(x.dim())), keepdim)


def _selected(x: Any, mask: Any) -> Any:
    x, mask = torch.broadcast_tensors(x, mask)
    return aten.index.Tensor(x, [mask]) if x.dim() else NotImplemented


def _truth(x: Any, *args: Any, reduce: Callable[..., Any]) -> Any:
    """PyTorch's result of bytes has bytes, and ONNX reduces no scalar along an axis."""
    if x.dtype is torch.uint8:
        return reduce(x != 0, *args).to(x.dtype)
    return NotImplemented if x.dim() else x != 0


def _places(x: Any) -> Any:
    """Places in a scalar have no coordinates; the exporter gives them one."""
    return NotImplemented if x.dim() else x.reshape(1).nonzero()[:, :0]


def _sum_of_numbers(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return NotImplemented if x.is_floating_point() else torch.sum(x, dim, keepdim, dtype=dtype)


def running(x: Any, dim: int, reduce: Callable[[Any], Any], neutral: float) -> Any:
    """Return the reductions of the elements up to each place along an axis; `neutral` changes none of them."""
    if x.dim() == 0:
        return x.clone()
    rows = x.movedim(dim, -1)
    n = rows.shape[-1]
    before = torch.ones(n, n, dtype=torch.bool).tril()
    return reduce(torch.where(before, rows.unsqueeze(-2), neutral)).movedim(-1, dim)


def _cumulative_product(x: Any, dim: int, *, dtype: Any = None) -> Any:
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    return running(x.to(dtype), dim, lambda rows: rows.prod(-1, dtype=dtype), 1)


def _also_of_scalars(compute: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a function along an axis, extended to scalars, which count as a row of one element."""

    def extended(x: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if x.dim():
            return compute(x, *args, **kwargs)
        return tuple(part.reshape(()) for part in compute(x.reshape(1), *args, **kwargs))

    return extended


def _cumulative_end(x: Any, dim: int, reduce: Callable[[Any], Any], neutral: str) -> tuple[Any, ...]:
    if x.dtype is torch.bool:
        values, places = _cumulative_end(x.to(torch.uint8), dim, reduce, neutral)
        return values != 0, places
    ends = {"min": -torch.inf, "max": torch.inf}
    values = running(x, dim, reduce, ends[neutral] if x.is_floating_point() else getattr(torch.iinfo(x.dtype), neutral))
    shape = [1] * x.dim()
    shape[dim] = -1
    places = torch.arange(x.shape[dim]).reshape(shape).expand(x.shape)
    is_new = (x == values) | torch.isnan(x)  # the last of equal elements counts
    found = running(torch.where(is_new, places, 0).to(torch.float32), dim, lambda rows: rows.amax(-1), 0.0)
    return values, found.to(torch.int64)


@_also_of_scalars
def _cumulative_maximum(x: Any, dim: int) -> tuple[Any, ...]:
    return _cumulative_end(x, dim, lambda rows: rows.amax(-1), "min")


@_also_of_scalars
def _cumulative_minimum(x: Any, dim: int) -> tuple[Any, ...]:
    return _cumulative_end(x, dim, lambda rows: rows.amin(-1), "max")


@_also_of_scalars
def _kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    values, places = torch.sort(x, dim=dim, stable=True)
    values, places = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


@_also_of_scalars
def _median(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower of two elements in the middle; NaN if there is one."""
    values, places = _kth_value(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if not x.is_floating_point():
        return values, places
    is_nan = torch.isnan(x)
    some = is_nan.any(dim, keepdim)
    return torch.where(some, torch.nan, values), torch.where(some, is_nan.int().argmax(dim, keepdim), places)


def _median_of_all(x: Any) -> Any:
    return _median(x.reshape(-1), 0)[0]


@_also_of_scalars
def _nan_median(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, ...]:
    if not x.is_floating_point():
        return _median(x, dim, keepdim)
    values, places = torch.sort(x, dim=dim, stable=True)
    middle = ((~torch.isnan(x)).sum(dim, keepdim=True) - 1).clamp(min=0) // 2
    values, places = values.gather(dim, middle), places.gather(dim, middle)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _nan_median_of_all(x: Any) -> Any:
    return _nan_median(x.reshape(-1), 0)[0]


def _sort(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, ...]:
    """ONNX's sort is stable."""
    return tuple(aten.sort.default(x, dim, descending))


def _order(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    return aten.sort.default(x, dim, descending)[1]


def _distances(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


def _pairs(x: Any, p: float = 2.0) -> Any:
    n = x.shape[0]
    if n < 2:
        return x.new_zeros(0)
    first, second = torch.triu_indices(n, n, 1)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


def _convolution_of_times(x: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    turned = torch.nn.functional.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return turned.permute(2, 0, 1)


def _leaky(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    """In training it draws random numbers, and is refused."""
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if not src.numel():
        return x.clone()
    rows = x.movedim((dim1, dim2), (-2, -1))
    first, second = (torch.arange(n) for n in rows.shape[-2:])
    is_on = first[:, None] + offset == second
    places = (first[:, None] + min(0, offset)).clamp(0, src.shape[-1] - 1).expand(is_on.shape)
    return torch.where(is_on, src[..., places], rows).movedim((-2, -1), (dim1, dim2))


def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    places = mask.reshape(-1).to(torch.int64).cumsum(0) - 1
    taken = source.reshape(-1)[places.clamp(0, source.numel() - 1)]
    return torch.where(mask, taken.reshape(x.shape), x)


def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    flat = x.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def _search(ordered: Any, values: Any, *, out_int32: bool = False, right: bool = False, **options: Any) -> Any:
    """The steps of a search by halves are PyTorch's, which are defined for rows without an order, too."""
    if options.get("sorter") is not None:
        ordered = ordered.gather(-1, options["sorter"])
    if options.get("side") is not None:
        right = options["side"] == "right"
    values = values if isinstance(values, torch.Tensor) else torch.full((), values)
    n = ordered.shape[-1]
    low, high = torch.zeros(values.shape, dtype=torch.int64), torch.full(values.shape, n)
    for _ in range(n.bit_length()):
        middle = (low + high) // 2
        places = middle.clamp(max=n - 1)
        flat = places.reshape(-1) if ordered.dim() == 1 else places
        found = ordered.gather(-1, flat).reshape(places.shape)
        is_above = (low < high) & ~(found > values if right else found >= values)
        low, high = torch.where(is_above, middle + 1, low), torch.where(is_above, high, middle)
    return low.to(torch.int32 if out_int32 else torch.int64)


def _bucketize(values: Any, ordered: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _search(ordered, values, out_int32=out_int32, right=right)


def _is_in(values: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    return (values.unsqueeze(-1) == among.reshape(-1)).any(-1) ^ invert


def _likeness(x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    if x.dim() or y.dim():
        return NotImplemented
    return torch.nn.functional.cosine_similarity(x.reshape(1), y.reshape(1), 0, eps).reshape(())


def _bags(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Reduce the rows of each bag: their sum, mean or maximum."""
    starts = offsets[:-1] if include_last_offset else offsets
    ends = torch.cat((starts[1:], starts.new_full((1,), indices.shape[0])))
    places = torch.arange(indices.shape[0])
    inside = (places >= starts[:, None]) & (places < ends[:, None])
    if padding_idx is not None:
        inside = inside & (indices != padding_idx % weight.shape[0])
    rows = weight[indices] if per_sample_weights is None else weight[indices] * per_sample_weights[:, None]
    counts = inside.sum(1, keepdim=True)
    if include_last_offset and padding_idx is None and mode < 2 and weight.dtype is not torch.float64:
        inside = inside & (places < offsets[-1])  # PyTorch ends the last bag here, but counts all rows after its start
    if mode == 2:
        largest = torch.where(inside[..., None], rows, -torch.inf).amax(1)
        result = torch.where(counts > 0, largest, 0.0)
    else:
        result = torch.where(inside[..., None], rows, 0.0).sum(1)
        result = result / counts.clamp(min=1) if mode == 1 else result
    return result, offsets, counts.squeeze(1), offsets


def _projected_lstm(
    x: Any,
    state: Sequence[Any],
    weights: Sequence[Any],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """ONNX's LSTM has no projection of its output; others are left to the exporter."""
    ways = 2 if bidirectional else 1
    each = len(weights) // (layers * ways)
    if each == (4 if has_biases else 2):
        return NotImplemented
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for layer in range(layers):
        sides = []
        for n in range(layer * ways, (layer + 1) * ways):
            own = weights[n * each : (n + 1) * each]
            rows, *end = _projected_layer(x.flip(0) if n % ways else x, state[0][n], state[1][n], own)
            sides.append(rows.flip(0) if n % ways else rows)
            ends.append(end)
        x = torch.cat(sides, -1)
    hidden, cell = (torch.stack(side) for side in zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, hidden, cell


def _projected_layer(x: Any, hidden: Any, cell: Any, weights: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return the outputs of all steps, and the last output and cell."""
    from_input, from_hidden, *biases, projection = weights
    rows = []
    for step in torch.nn.functional.linear(x, from_input, sum(biases) if biases else None).unbind(0):
        enter, forget, change, leave = (step + hidden @ from_hidden.T).chunk(4, -1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(change)
        hidden = (torch.sigmoid(leave) * torch.tanh(cell)) @ projection.T
        rows.append(hidden)
    return torch.stack(rows), hidden, cell


def _powers(x: Any, N: int | None = None, increasing: bool = False) -> Any:  # noqa: N803 - PyTorch's name
    x = torch.atleast_1d(x if x.is_floating_point() or x.is_complex() else x.to(torch.int64))
    count = x.shape[-1] if N is None else N
    columns = [torch.ones_like(x)]
    for _ in range(count - 1):
        columns.append(columns[-1] * x)
    return torch.stack((columns if increasing else columns[::-1])[:count], -1)


MISSING: dict[Any, Callable[..., Any]] = {
    aten.adaptive_avg_pool3d.default: _adaptive_mean,
    aten.adaptive_max_pool1d.default: _adaptive_max,
    aten.adaptive_max_pool2d.default: _adaptive_max,
    aten.adaptive_max_pool3d.default: _adaptive_max,
    aten.index_reduce.default: _index_reduce,
    aten.repeat_interleave.self_Tensor: _repeated,
    aten.repeat_interleave.Tensor: _numbers_of_parts,
    aten.scatter.reduce: _scatter_with,
    aten.scatter.value_reduce: _scatter_with,
    **dict.fromkeys([aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default], _rounded),
    **dict.fromkeys([aten.isnan.default, aten.isinf.default], partial(_is_special, of_integers=False)),
    aten.isfinite.default: partial(_is_special, of_integers=True),
    aten.angle.default: _angle,
    aten.softmax.int: partial(_softmax, compute=torch.softmax),
    aten.log_softmax.int: partial(_softmax, compute=torch.log_softmax),
    aten.amax.default: partial(_extreme, reduce=torch.amax),
    aten.amin.default: partial(_extreme, reduce=torch.amin),
    **{
        operator: partial(_truth, reduce=operator)
        for packet in (aten.any, aten.all)
        for operator in (packet.default, packet.dim, packet.dims)
    },
    aten.nonzero.default: _places,
    aten.masked_select.default: _selected,
    aten.nansum.default: _sum_of_numbers,
    aten.linalg_vander.default: partial(_powers, increasing=True),
    **dict.fromkeys([aten.copysign.Tensor, aten.copysign.Scalar], _copysign),
    aten.fmax.default: _fmax,
    aten.fmin.default: _fmin,
    aten.hypot.default: _hypot,
    aten.cumprod.default: _cumulative_product,
    aten.cummax.default: _cumulative_maximum,
    aten.cummin.default: _cumulative_minimum,
    aten.kthvalue.default: _kth_value,
    aten.median.dim: _median,
    aten.median.default: _median_of_all,
    aten.nanmedian.dim: _nan_median,
    aten.nanmedian.default: _nan_median_of_all,
    aten.sort.stable: _sort,
    aten.argsort.stable: _order,
    aten.aminmax.default: decomposition_table[aten.aminmax.default],
    aten.cdist.default: _distances,
    aten.pdist.default: _pairs,
    aten.conv_tbc.default: _convolution_of_times,
    aten.rrelu.default: _leaky,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.masked_scatter.default: _masked_scatter,
    aten.put.default: _put,
    aten.searchsorted.Tensor: _search,
    aten.searchsorted.Scalar: _search,
    **dict.fromkeys([aten.bucketize.Tensor, aten.bucketize.Scalar], _bucketize),
    aten.isin.Tensor_Tensor: _is_in,
    aten.cosine_similarity.default: _likeness,
    aten.embedding_bag.default: _bags,
    aten.embedding_bag.padding_idx: _bags,
    aten.lstm.input: _projected_lstm,
    aten.vander.default: _powers,
}
"""Operators that the exporter has no translation of."""
