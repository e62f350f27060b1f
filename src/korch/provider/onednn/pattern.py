"""Activation functions that oneDNN knows, as expressions of primitives.

An expression is a tuple of an operation and its operands: "x" is the value that the function is
applied to, "a" and "b" are uniform constants to find out, a number is itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from korch.primitive.graph import PrimitiveGraph
from korch.provider.onednn.call import Eltwise

Expression = str | float | tuple["Expression", ...]

COMMUTATIVE = ("add", "mul", "max", "min")

_SOFTPLUS: Expression = ("add", ("max", "x", 0.0), ("log", ("add", ("exp", ("neg", ("abs", "x"))), 1.0)))
_RAMP: Expression = ("min", ("max", ("add", ("mul", "x", "a"), "b"), 0.0), 1.0)
_ERF: Expression = ("add", ("erf", ("mul", "x", math.sqrt(0.5))), 1.0)
_ERF_DIVIDED: Expression = ("add", ("erf", ("div", "x", math.sqrt(2))), 1.0)
_TANH: Expression = (
    "add",
    ("tanh", ("mul", ("add", "x", ("mul", ("mul", ("mul", "x", "x"), "x"), 0.044715)), math.sqrt(2 / math.pi))),
    1.0,
)
_BELOW: Expression = ("sub", ("exp", ("min", "x", 0.0)), 1.0)

PATTERNS: tuple[tuple[str, Expression], ...] = (
    ("square", ("mul", "x", "x")),
    ("swish", ("mul", "x", ("sigmoid", "x"))),
    ("swish", ("mul", "x", ("sigmoid", ("mul", "x", "a")))),
    ("hardswish", ("mul", "x", _RAMP)),
    ("soft_relu", _SOFTPLUS),
    ("mish", ("mul", "x", ("tanh", _SOFTPLUS))),
    ("elu", ("add", ("max", "x", 0.0), ("mul", _BELOW, "a"))),
    ("elu", ("add", ("max", "x", 0.0), _BELOW)),
    ("relu", ("max", "x", ("mul", "x", "a"))),
    ("relu", ("where", ("less", "x", 0.0), ("mul", "x", "a"), "x")),
    *(
        (name, expression)
        for name, curve in (("gelu_erf", _ERF), ("gelu_erf", _ERF_DIVIDED), ("gelu_tanh", _TANH))
        for expression in (
            ("mul", ("mul", "x", 0.5), curve),
            ("mul", ("mul", "x", curve), 0.5),
            ("mul", "x", ("mul", curve, 0.5)),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """An activation function in a graph.

    Attributes:
        operation: what oneDNN calls it.
        output: the value that it computes.
        used: the values computed on the way, the output included.
    """

    operation: Eltwise
    output: int
    used: frozenset[int]


def find_activation(graph: PrimitiveGraph, value: int) -> Found | None:
    """Return the largest activation function of a value that nothing else looks into, or None."""
    best: Found | None = None
    for kind, expression in PATTERNS:
        for primitive in graph.primitives:
            if not isinstance(expression, tuple) or primitive.op != expression[0]:
                continue
            binding = _Binding(graph, value)
            if not binding.match(primitive.output, expression):
                continue
            operation = _operation(kind, binding.numbers)
            found = Found(operation, primitive.output, frozenset(binding.used))
            is_larger = best is None or len(found.used) > len(best.used)
            if is_larger and _is_legal(found) and _is_closed(graph, value, found):
                best = found
    return best


def _operation(kind: str, numbers: dict[str, float]) -> Eltwise:
    alpha = numbers.get("a", 1.0 if kind in ("swish", "elu", "soft_relu") else 0.0)
    return Eltwise(kind, alpha, numbers.get("b", 0.0))


def _is_legal(found: Found) -> bool:
    # max(x, a·x) is the leaky function only with a slope up to 1; and a slope 0 loses -inf·0.
    operation = found.operation
    return operation.kind != "relu" or 0 < operation.alpha <= 1


def _is_closed(graph: PrimitiveGraph, value: int, found: Found) -> bool:
    """Return whether only the function itself reads the value and the steps on the way."""
    return all(
        graph.primitives[p].output in found.used
        for inner in {value, *found.used} - {found.output}
        for p in graph.consumers[inner]
    )


class _Binding:
    """A match of one expression while it is found out."""

    def __init__(self, graph: PrimitiveGraph, value: int) -> None:
        self.graph = graph
        self.value = value
        self.used: set[int] = set()
        self.numbers: dict[str, float] = {}

    def match(self, value: int, expression: Expression) -> bool:
        """Return whether a value is the expression; remember what it stands on."""
        if expression == "x":
            return value == self.value
        if isinstance(expression, str | float):
            return self._number(value, expression)
        producers = self.graph.producers[value]
        if not producers:
            return False
        primitive = self.graph.primitives[producers[0]]
        op, *operands = expression
        if primitive.op != op or len(primitive.inputs) != len(operands):
            return False
        orders = [operands]
        if op in COMMUTATIVE:
            orders.append(operands[::-1])
        for order in orders:
            before = set(self.used), dict(self.numbers)
            pairs = zip(primitive.inputs, order, strict=True)
            if all(self.match(inner, operand) for inner, operand in pairs):
                self.used.add(value)
                return True
            self.used, self.numbers = before
        return False

    def _number(self, value: int, wanted: str | float) -> bool:
        constant = self.graph.constants.get(value)
        if constant is None:
            return False
        number = float(constant.scalar)
        if isinstance(wanted, float):
            return abs(number - wanted) <= float(np.spacing(np.float32(wanted)))
        if wanted in self.numbers:
            return self.numbers[wanted] == number
        self.numbers[wanted] = number
        return math.isfinite(number)
