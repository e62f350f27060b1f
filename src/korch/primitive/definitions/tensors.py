"""Operators that choose, order, accumulate or normalize elements."""

from collections.abc import Callable, Sequence

import numpy as np

from korch.primitive.definitions.node import OPSET, Definition, Given, Inputs, optional, present
from korch.primitive.op import Array
from korch.primitive.types import DType


def _gathered_elements(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    """Return the elements along an axis that indices choose; `onnx.reference` fails for more than 32 elements."""
    data, index = present(inputs, 0), present(inputs, 1)
    axis = attributes.get("axis", 0) % data.ndim
    size = data.shape[axis]
    part = data[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(index.shape))]
    places = np.clip(np.where(index < 0, index + size, index), 0, size - 1).astype(np.int64)
    return [np.take_along_axis(part, places, axis)]


def _gathered(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    """Return the parts along an axis that indices choose; they keep the precision of the data."""
    data, index = present(inputs, 0), present(inputs, 1).astype(np.int64)
    axis = attributes.get("axis", 0)
    return [np.take(data, np.where(index < 0, index + data.shape[axis], index), axis)]


def _running(accumulate: Callable[..., Array], first: int) -> Definition:
    def running(inputs: Inputs, attributes: Given) -> Sequence[Array]:
        axis, step = int(present(inputs, 1).reshape(-1)[0]), -1 if attributes.get("reverse", 0) else 1
        x = np.moveaxis(present(inputs, 0), axis, -1)[..., ::step]
        wide = x.astype(np.float64) if DType.of(x.dtype).is_float else x
        if attributes.get("exclusive", 0):
            wide = np.concatenate([np.full((*x.shape[:-1], 1), first, wide.dtype), wide], -1)[..., : x.shape[-1]]
        found = accumulate(wide, -1, dtype=wide.dtype).astype(x.dtype)
        return [np.moveaxis(found[..., ::step], -1, axis)]

    return running


def _by_rows(compute: Callable[[Array], Array]) -> Definition:
    """Return the definition of a function of rows; before opset 13 the axes from `axis` on are flattened to a row."""

    def by_rows(inputs: Inputs, attributes: Given) -> Sequence[Array]:
        x, is_old = present(inputs, 0), attributes[OPSET] < 13
        axis = attributes.get("axis", 1 if is_old else -1) % x.ndim
        rows = x.reshape(*x.shape[:axis], -1) if is_old else np.moveaxis(x, axis, -1)
        found = compute(rows).astype(x.dtype)
        return [found.reshape(x.shape) if is_old else np.moveaxis(found, -1, axis)]

    return by_rows


def _first_largest(x: Array) -> Array:
    return np.asarray(np.arange(x.shape[-1]) == x.argmax(-1)[..., None])


def _log_softmax(x: Array) -> Array:
    wide = x.astype(np.float64)
    above = wide - wide.max(-1, keepdims=True, initial=-np.inf)
    return np.asarray(above - np.log(np.exp(above).sum(-1, keepdims=True)))


def _fourier(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, length, axis = present(inputs, 0), optional(inputs, 1), optional(inputs, 2)
    is_half = attributes.get("onesided", 0)
    if is_half and attributes.get("inverse", 0):
        raise NotImplementedError("the inverse of half a spectrum")
    along = int((attributes.get("axis", 1) if attributes[OPSET] < 20 else -2) if axis is None else axis) % x.ndim
    count = x.shape[along] if length is None else int(length)
    values = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    found = (np.fft.ifft if attributes.get("inverse", 0) else np.fft.fft)(values, count, along)
    kept = np.take(found, range(count // 2 + 1), along) if is_half else found
    return [np.stack([kept.real, kept.imag], -1).astype(x.dtype)]


def _batch_normalization(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    if attributes[OPSET] < 9 or attributes.get("training_mode", 0):
        raise NotImplementedError("statistics of the batch, or of an older form")
    x = present(inputs, 0)
    scale, bias, mean, variance = (
        present(inputs, i).astype(np.float64).reshape(-1, *[1] * (x.ndim - 2)) for i in range(1, 5)
    )
    return [((x - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-5)) * scale + bias).astype(x.dtype)]


def _unique(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, axis = present(inputs, 0), attributes.get("axis")
    values, *others = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    first, inverse, counts = (array.reshape(-1).astype(np.int64) for array in others)
    if attributes.get("sorted", 1):
        return [values, first, inverse, counts]
    order = np.argsort(first)
    return [np.take(values, order, axis or 0), first[order], np.argsort(order)[inverse], counts[order]]


def _window_spectra(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, step, window, length = (optional(inputs, i) for i in range(4))
    if x is None or step is None:
        raise NotImplementedError("no signal, or no step")
    x = x if x.ndim == 3 else x[..., None]
    is_half, size = attributes.get("onesided", 1), x.shape[1] if window is None else len(window)
    if is_half and x.shape[2] == 2:
        raise NotImplementedError("half the spectrum of complex numbers")
    count = size if length is None else int(length)
    signal = x[..., 0] + (1j * x[..., 1] if x.shape[2] == 2 else 0)
    frames = np.lib.stride_tricks.sliding_window_view(signal, count, 1)[:, :: int(step)]
    found = np.fft.fft(frames * (1 if window is None else window.astype(np.float64)))
    kept = found[..., : count // 2 + 1] if is_half else found
    return [np.stack([kept.real, kept.imag], -1).astype(x.dtype)]


def _mean(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    arrays = [present(inputs, i) for i in range(len(inputs))]
    total = sum(array.astype(np.float64) for array in arrays)
    return [np.asarray(total / len(arrays)).astype(arrays[0].dtype)]


def _over_norm(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, p = present(inputs, 0), attributes.get("p", 2)
    wide = x.astype(np.float64)
    norm = (np.abs(wide) ** p).sum(attributes.get("axis", -1), keepdims=True) ** (1 / p)
    return [np.where(norm == 0, 0, wide / norm).astype(x.dtype)]


def _sum_of_squares(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    x, axes = present(inputs, 0), attributes.get("axes", optional(inputs, 1))
    if (axes is None or not len(axes)) and attributes.get("noop_with_empty_axes", 0):
        raise NotImplementedError("no axes")
    along = None if axes is None or not len(axes) else tuple(int(a) for a in axes)
    wide = x.astype(np.float64) if DType.of(x.dtype).is_float else x
    total = np.sum(wide * wide, along, keepdims=bool(attributes.get("keepdims", 1)), dtype=wide.dtype)
    return [np.asarray(total).astype(x.dtype)]


def _sliced(inputs: Inputs, attributes: Given) -> Sequence[Array]:
    """Return a part; a start before or behind an axis counts as its first or last element if the step is negative."""
    x = present(inputs, 0)
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (attributes.get(name, optional(inputs, i + 1)) for i, name in enumerate(names))
    if starts is None or ends is None:
        raise NotImplementedError("no starts, or no ends")
    steps = [1] * len(starts) if steps is None else steps
    for axis, *ends_of, step in zip(range(x.ndim) if axes is None else axes, starts, ends, steps, strict=False):
        n, is_back = x.shape[int(axis)], step < 0
        low, high = (-1, n - 1) if is_back else (0, n)
        begin, end = (int(i) + (n if i < 0 else 0) for i in ends_of)
        begin, end = min(max(begin, 0), high), min(max(end, low), high)
        x = np.take(x, range(begin, end, int(step)), int(axis))
    return [x]


ROWS: dict[str, Definition] = {
    "BatchNormalization": _batch_normalization,
    "CumProd": _running(np.cumprod, 1),
    "CumSum": _running(np.cumsum, 0),
    "DFT": _fourier,
    "Gather": _gathered,
    "GatherElements": _gathered_elements,
    "Hardmax": _by_rows(_first_largest),
    "LogSoftmax": _by_rows(_log_softmax),
    "LpNormalization": _over_norm,
    "Mean": _mean,
    "ReduceSumSquare": _sum_of_squares,
    "STFT": _window_spectra,
    "Slice": _sliced,
    "Softmax": _by_rows(lambda x: np.exp(_log_softmax(x))),
    "Unique": _unique,
}
