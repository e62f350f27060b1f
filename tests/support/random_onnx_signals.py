"""Random recurrent operators and Fourier transforms."""

from typing import Any

import numpy as np

from korch.primitive.op import Array
from tests.support.random_onnx_fragment import Writer
from tests.support.random_onnx_shapes import Rng, floats, pick

ACTIVATIONS = ("Sigmoid", "Tanh", "Relu", "Affine", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Elu", "Softsign")


def recurrent(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim != 3 or x.dtype != np.float32 or not x.size or max(x.shape) > 17:
        return False
    op = pick(rng, "LSTM", "GRU", "RNN")
    gates, states, functions = {"LSTM": (4, 2, 3), "GRU": (3, 1, 2), "RNN": (1, 1, 1)}[op]
    direction = pick(rng, "forward", "reverse", "bidirectional")
    d, h = 1 + (direction == "bidirectional"), int(rng.integers(1, 5))
    layout = int(rng.integers(2)) if opset >= 14 and rng.random() < 0.6 else 0
    steps, batch = (x.shape[1], x.shape[0]) if layout else x.shape[:2]
    given: dict[str, Any] = {"hidden_size": h, "direction": direction, **({"layout": 1} if layout else {})}
    if rng.random() < 0.3:
        given["clip"] = float(rng.uniform(0.2, 2))
    if rng.random() < 0.4:
        names = [pick(rng, *ACTIVATIONS) for _ in range(d * functions)]
        given |= {"activations": names, "activation_alpha": [0.3] * len(names), "activation_beta": [0.4] * len(names)}
    if op == "GRU" and rng.integers(2):
        given["linear_before_reset"] = 1
    if op == "LSTM" and rng.random() < 0.2:
        given["input_forget"] = 1
    names = [source, *(w.constant(0.5 * floats(rng, x, d, gates * h, n)) for n in (x.shape[2], h))]
    names.append(w.constant(floats(rng, x, d, 2 * gates * h)) if rng.integers(2) else "")
    has_lengths = rng.integers(2)
    names.append(w.constant(rng.integers(1, steps + 1, batch).astype(np.int32)) if has_lengths else "")
    shape = (batch, d, h) if layout else (d, batch, h)
    names += [w.constant(floats(rng, x, *shape)) if rng.integers(2) else "" for _ in range(states)]
    if op == "LSTM":
        names.append(w.constant(floats(rng, x, d, 3 * h)) if rng.integers(2) else "")
    while not names[-1]:
        names.pop()
    w.node(op, names, last=True, outputs=int(rng.integers(1, states + 2)), **given)
    return True


def dft(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.dtype.kind != "f" or not x.size or x.ndim > 4 or max(x.shape) > 40 or opset < 17:
        return False
    if x.shape[-1] not in (1, 2) or x.ndim < 2:
        source = w.node("Unsqueeze", [source, w.constant(np.array([-1]))])
        x = x[..., np.newaxis]
    axis = int(rng.integers(0, x.ndim - 1))
    length = pick(rng, None, x.shape[axis] + int(rng.integers(-2, 3)), int(rng.integers(1, 17)))
    given: dict[str, Any] = {}
    if x.shape[-1] == 2 and rng.integers(2):
        given["inverse"] = 1
    elif x.shape[-1] == 1 and rng.integers(2):
        given["onesided"] = 1
    names = [source, "" if length is None else w.constant(np.array(max(1, length), np.int64))]
    if opset >= 20:
        names.append(w.constant(np.array(axis, np.int64)))
    else:
        given["axis"] = axis
    while not names[-1]:
        names.pop()
    w.node("DFT", names, last=True, **given)
    return True


def stft(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim < 2 or x.dtype.kind != "f" or opset < 17 or not x.size:
        return False
    rows = w.node("Reshape", [source, w.constant(np.array([x.shape[0], -1]))])
    size = int(np.prod(x.shape[1:]))
    frame = int(rng.integers(1, min(size, 24) + 1))
    step = w.constant(np.array(int(rng.integers(1, 7)), np.int64))
    window = w.constant(floats(rng, x, frame)) if rng.integers(2) else ""
    w.node(
        "STFT", [rows, step, window, w.constant(np.array(frame, np.int64))], last=True, onesided=int(rng.integers(2))
    )
    return True
