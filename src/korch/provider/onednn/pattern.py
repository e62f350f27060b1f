"""The activation functions that oneDNN supports, as patterns of primitives.

In a pattern, "x" is the argument of the function; the `Number`s "a" and "b" are its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.pattern import SOFTPLUS, Found, Number, OpPattern, find_first, op
from korch.provider.onednn.call import Eltwise

_A, _B = Number("a"), Number("b")
_POSITIVE = op("max", "x", 0.0)
_RAMP = op("min", op("max", op("add", op("mul", "x", _A), _B), 0.0), 1.0)
_ERF = op("add", op("erf", op("mul", "x", math.sqrt(0.5))), 1.0)
_ERF_DIVIDED = op("add", op("erf", op("div", "x", math.sqrt(2))), 1.0)
_CUBIC = op("add", "x", op("mul", op("mul", op("mul", "x", "x"), "x"), 0.044715))
_TANH = op("add", op("tanh", op("mul", _CUBIC, math.sqrt(2 / math.pi))), 1.0)
_BELOW = op("sub", op("exp", op("min", "x", 0.0)), 1.0)

PATTERNS: tuple[tuple[str, OpPattern], ...] = (
    ("square", op("mul", "x", "x")),
    ("swish", op("mul", "x", op("sigmoid", "x"))),
    ("swish", op("mul", "x", op("sigmoid", op("mul", "x", _A)))),
    ("hardswish", op("mul", "x", _RAMP)),
    ("soft_relu", SOFTPLUS),
    ("mish", op("mul", "x", op("tanh", SOFTPLUS))),
    ("elu", op("add", _POSITIVE, op("mul", _BELOW, _A))),
    ("elu", op("add", _POSITIVE, _BELOW)),
    ("relu", op("max", "x", op("mul", "x", _A))),
    ("relu", op("where", op("less", "x", 0.0), op("mul", "x", _A), "x")),
    *(
        (name, pattern)
        for name, curve in (("gelu_erf", _ERF), ("gelu_erf", _ERF_DIVIDED), ("gelu_tanh", _TANH))
        for pattern in (
            op("mul", op("mul", "x", 0.5), curve),
            op("mul", op("mul", "x", curve), 0.5),
            op("mul", "x", op("mul", curve, 0.5)),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function in a graph."""

    operation: Eltwise  # the post-operation in oneDNN's terms
    output: int  # the value that it computes
    used: frozenset[int]  # the intermediate values that it computes, and the output


def find_activation(graph: PrimitiveGraph, value: int) -> Activation | None:
    """Return the largest activation function of a value whose intermediate values nothing else reads, or None."""
    best: Activation | None = None
    for kind, pattern in PATTERNS:
        for primitive in graph.primitives:
            known = Found(values={"x": value})
            match = find_first(graph, pattern, primitive.output, known) if primitive.op in pattern.ops else None
            if match is None or not all(map(math.isfinite, match.numbers.values())):
                continue
            used = frozenset(step.output for step in match.used)
            found = Activation(_operation(kind, match.numbers), primitive.output, used)
            is_larger = best is None or len(used) > len(best.used)
            if is_larger and _is_legal(found) and _is_closed(graph, value, found):
                best = found
    return best


def _operation(kind: str, numbers: Mapping[str, float]) -> Eltwise:
    alpha = numbers.get("a", 1.0 if kind in ("swish", "elu", "soft_relu") else 0.0)
    return Eltwise(kind, alpha, numbers.get("b", 0.0))


def _is_legal(found: Activation) -> bool:
    # max(x, a·x) is a leaky relu only for slopes up to 1; and with slope 0, oneDNN would lose the NaN of -inf·0.
    operation = found.operation
    return operation.kind != "relu" or 0 < operation.alpha <= 1


def _is_closed(graph: PrimitiveGraph, value: int, found: Activation) -> bool:
    """Return whether only the function itself reads its argument and its intermediate values."""
    return all(
        graph.primitives[p].output in found.used
        for inner in {value, *found.used} - {found.output}
        for p in graph.consumers[inner]
    )
