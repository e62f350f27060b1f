"""Computed scales of rows or columns move behind the matrix product that they come before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import DType

MOST_GROWTH = 4
"""A result of more than this many times the elements of the scaled operand takes too long to scale."""


@dataclass(frozen=True, slots=True)
class ScaleMatch:
    """A product with an operand x * r or x / r.

    Attributes:
        root: the product.
        side: the position of the operand.
        turn: the transposition between the scale and the product, or None.
        step: the multiplication or division.
        at: the position of x in it.
        spread: the broadcast that makes r as large as x.
    """

    root: Primitive
    side: int
    turn: Primitive | None
    step: Primitive
    at: int
    spread: Primitive


def _match(view: View, root: Primitive) -> Iterator[ScaleMatch]:
    for side, value in enumerate(root.inputs):
        turns = (p for p in view.producing(value, "transpose") if _swaps_the_last(p))
        for turn in (None, *turns):
            for step in view.producing(value if turn is None else turn.inputs[0], "mul", "div"):
                for at in (0, 1) if step.op == "mul" else (0,):
                    for spread in view.producing(step.inputs[1 - at], "broadcast"):
                        yield ScaleMatch(root, side, turn, step, at, spread)


def _swaps_the_last(transpose: Primitive) -> bool:
    perm = transpose.attributes_as(TransposeAttributes).perm
    rank = len(perm)
    return perm == (*range(rank - 2), rank - 1, rank - 2)


def _refuse(view: View, match: ScaleMatch) -> ScaleMatch | RuleRefusal:
    root, scale, x = match.root.output, match.spread.inputs[0], match.step.inputs[match.at]
    if view.constant(scale) is not None:
        return RuleRefusal("the scale is a constant, which folds into weights", root, is_final=True)
    if view.type(root).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("sums that are not scaled yet may overflow", root, is_final=True)
    summed = -1 if (match.side == 0) != (match.turn is not None) else -2
    if _padded(view.shape(scale), view.type(x).rank)[summed] != 1 or view.shape(x)[summed] == 1:
        return RuleRefusal("the scale varies along the sum", root)
    if math.prod(view.shape(root)) > MOST_GROWTH * math.prod(view.shape(x)):
        return RuleRefusal("the product is far larger than what is scaled", root)
    return match


def _padded(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape


def _build(writer: Writer, match: ScaleMatch) -> int:
    x, scale, shape = match.step.inputs[match.at], match.spread.inputs[0], writer.type(match.root.output).shape
    kept = _padded(writer.type(scale).shape, len(shape))
    if match.turn is not None:
        x = writer.add("transpose", (x,), match.turn.attributes)
        kept = (*kept[:-2], kept[-1], kept[-2])
    inputs = (x, match.root.inputs[1]) if match.side == 0 else (match.root.inputs[0], x)
    product = writer.add("matmul", inputs)
    factor = writer.reshape(scale, kept)
    if kept != shape:
        factor = writer.add("broadcast", (factor,), BroadcastAttributes(shape))
    return writer.add(match.step.op, (product, factor))


SCALE_MOVES_BEHIND_MATMUL = Rule(
    name="row-scale-moves-behind-matmul",
    law="diag(r) x w = diag(r) (x w), x w diag(c) = (x w) diag(c), also for quotients",
    source="linearity; a normalization or the division of a softmax behind the product that follows",
    roots=("matmul",),
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (SCALE_MOVES_BEHIND_MATMUL,)
