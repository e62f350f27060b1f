"""Third opinions on the results of nodes: NumPy or PyTorch by the text of ONNX's specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from korch.primitive.op import Array

Attributes = Mapping[str, Any]
Opinion = Callable[[Sequence[Array | None], Attributes, int], Any]
"""Inputs by position, attributes and opset -> the first output; None if it has no opinion on such a node."""


def onnx_runtime(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Any] | None:
    """Return ONNX Runtime's results without its optimizations; None if it can't run the model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(feeds)))
    except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
        return None


def _dft(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    x = inputs[0]
    if x is None:
        return None
    axis = int(a.get("axis", 1)) if opset < 20 else int(np.asarray(-2 if inputs[2] is None else inputs[2]).item())
    axis %= x.ndim
    values = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    length = None if inputs[1] is None else int(np.asarray(inputs[1]).item())
    is_inverse, one_side = bool(a.get("inverse", 0)), bool(a.get("onesided", 0))
    if is_inverse and one_side:
        return None if x.shape[-1] == 1 else np.fft.irfft(values, length, axis)[..., np.newaxis]
    if is_inverse:
        found = np.fft.ifft(values, length, axis)
    else:
        found = np.fft.fft(values, length, axis)
        if one_side:
            found = found.take(range(found.shape[axis] // 2 + 1), axis)
    return np.stack([found.real, found.imag], -1)


def _stft(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    x, step, window, length = inputs[:4]
    if x is None or step is None or (x.ndim == 3 and x.shape[-1] == 2):
        return None
    rows = x.reshape(*x.shape[:2]).astype(np.float64)
    frame = int(np.asarray(length).item()) if length is not None else len(np.asarray(window))
    begins = range(0, rows.shape[1] - frame + 1, int(np.asarray(step).item()))
    frames = np.stack([rows[:, b : b + frame] for b in begins], 1) * (1 if window is None else window)
    found = np.fft.rfft(frames) if a.get("onesided", 1) else np.fft.fft(frames)
    return np.stack([found.real, found.imag], -1)


def _softmax(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    x = inputs[0]
    if x is None or opset >= 13:
        return None
    axis = int(a.get("axis", 1)) % x.ndim
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1).astype(np.float64)
    power = np.exp(flat - flat.max(1, keepdims=True, initial=-np.inf))
    found = power / power.sum(1, keepdims=True)
    kind = a[""].op_type
    if kind == "Hardmax":
        found = np.eye(flat.shape[1])[flat.argmax(1)]
    return (np.log(found) if kind == "LogSoftmax" else found).reshape(x.shape)


def _lp(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    x = inputs[0]
    if x is None:
        return None
    size = np.linalg.norm(x.astype(np.float64), int(a.get("p", 2)), int(a.get("axis", -1)), keepdims=True)
    return np.where(size == 0, 0.0, x / np.where(size == 0, 1.0, size))


def _lrn(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    x = inputs[0]
    if x is None:
        return None
    size, channels = int(a["size"]), x.shape[1]
    square = np.zeros(x.shape)
    for c in range(channels):
        low, high = max(0, c - (size - 1) // 2), min(channels, c + -(-(size - 1) // 2) + 1)
        square[:, c] = np.square(x[:, low:high].astype(np.float64)).sum(1)
    return x / (a.get("bias", 1.0) + a.get("alpha", 1e-4) / size * square) ** a.get("beta", 0.75)


def _batch_normalization(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    x, *rest = (None if i is None else i.astype(np.float64) for i in inputs[:5])
    if x is None or a.get("training_mode") or any(r is None for r in rest):
        return None
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)] if x.ndim > 1 else [1]
    scale, bias, mean, variance = (r.reshape(shape) for r in rest if r is not None)
    return (x - mean) / np.sqrt(variance + a.get("epsilon", 1e-5)) * scale + bias


def _grid_sample(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    torch = _torch()
    if torch is None or inputs[0] is None or inputs[1] is None:
        return None
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = a.get("mode", b"linear").decode()
    x, grid = (torch.from_numpy(i.astype(np.float64)) for i in inputs[:2] if i is not None)
    found: Array = torch.nn.functional.grid_sample(
        x, grid, names.get(mode, mode), a.get("padding_mode", b"zeros").decode(), bool(a.get("align_corners", 0))
    ).numpy()
    return found


def _conv_transpose(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    """Return a transposed convolution: the full one, cut."""
    torch = _torch()
    x, w, bias = inputs[:3]
    if torch is None or x is None or w is None:
        return None
    auto = a.get("auto_pad", b"NOTSET").decode()
    rank = x.ndim - 2
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    extra, pads = a.get("output_padding", [0] * rank), a.get("pads", [0] * 2 * rank)
    whole = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, k, s, d, e in zip(x.shape[2:], w.shape[2:], strides, dilations, extra, strict=True)
    ]
    if "output_shape" in a or auto.startswith("SAME"):
        same = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        total = [n - m for n, m in zip(whole, a.get("output_shape", same), strict=True)]
        begin = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total]
    else:
        pads = [0] * 2 * rank if auto == "VALID" else pads
        begin, total = list(pads[:rank]), [p + q for p, q in zip(pads[:rank], pads[rank:], strict=True)]
    if min(total) < 0 or not x.size:
        return None
    call = getattr(torch.nn.functional, f"conv_transpose{rank}d")
    tensors = [torch.from_numpy(i.astype(np.float64)) for i in (x, w)]
    shift = None if bias is None else torch.from_numpy(bias.astype(np.float64))
    full = call(*tensors, shift, list(strides), 0, 0, int(a.get("group", 1)), list(dilations)).numpy()
    padded = np.zeros((*full.shape[:2], *whole)) + (0 if bias is None else bias.reshape(1, -1, *[1] * rank))
    padded[tuple(slice(n) for n in full.shape)] = full
    return padded[:, :, *(slice(b, n - (t - b)) for b, n, t in zip(begin, whole, total, strict=True))]


def _recurrent(inputs: Sequence[Array | None], a: Attributes, opset: int) -> Any:
    """Return a recurrent operator by ONNX Runtime's of layout 0, for layout 1 between transposes.

    `onnx.reference` ignores lengths, clip and activations.
    """
    node = onnx.NodeProto()
    node.CopyFrom(a[""])
    kept = [attribute for attribute in node.attribute if attribute.name != "layout"]
    del node.attribute[:]
    node.attribute.extend(kept)
    is_moved = bool(a.get("layout", 0))
    moved = {0, 5, 6} if is_moved else set[int]()
    arrays = {name: x for name, x in zip(node.input, inputs, strict=False) if name and x is not None}
    feeds = {
        name: np.ascontiguousarray(np.swapaxes(x, 0, 1)) if list(node.input).index(name) in moved else x
        for name, x in arrays.items()
    }
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in feeds.items()
    ]
    named = [(i, name) for i, name in enumerate(node.output) if name]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(named[0][1])])
    found = onnx_runtime(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), feeds)
    if found is None:
        return None
    y: Array = found[0]
    if not is_moved:
        return y
    return y.transpose(2, 0, 1, 3) if named[0][0] == 0 else np.swapaxes(y, 0, 1)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


OPINIONS: Mapping[str, Opinion] = {
    "DFT": _dft,
    "STFT": _stft,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Hardmax": _softmax,
    "LpNormalization": _lp,
    "LRN": _lrn,
    "BatchNormalization": _batch_normalization,
    "GridSample": _grid_sample,
    "ConvTranspose": _conv_transpose,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
"""By operator: what the specification says, in NumPy or PyTorch."""
