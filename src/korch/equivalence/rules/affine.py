"""Rules for scales and shifts: chains become one scale and one shift, divisions by constants become products."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from korch.equivalence.affine_chains import STEPS, AffineChain, affine_step, chains_from, goes_on
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer, is_normal
from korch.primitive.graph import Primitive
from korch.primitive.ops.reduce import BroadcastAttributes


def write_affine(writer: Writer, value: int, chain: AffineChain) -> int:
    """Write scale*value + shift without a scale of 1 or a shift of 0."""
    type_ = writer.type(value)
    axis = chain.axis if chain.axis is not None else 0
    if chain.has_scale:
        value = writer.add("mul", (value, writer.along(chain.scale, axis, type_)))
    if chain.has_shift:
        value = writer.add("add", (value, writer.along(chain.shift, axis, type_)))
    return value


def _match_chain(view: View, root: Primitive) -> Iterator[AffineChain]:
    step = affine_step(view, root)
    if step is not None:
        yield chains_from(view, step)[-1]


def _compose(view: View, chain: AffineChain) -> Write | RuleRefusal:
    root = chain.steps[0].output
    if goes_on(view, root):
        return RuleRefusal("the chain continues", root)
    if chain.has_scale + chain.has_shift >= len(chain.steps):
        return RuleRefusal("no fewer steps", root)
    return lambda writer: write_affine(writer, chain.base, chain)


def _match_division(view: View, root: Primitive) -> Iterator[Primitive]:
    if view.stored_constant(root.inputs[1]) is not None:
        yield root


def _multiply(exact: bool, view: View, root: Primitive) -> Write | RuleRefusal:
    small = view.stored_constant(root.inputs[1])
    dtype = view.type(root.output).dtype
    if small is None or not dtype.is_float:
        return RuleRefusal("a division of integers", root.output)
    elements = small.array.reshape(-1)[:1] if small.is_uniform else small.array
    divisor = elements.astype(np.float64)
    with np.errstate(all="ignore"):
        reciprocal = 1 / divisor
    # The reciprocals of very large numbers, and of those that are not finite, are not normal.
    if not (is_normal(divisor, dtype) & is_normal(reciprocal, dtype)).all():
        return RuleRefusal("the divisor or its reciprocal is not a normal number", root.output)
    is_exact = bool((np.abs(np.frexp(divisor)[0]) == 0.5).all())
    if exact and not is_exact:
        return RuleRefusal("the divisor is not a power of 2", root.output)
    if not exact and is_exact:
        return RuleRefusal("the divisor is a power of two, which is exact", root.output)
    if not exact and view.type(root.output).size < WORTHWHILE_ELEMENTS:
        return RuleRefusal("the tensor is too small to gain", root.output)
    factor = np.broadcast_to(reciprocal, small.array.shape) if small.is_uniform else reciprocal

    def write(writer: Writer) -> int:
        type_ = writer.type(root.inputs[0])
        value = writer.constant(factor, type_.dtype)
        if writer.type(value).shape != type_.shape:
            value = writer.add("broadcast", (value,), BroadcastAttributes(type_.shape))
        return writer.add("mul", (root.inputs[0], value))

    return write


WORTHWHILE_ELEMENTS = 1024
"""In a smaller tensor, the division costs less than the additional alternative costs in the search."""

AFFINE_STEPS_COMPOSE = Rule(
    name="affine-steps-compose",
    law="s2*(s1*x + t1) + t2 = (s2*s1)*x + (s2*t1 + t2)",
    source="distributivity; BatchNormalization as one scale and one shift",
    roots=STEPS,
    match=_match_chain,
    rewrite=_compose,
    reorders=True,
)
DIV_BY_POWER_OF_TWO_IS_MUL = Rule(
    name="div-by-power-of-two-is-mul",
    law="x / 2^n = x * 2^-n",
    source="IEEE 754: scaling by a power of two rounds as the division does",
    roots=("div",),
    match=_match_division,
    rewrite=partial(_multiply, True),
)
DIV_BY_CONSTANT_IS_MUL = Rule(
    name="div-by-constant-is-mul",
    law="x / c = x * (1/c)",
    source="field axiom; at most one rounding more than the division",
    roots=("div",),
    match=_match_division,
    rewrite=partial(_multiply, False),
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (AFFINE_STEPS_COMPOSE, DIV_BY_POWER_OF_TWO_IS_MUL, DIV_BY_CONSTANT_IS_MUL)
