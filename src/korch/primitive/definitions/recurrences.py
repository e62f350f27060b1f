"""Recurrent operators, step by step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from korch.primitive.definitions.node import Definition, Given, Inputs, optional, present
from korch.primitive.op import Array

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


def _functions(attributes: Given, usual: Sequence[str], directions: int) -> list[Callable[[Array], Array]]:
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
    attributes: Given

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
    def recurrence(inputs: Inputs, attributes: Given) -> Sequence[Array]:
        if attributes.get("layout", 0):
            moved = [a.swapaxes(0, 1) if a is not None and i in (0, 5, 6) else a for i, a in enumerate(inputs)]
            y, *finals = recurrence(moved, {**attributes, "layout": 0})
            return [y.transpose(2, 0, 1, 3), *(states.swapaxes(0, 1) for states in finals)]
        x, w, r = (present(inputs, i) for i in range(3))
        steps, batch, (count, gates, _), hidden = x.shape[0], x.shape[1], w.shape, r.shape[2]

        def given(i: int, shape: tuple[int, ...]) -> Array:
            found = optional(inputs, i)
            return np.zeros(shape, x.dtype) if found is None else found

        functions = _functions(attributes, usual, count)
        biases, peepholes = given(3, (count, 2 * gates)), given(7, (count, 3 * hidden))
        h, c = (given(i, (count, batch, hidden)) for i in (5, 6))
        lengths = optional(inputs, 4)
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


ROWS: dict[str, Definition] = {
    "GRU": _recurrence(_Cell.gru, "Sigmoid", "Tanh"),
    "LSTM": _recurrence(_Cell.lstm, "Sigmoid", "Tanh", "Tanh"),
    "RNN": _recurrence(_Cell.rnn, "Tanh"),
}
