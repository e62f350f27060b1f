"""Rules that replace functions by ones with fewer transcendental operations."""

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer, stands
from korch.primitive.pattern import SOFTPLUS, Found, op
from korch.primitive.types import DType

SATURATED = 20.0
"""From this x on, tanh(softplus(x)) is 1 in float32, and 1 up to 2^-53 in float64."""


def _rewrite(view: View, match: Found) -> Write | RuleRefusal:
    x = match.values["x"]
    if view.type(x).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("e^40 is too large for the element type", match.root.output)
    return lambda writer: _write(writer, x)


def _write(writer: Writer, x: int) -> int:
    """Write n / (n + 2) with n = e (e + 2) and e = e^min(x, 20), which has no cancellation."""
    type_ = writer.type(x)

    def number(value: float) -> int:
        return writer.along(np.array(value), 0, type_)

    power = writer.add("exp", (writer.add("min", (x, number(SATURATED))),))
    two = number(2.0)
    product = writer.add("mul", (power, writer.add("add", (power, two))))
    return writer.add("div", (product, writer.add("add", (product, two))))


TANH_OF_SOFTPLUS_IS_A_QUOTIENT = Rule(
    name="tanh-of-softplus-is-a-quotient",
    law="tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2), e = e^x; mish in one exponential",
    source="definition of the hyperbolic tangent",
    roots=("tanh",),
    match=stands(op("tanh", SOFTPLUS)),
    rewrite=_rewrite,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (TANH_OF_SOFTPLUS_IS_A_QUOTIENT,)
