"""Moves computed scales of rows or columns from before a matrix product to after it."""

import math
from collections.abc import Iterator

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.pattern import Found, either, find_at, op
from korch.primitive.types import DType

MOST_GROWTH = 4
"""If the result has more than this many times the elements of the scaled operand, it takes too long to scale."""


_SCALED = op("mul|div", "x", op("broadcast", "scale"), name="step")
_OPERAND = either(_SCALED, op("transpose", _SCALED, name="turn"))
_PRODUCT = either(op("matmul", _OPERAND, "right"), op("matmul", "left", _OPERAND))
"""A product with an operand x * r or x / r, which may be transposed."""


def _match(view: View, root: Primitive) -> Iterator[Found]:
    for found in find_at(view, _PRODUCT, root):
        turn = found.primitives.get("turn")
        if turn is None or _swaps_the_last(turn):
            yield found


def _swaps_the_last(transpose: Primitive) -> bool:
    perm = transpose.attributes_as(TransposeAttributes).perm
    rank = len(perm)
    return perm == (*range(rank - 2), rank - 1, rank - 2)


def _rewrite(view: View, match: Found) -> Write | RuleRefusal:
    root, scale, x = match.root.output, match.values["scale"], match.values["x"]
    if view.constant(scale) is not None:
        return RuleRefusal("the scale is a constant, which folds into weights", root, is_final=True)
    if view.type(root).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("sums that are not scaled yet may overflow", root, is_final=True)
    summed = -1 if ("right" in match.values) != ("turn" in match.values) else -2
    if _padded(view.shape(scale), view.type(x).rank)[summed] != 1 or view.shape(x)[summed] == 1:
        return RuleRefusal("the scale varies along the sum", root)
    if math.prod(view.shape(root)) > MOST_GROWTH * math.prod(view.shape(x)):
        return RuleRefusal("the product is far larger than what is scaled", root)
    return lambda writer: _write(writer, match)


def _padded(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape


def _write(writer: Writer, match: Found) -> int:
    x, scale, shape = match.values["x"], match.values["scale"], writer.type(match.root.output).shape
    kept = _padded(writer.type(scale).shape, len(shape))
    if "turn" in match.primitives:
        x = writer.add("transpose", (x,), match.primitives["turn"].attributes)
        kept = (*kept[:-2], kept[-1], kept[-2])
    right = match.values.get("right")
    inputs = (match.values["left"], x) if right is None else (x, right)
    product = writer.add("matmul", inputs)
    factor = writer.reshape(scale, kept)
    if kept != shape:
        factor = writer.add("broadcast", (factor,), BroadcastAttributes(shape))
    return writer.add(match.primitives["step"].op, (product, factor))


SCALE_MOVES_BEHIND_MATMUL = Rule(
    name="row-scale-moves-behind-matmul",
    law="diag(r) x w = diag(r) (x w), x w diag(c) = (x w) diag(c), also for quotients",
    source="linearity; a normalization or the division of a softmax behind the product that follows",
    roots=("matmul",),
    match=_match,
    rewrite=_rewrite,
    reorders=True,
    needs_float32=True,
)

RULES: tuple[AnyRule, ...] = (SCALE_MOVES_BEHIND_MATMUL,)
