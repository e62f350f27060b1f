"""Functions of fewer transcendental steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.affine import uniform_number
from korch.equivalence.rule import AnyRule, Refusal, Rule, View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.types import DType

SATURATED = 20.0
"""From here on tanh(softplus(x)) is 1 in float32, and in float64 to 2^-53."""


@dataclass(frozen=True, slots=True)
class SoftplusMatch:
    """tanh(log(1 + e^x)), the logarithm as max(x, 0) + log(1 + e^-|x|)."""

    root: Primitive
    x: int


def _match(view: View, root: Primitive) -> Iterator[SoftplusMatch]:
    for total in view.producers(root.inputs[0], "add"):
        for ramp, rest in (total.inputs, total.inputs[::-1]):
            x = _decay(view, rest)
            if x is not None and _is_ramp(view, ramp, x):
                yield SoftplusMatch(root, x)
                return


def _is_ramp(view: View, value: int, x: int) -> bool:
    """Whether a value is max(x, 0)."""
    return any(
        x in top.inputs and any(uniform_number(view, v) == 0 for v in top.inputs)
        for top in view.producers(value, "max")
    )


def _decay(view: View, value: int) -> int | None:
    """Return x if a value is log(1 + e^-|x|)."""
    for log in view.producers(value, "log"):
        for total in view.producers(log.inputs[0], "add"):
            for power, one in (total.inputs, total.inputs[::-1]):
                for exp in view.producers(power, "exp") if uniform_number(view, one) == 1 else ():
                    for negative in view.producers(exp.inputs[0], "neg"):
                        for size in view.producers(negative.inputs[0], "abs"):
                            return size.inputs[0]
    return None


def _refuse(view: View, match: SoftplusMatch) -> int | Refusal:
    if view.type(match.x).dtype not in (DType.F32, DType.F64):
        return Refusal("e^40 has no place among the numbers", match.root.output)
    return match.x


def _build(writer: Writer, x: int) -> int:
    """Write n / (n + 2) with n = e (e + 2) and e = e^min(x, 20): no difference cancels."""
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
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (TANH_OF_SOFTPLUS_IS_A_QUOTIENT,)
