"""Fission: splits the operators of a model into primitives."""

from collections.abc import Mapping

from korch.fission import (
    activation,
    elementwise,
    gather,
    integer,
    layout,
    linear,
    loop,
    normalization,
    pooling,
    quantize,
    recurrent,
    reduction,
    resize,
    spectrum,
    transposed,
)
from korch.fission.rule import FissionRule, NotSplitError
from korch.fission.split import FissionReport, KeptWhole, evaluate_operator, split_operators
from korch.frontend.operator import Operator, OperatorGraph
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.types import ValueType

RULES: tuple[FissionRule, ...] = (
    *elementwise.RULES,
    *activation.RULES,
    *reduction.RULES,
    *normalization.RULES,
    *pooling.RULES,
    *linear.RULES,
    *transposed.RULES,
    *layout.RULES,
    *gather.RULES,
    *resize.RULES,
    *quantize.RULES,
    *integer.RULES,
    *spectrum.RULES,
    *loop.RULES,
    *recurrent.RULES,
)
_BY_OPERATOR: dict[str, tuple[FissionRule, ...]] = {
    name: tuple(rule for rule in RULES if rule.operator == name)
    for name in dict.fromkeys(rule.operator for rule in RULES)
}


def fission(graph: OperatorGraph, *, with_loops: bool = True) -> PrimitiveGraph:
    """Return the model as primitives; operators that can't be split become opaque primitives."""
    return fission_with_report(graph, with_loops=with_loops)[0]


def fission_with_report(graph: OperatorGraph, *, with_loops: bool = True) -> tuple[PrimitiveGraph, FissionReport]:
    """Return the model as primitives, and which operators were kept whole and why.

    `with_loops`: whether recurrent operators become loops.
    """
    kept = () if with_loops else recurrent.RULES
    return split_operators(graph, {name: own for name, own in _BY_OPERATOR.items() if own[0] not in kept})


def evaluate(operator: Operator, types: Mapping[str, ValueType], arrays: Mapping[str, Array]) -> list[Array] | None:
    """Return the outputs of an operator whose inputs are known; None if it can't be split into primitives."""
    return evaluate_operator(operator, types, arrays, _BY_OPERATOR)


__all__ = [
    "RULES",
    "FissionReport",
    "FissionRule",
    "KeptWhole",
    "NotSplitError",
    "evaluate",
    "fission",
    "fission_with_report",
]
