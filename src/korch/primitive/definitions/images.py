"""Pools, resizes and transposed convolutions, in float64."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from korch.primitive.definitions.node import OPSET, Definition, Given, Inputs, optional, present
from korch.primitive.op import Array
from korch.primitive.types import DType

Numbers = Sequence[int]


@dataclass(frozen=True, slots=True)
class _Taps:
    """The windows along one axis."""

    at: Array  # the place that each window reads with each tap, [windows, taps]; it may be outside of the axis
    is_inside: Array  # whether it is a place of the input
    is_padded: Array  # whether it is a place of the input or of the padding; windows of `ceil_mode` reach further


def _taps(attributes: Given, n: int, i: int) -> _Taps:
    kernel, rank = attributes["kernel_shape"][i], len(attributes["kernel_shape"])
    stride, dilation = (attributes.get(name, [1] * rank)[i] for name in ("strides", "dilations"))
    extent, auto = (kernel - 1) * dilation + 1, attributes.get("auto_pad", b"NOTSET")
    begin, end = (attributes.get("pads", [0] * 2 * rank)[j] for j in (i, rank + i))
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        count = -(-n // stride)
        total = (count - 1) * stride + extent - n
        begin = int((total + (auto == b"SAME_LOWER")) / 2)
        end = total - begin
    else:
        begin, end = (0, 0) if auto == b"VALID" else (begin, end)
        rest = n + begin + end - extent
        count = rest // stride + 1
        if attributes.get("ceil_mode", 0) and rest % stride and count * stride < n + begin:
            count += 1  # a window that begins in the padding behind the axis is left out
    at = np.arange(count)[:, None] * stride - begin + np.arange(kernel) * dilation
    return _Taps(at, (at >= 0) & (at < n), (at >= -begin) & (at < n + end))


def _parts(x: Array, axes: Sequence[_Taps], outside: float) -> Iterator[Array]:
    """Yield the elements that each tap reads, for all windows."""
    for tap in itertools.product(*(range(taps.at.shape[1]) for taps in axes)):
        places = [np.clip(taps.at[:, k], 0, n - 1) for taps, k, n in zip(axes, tap, x.shape[2:], strict=True)]
        inside = reduce(np.logical_and.outer, (taps.is_inside[:, k] for taps, k in zip(axes, tap, strict=True)))
        yield np.where(inside, x[np.ix_(*map(np.arange, x.shape[:2]), *places)], outside)


def _pool(combine: Callable[[Iterator[Array], Given, Sequence[_Taps]], Array], outside: float) -> Definition:
    def pool(inputs: Inputs, attributes: Given) -> Sequence[Array]:
        x = present(inputs, 0)
        if 0 in x.shape:
            raise NotImplementedError("no elements")
        axes = [_taps(attributes, n, i) for i, n in enumerate(x.shape[2:])]
        least = outside if DType.of(x.dtype).is_float else max(outside, np.iinfo(x.dtype).min)
        found = combine(_parts(x.astype(np.float64), axes, least), attributes, axes)
        return [found.astype(x.dtype)]

    return pool


def _average(parts: Iterator[Array], attributes: Given, axes: Sequence[_Taps]) -> Array:
    is_padded = attributes.get("count_include_pad", 0)
    counts = [(taps.is_padded if is_padded else taps.is_inside).sum(1) for taps in axes]
    return np.asarray(reduce(np.add, parts) / reduce(np.multiply.outer, counts))


def _norm(parts: Iterator[Array], attributes: Given, axes: Sequence[_Taps]) -> Array:
    p = attributes.get("p", 2)
    return np.asarray(reduce(np.add, (np.abs(part) ** p for part in parts)) ** (1 / p))


def _position(attributes: Given, n: int, out: int, scale: float, region: tuple[float, float]) -> Array:
    """Return the place in the input of each element of the output.

    `scale`: how much it grows; the exact product of it and the size may be no integer. `region`: the part of the axis
    that is resized, as fractions of its size.
    """
    x, length = np.arange(out, dtype=np.float64), scale * n
    mode = attributes.get("coordinate_transformation_mode", b"half_pixel").decode()
    middle = (x + 0.5) / scale - 0.5
    match "asymmetric" if attributes[OPSET] < 11 else mode:
        case "half_pixel":
            return middle
        case "half_pixel_symmetric":
            return middle + n / 2 * (1 - out / length)
        case "pytorch_half_pixel":
            return middle if out > 1 else np.zeros(out)
        case "align_corners":
            return x * (n - 1) / (length - 1) if length != 1 else np.zeros(out)
        case "asymmetric":
            return x / scale
        case "tf_crop_and_resize":
            first, last = (end * (n - 1) for end in region)
            return first + x * (last - first) / (out - 1) if out > 1 else np.full(1, (first + last) / 2)
    raise NotImplementedError(mode)


_NEAREST: dict[bytes, Callable[[Array], Array]] = {
    b"round_prefer_floor": lambda x: np.ceil(x - 0.5),
    b"round_prefer_ceil": lambda x: np.floor(x + 0.5),
    b"floor": np.floor,
    b"ceil": np.ceil,
}


def _triangle(distance: Array) -> Array:
    return np.asarray(np.maximum(1 - distance, 0))


def _cubic(a: float) -> Callable[[Array], Array]:
    """Return the weight of an element by its distance; Keys, Cubic convolution interpolation, equation (4)."""

    def weight(d: Array) -> Array:
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, a * (((d - 5) * d + 8) * d - 4)
        return np.where(d < 1, near, np.where(d < 2, far, 0))

    return weight


def _resized_axis(x: Array, axis: int, where: Array, scale: float, attributes: Given) -> Array:
    """Return an array whose elements along an axis are sums of neighbours of places, with weights."""
    n, mode = x.shape[axis], attributes.get("mode", b"nearest")
    if mode == b"nearest":
        rounding = attributes.get("nearest_mode", b"round_prefer_floor" if attributes[OPSET] > 10 else b"floor")
        near = np.rint(2 * where) / 2  # it is no rounding error, also of a scale of float32
        exact = np.where(np.abs(where - near) < 2.0**-23 * np.maximum(near, 1), near, where)
        return np.take(x, np.clip(_NEAREST[rounding](exact), 0, n - 1).astype(np.int64), axis)
    reach, weight = (1, _triangle) if mode == b"linear" else (2, _cubic(attributes.get("cubic_coeff_a", -0.75)))
    stretch = min(scale, 1.0) if attributes.get("antialias", 0) else 1.0
    width = math.ceil(reach / stretch)
    places = np.floor(where).astype(np.int64) + np.arange(1 - width, width + 1)[:, None]
    weights = weight(np.abs(where - places) * stretch)
    if attributes.get("exclude_outside", 0):
        weights *= (places >= 0) & (places < n)
    weights /= weights.sum(0)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    total = np.zeros(())
    for at, w in zip(np.clip(places, 0, n - 1), weights.reshape(len(weights), *shape), strict=True):
        total = total + np.where(w == 0, 0, np.take(x, at, axis) * w)
    return total


def _scales(inputs: Inputs, attributes: Given, shape: Numbers) -> tuple[list[float], list[int]]:
    """Return how much each axis grows that is resized, and the sizes of these axes in the output."""
    scales, sizes = (optional(inputs, i) for i in ((1, 9) if attributes[OPSET] < 11 else (2, 3)))
    if sizes is None or not sizes.size:
        if scales is None or len(scales) != len(shape):
            raise NotImplementedError("other scales than axes")
        # The text also multiplies with the region's length; no shape inference and no runtime does.
        return [float(s) for s in scales], [math.floor(n * float(s)) for n, s in zip(shape, scales, strict=True)]
    ratios, policy = [int(m) / n for m, n in zip(sizes, shape, strict=True)], attributes.get("keep_aspect_ratio_policy")
    if policy in (None, b"stretch"):
        return ratios, [int(m) for m in sizes]
    same = min(ratios) if policy == b"not_larger" else max(ratios)
    return [same] * len(ratios), [math.floor(same * n + 0.5) for n in shape]


def _resize(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, region = present(inputs, 0), optional(inputs, 1)
    is_crop = attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize"
    is_nearest = attributes.get("mode", b"nearest") == b"nearest"
    if 0 in x.shape:
        raise NotImplementedError("no elements")
    axes = [int(a) % x.ndim for a in attributes.get("axes", range(x.ndim))]
    scales, sizes = _scales(inputs, attributes, [x.shape[a] for a in axes])
    ends = region.reshape(2, len(axes)).astype(float) if is_crop and region is not None else np.array([[0.0], [1.0]])
    found, is_inside = x if is_nearest else x.astype(np.float64), np.ones((1,) * x.ndim, bool)
    for k, (axis, scale, out) in enumerate(zip(axes, scales, sizes, strict=True)):
        n = x.shape[axis]
        where = _position(attributes, n, out, scale, (ends[0, k % ends.shape[1]], ends[1, k % ends.shape[1]]))
        found = _resized_axis(found, axis, where, scale, attributes)
        is_inside = is_inside & np.reshape(
            (where >= 0) & (where <= n - 1), [-1 if i == axis else 1 for i in range(x.ndim)]
        )
    if is_crop:
        found = np.where(is_inside, found, attributes.get("extrapolation_value", 0.0))
    if DType.of(x.dtype).is_float:
        return [found.astype(x.dtype)]
    found = np.where(np.abs(found - np.rint(found)) < 1e-6, np.rint(found), found)  # it is no rounding error
    if (found < np.iinfo(x.dtype).min).any() or (found > np.iinfo(x.dtype).max).any():
        raise NotImplementedError("integers that overflow")
    return [found.astype(x.dtype)]


def _transposed(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, w, bias = present(inputs, 0).astype(np.float64), present(inputs, 1), optional(inputs, 2)
    rank, groups, auto = w.ndim - 2, attributes.get("group", 1), attributes.get("auto_pad", b"NOTSET")
    strides, dilations = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
    extra, pads = attributes.get("output_padding", [0] * rank), attributes.get("pads", [0] * 2 * rank)
    whole = [
        s * (n - 1) + (k - 1) * d + 1 + e
        for n, k, s, d, e in zip(x.shape[2:], w.shape[2:], strides, dilations, extra, strict=True)
    ]
    sizes = attributes.get("output_shape", [n * s for n, s in zip(x.shape[2:], strides, strict=True)])
    if "output_shape" not in attributes and auto in (b"NOTSET", b"VALID"):
        begin = [0] * rank if auto == b"VALID" else pads[:rank]
        sizes = whole if auto == b"VALID" else [n - pads[i] - pads[rank + i] for i, n in enumerate(whole)]
    else:
        totals = [max(0, n - size) for n, size in zip(whole, sizes, strict=True)]
        begin = [t // 2 if auto == b"SAME_UPPER" else t - t // 2 for t in totals]
    count, most = w.shape[1], [max(n, b + size) for n, b, size in zip(whole, begin, sizes, strict=True)]
    found = np.zeros((x.shape[0], groups, count, *most))
    by_group = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    weights = w.astype(np.float64).reshape(groups, -1, *w.shape[1:])
    for tap in np.ndindex(w.shape[2:]):
        places: Any = [
            slice(t * d, t * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(tap, dilations, strides, x.shape[2:], strict=True)
        ]
        found[(..., *places)] += np.einsum("ngc...,gco->ngo...", by_group, weights[(..., *tap)])
    inside: Any = [slice(b, b + size) for b, size in zip(begin, sizes, strict=True)]
    part = found[(..., *inside)].reshape(x.shape[0], groups * count, *sizes)
    return [(part if bias is None else part + bias.reshape(-1, *[1] * rank)).astype(w.dtype)]


def _local_response(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, size = present(inputs, 0), attributes["size"]
    alpha, beta, bias = (attributes.get(*item) for item in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before = (size - 1) // 2
    squares = np.pad(np.square(x, dtype=np.float64), [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
    sums = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return [(x / (bias + alpha / size * sums) ** beta).astype(x.dtype)]


ROWS: dict[str, Definition] = {
    "AveragePool": _pool(_average, 0.0),
    "ConvTranspose": _transposed,
    "GlobalMaxPool": lambda inputs, attributes: [
        present(inputs, 0).max(tuple(range(2, present(inputs, 0).ndim)), keepdims=True)
    ],
    "LRN": _local_response,
    "LpPool": _pool(_norm, 0.0),
    "MaxPool": _pool(lambda parts, attributes, axes: reduce(np.maximum, parts), -np.inf),
    "Resize": _resize,
}
