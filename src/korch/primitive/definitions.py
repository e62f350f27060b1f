"""Operators without primitives, computed with NumPy by their definitions, in any type that their inputs have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx

from korch.primitive.op import Array
from korch.primitive.types import DType

Inputs = Sequence[Array | None]
Definition = Callable[[Inputs, Mapping[str, Any]], Sequence[Array]]
"""Returns the outputs for the inputs (None for an omitted one) and the attributes that the node sets, with `OPSET`."""


OPSET = "version of the operator set"


def by_definition(node: onnx.NodeProto, inputs: Inputs, opset: int) -> list[Array] | None:
    """Return a node's outputs without the omitted ones; None if its operator, or this form of it, is not here.

    Args:
        node: the node.
        inputs: its inputs; None for an omitted one.
        opset: the version of the operator set.
    """
    definition = DEFINITIONS.get(node.op_type) if not node.domain else None
    if definition is None:
        return None
    attributes = {OPSET: opset} | {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    try:
        with np.errstate(all="ignore"):
            found = definition(inputs, attributes)
    except NotImplementedError:
        return None
    return [array for array, name in zip(found, node.output, strict=False) if name]


def _given(inputs: Inputs, i: int) -> Array | None:
    return inputs[i] if i < len(inputs) else None


def _present(inputs: Inputs, i: int) -> Array:
    found = _given(inputs, i)
    if found is None:
        raise NotImplementedError(f"input {i} is omitted")
    return found


def _gathered_elements(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    """Return the elements along an axis that indices choose; `onnx.reference` fails for more than 32 elements."""
    data, index = _present(inputs, 0), _present(inputs, 1)
    axis = attributes.get("axis", 0) % data.ndim
    size = data.shape[axis]
    part = data[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(index.shape))]
    places = np.clip(np.where(index < 0, index + size, index), 0, size - 1).astype(np.int64)
    return [np.take_along_axis(part, places, axis)]


def _gathered(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    """Return the parts along an axis that indices choose; they keep the precision of the data."""
    data, index = _present(inputs, 0), _present(inputs, 1).astype(np.int64)
    axis = attributes.get("axis", 0)
    return [np.take(data, np.where(index < 0, index + data.shape[axis], index), axis)]


def _running(accumulate: Callable[..., Array], first: int) -> Definition:
    def running(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
        axis, step = int(_present(inputs, 1).reshape(-1)[0]), -1 if attributes.get("reverse", 0) else 1
        x = np.moveaxis(_present(inputs, 0), axis, -1)[..., ::step]
        wide = x.astype(np.float64) if DType.of(x.dtype).is_float else x
        if attributes.get("exclusive", 0):
            wide = np.concatenate([np.full((*x.shape[:-1], 1), first, wide.dtype), wide], -1)[..., : x.shape[-1]]
        found = accumulate(wide, -1, dtype=wide.dtype).astype(x.dtype)
        return [np.moveaxis(found[..., ::step], -1, axis)]

    return running


def _by_rows(compute: Callable[[Array], Array]) -> Definition:
    """Return the definition of a function of rows; before opset 13 the axes from `axis` on are flattened to a row."""

    def by_rows(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
        x, is_old = _present(inputs, 0), attributes[OPSET] < 13
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


def _local_response(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    x, size = _present(inputs, 0), attributes["size"]
    alpha, beta, bias = (attributes.get(*item) for item in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before = (size - 1) // 2
    squares = np.pad(np.square(x, dtype=np.float64), [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
    sums = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return [(x / (bias + alpha / size * sums) ** beta).astype(x.dtype)]


def _fourier(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    x, length, axis = _present(inputs, 0), _given(inputs, 1), _given(inputs, 2)
    is_half = attributes.get("onesided", 0)
    if is_half and attributes.get("inverse", 0):
        raise NotImplementedError("the inverse of half a spectrum")
    along = int((attributes.get("axis", 1) if attributes[OPSET] < 20 else -2) if axis is None else axis) % x.ndim
    count = x.shape[along] if length is None else int(length)
    values = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    found = (np.fft.ifft if attributes.get("inverse", 0) else np.fft.fft)(values, count, along)
    kept = np.take(found, range(count // 2 + 1), along) if is_half else found
    return [np.stack([kept.real, kept.imag], -1).astype(x.dtype)]


def _batch_normalization(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    if attributes[OPSET] < 9 or attributes.get("training_mode", 0):
        raise NotImplementedError("statistics of the batch, or of an older form")
    x = _present(inputs, 0)
    scale, bias, mean, variance = (
        _present(inputs, i).astype(np.float64).reshape(-1, *[1] * (x.ndim - 2)) for i in range(1, 5)
    )
    return [((x - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-5)) * scale + bias).astype(x.dtype)]


def _global_max(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    x = _present(inputs, 0)
    return [x.max(tuple(range(2, x.ndim)), keepdims=True)]


def _unique(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
    x, axis = _present(inputs, 0), attributes.get("axis")
    values, *others = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    first, inverse, counts = (array.reshape(-1).astype(np.int64) for array in others)
    if attributes.get("sorted", 1):
        return [values, first, inverse, counts]
    order = np.argsort(first)
    return [np.take(values, order, axis or 0), first[order], np.argsort(order)[inverse], counts[order]]


_FUNCTIONS: dict[str, tuple[tuple[float, ...], Callable[..., Array]]] = {
    "Affine": ((1.0, 0.0), lambda x, a, b: a * x + b),
    "Elu": ((1.0,), lambda x, a: np.where(x < 0, a * np.expm1(x), x)),
    "HardSigmoid": ((0.2, 0.5), lambda x, a, b: np.clip(a * x + b, 0, 1)),
    "LeakyRelu": ((0.01,), lambda x, a: np.where(x < 0, a * x, x)),
    "Relu": ((), lambda x: np.maximum(x, 0)),
    "Sigmoid": ((), lambda x: 1 / (1 + np.exp(-x))),
    "Softplus": ((), lambda x: np.logaddexp(x, 0)),
    "Softsign": ((), lambda x: x / (1 + np.abs(x))),
    "Tanh": ((), np.tanh),
    "ThresholdedRelu": ((1.0,), lambda x, a: np.where(x >= a, x, 0)),
}
"""The functions of recurrent operators, after the defaults of their parameters."""


def _applied(function: Callable[..., Array], parameters: Sequence[float], x: Array) -> Array:
    return function(x, *parameters)


def _functions(attributes: Mapping[str, Any], usual: Sequence[str], directions: int) -> list[Callable[[Array], Array]]:
    """Return the functions of all directions; each takes its parameters from the lists of the attributes."""
    names = [name.decode() for name in attributes.get("activations", [])] or [*usual] * directions
    lists = [list(attributes.get(f"activation_{name}", [])) for name in ("alpha", "beta")]
    found: list[Callable[[Array], Array]] = []
    for name in names:
        if name not in _FUNCTIONS:
            raise NotImplementedError(name)
        defaults, function = _FUNCTIONS[name]
        given = [values.pop(0) if values else default for values, default in zip(lists, defaults, strict=False)]
        found.append(partial(_applied, function, given))
    return found


@dataclass(frozen=True, eq=False)
class _Cell:
    """One direction of a recurrent operator; `r` and `bias` are of the hidden state.

    Each of its methods returns the next states, for the gates' parts of the input, with their bias, and the states.
    """

    r: Array
    bias: Array
    peepholes: Array
    functions: Sequence[Callable[[Array], Array]]
    attributes: Mapping[str, Any]

    def _clipped(self, x: Array) -> Array:
        limit = self.attributes.get("clip", np.inf)
        return np.clip(x, -limit, limit)

    def rnn(self, given: Array, h: Array, c: Array) -> tuple[Array, Array]:
        return self.functions[0](self._clipped(given + h @ self.r.T + self.bias)), c

    def gru(self, given: Array, h: Array, c: Array) -> tuple[Array, Array]:
        size, (f, g) = 2 * h.shape[1], self.functions
        gates = f(self._clipped(given[:, :size] + h @ self.r[:size].T + self.bias[:size]))
        update, reset = np.split(gates, 2, 1)
        if self.attributes.get("linear_before_reset", 0):
            state = reset * (h @ self.r[size:].T + self.bias[size:])
        else:
            state = (reset * h) @ self.r[size:].T + self.bias[size:]
        return (1 - update) * g(self._clipped(given[:, size:] + state)) + update * h, c

    def lstm(self, given: Array, h: Array, c: Array) -> tuple[Array, Array]:
        f, g, last = self.functions
        i, o, forget, cell = np.split(given + h @ self.r.T + self.bias, 4, 1)
        of_i, of_o, of_forget = np.split(self.peepholes, 3)
        i = f(self._clipped(i + of_i * c))
        forget = 1 - i if self.attributes.get("input_forget", 0) else f(self._clipped(forget + of_forget * c))
        c = forget * c + i * g(self._clipped(cell))
        return f(self._clipped(o + of_o * c)) * last(c), c


_Step = Callable[[_Cell, Array, Array, Array], tuple[Array, Array]]


def _recurrence(step: _Step, *usual: str) -> Definition:
    def recurrence(inputs: Inputs, attributes: Mapping[str, Any]) -> Sequence[Array]:
        if attributes.get("layout", 0):
            moved = [a.swapaxes(0, 1) if a is not None and i in (0, 5, 6) else a for i, a in enumerate(inputs)]
            y, *finals = recurrence(moved, {**attributes, "layout": 0})
            return [y.transpose(2, 0, 1, 3), *(states.swapaxes(0, 1) for states in finals)]
        x, w, r = (_present(inputs, i) for i in range(3))
        steps, batch, (count, gates, _), hidden = x.shape[0], x.shape[1], w.shape, r.shape[2]

        def given(i: int, shape: tuple[int, ...]) -> Array:
            found = _given(inputs, i)
            return np.zeros(shape, x.dtype) if found is None else found

        functions = _functions(attributes, usual, count)
        biases, peepholes = given(3, (count, 2 * gates)), given(7, (count, 3 * hidden))
        h, c = (given(i, (count, batch, hidden)) for i in (5, 6))
        lengths = _given(inputs, 4)
        lengths, every = np.full(batch, steps) if lengths is None else lengths, np.arange(batch)
        y, last = np.zeros((steps, count, batch, hidden), x.dtype), []
        for d in range(count):
            own = functions[d * len(usual) :][: len(usual)]
            cell = _Cell(r[d], biases[d, gates:], peepholes[d], own, attributes)
            states = (h[d], c[d])
            for t in range(steps):
                is_backward = d == 1 or attributes.get("direction") == b"reverse"
                place, is_inside = lengths - 1 - t if is_backward else np.full(batch, t), t < lengths
                new = step(cell, x[place, every] @ w[d].T + biases[d, :gates], *states)
                states = (
                    np.where(is_inside[:, None], new[0], states[0]),
                    np.where(is_inside[:, None], new[1], states[1]),
                )
                y[place[is_inside], d, every[is_inside]] = states[0][is_inside]
            last.append(states)
        return [y, *(np.stack(part) for part in zip(*last, strict=True))]

    return recurrence


DEFINITIONS: dict[str, Definition] = {
    "BatchNormalization": _batch_normalization,
    "CumProd": _running(np.cumprod, 1),
    "CumSum": _running(np.cumsum, 0),
    "DFT": _fourier,
    "GRU": _recurrence(_Cell.gru, "Sigmoid", "Tanh"),
    "Gather": _gathered,
    "GatherElements": _gathered_elements,
    "GlobalMaxPool": _global_max,
    "Hardmax": _by_rows(_first_largest),
    "LRN": _local_response,
    "LSTM": _recurrence(_Cell.lstm, "Sigmoid", "Tanh", "Tanh"),
    "LogSoftmax": _by_rows(_log_softmax),
    "RNN": _recurrence(_Cell.rnn, "Tanh"),
    "Softmax": _by_rows(lambda x: np.exp(_log_softmax(x))),
    "Unique": _unique,
}
"""The definitions by the operator's name."""
