"""Fission: splits the operators of a model into primitives."""

from korch.fission import (
    activation,
    elementwise,
    gather,
    integer,
    layout,
    linear,
    normalization,
    pooling,
    quantize,
    reduction,
    resize,
    scan,
    spectrum,
)
from korch.fission.rule import FissionRule, NotSplit
from korch.fission.split import FissionReport, KeptWhole, split_operators
from korch.frontend.operator import OperatorGraph
from korch.primitive.graph import PrimitiveGraph

RULES: tuple[FissionRule, ...] = (
    *elementwise.RULES,
    *activation.RULES,
    *reduction.RULES,
    *normalization.RULES,
    *pooling.RULES,
    *linear.RULES,
    *layout.RULES,
    *gather.RULES,
    *resize.RULES,
    *quantize.RULES,
    *integer.RULES,
    *scan.RULES,
    *spectrum.RULES,
)
_BY_OPERATOR: dict[str, tuple[FissionRule, ...]] = {
    name: tuple(rule for rule in RULES if rule.operator == name)
    for name in dict.fromkeys(rule.operator for rule in RULES)
}


def fission(graph: OperatorGraph) -> PrimitiveGraph:
    """Return the model as primitives; operators that can't be split become opaque primitives."""
    return fission_with_report(graph)[0]


def fission_with_report(graph: OperatorGraph) -> tuple[PrimitiveGraph, FissionReport]:
    """Return the model as primitives, and which operators were kept whole and why."""
    return split_operators(graph, _BY_OPERATOR)


__all__ = ["RULES", "FissionReport", "FissionRule", "KeptWhole", "NotSplit", "fission", "fission_with_report"]
