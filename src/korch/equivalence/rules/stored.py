"""Weights stored in bytes: their scales move behind the product that reads them, which then widens bytes.

A product of few rows takes as long as it takes to read its weights, and bytes are a quarter of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from korch.equivalence.quantization import Dequantized, dequantized, dequantized_by
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.linear import BYTES
from korch.primitive.types import DType


@dataclass(frozen=True, slots=True)
class StoredScaleMatch:
    """A product, and the last primitive of its second operand's dequantization."""

    root: Primitive
    right: Primitive


@dataclass(frozen=True, slots=True, eq=False)
class StoredScaleWitness:
    """A product, and the constant integers that its second operand is dequantized from."""

    root: Primitive
    right: Dequantized


def _match(view: View, root: Primitive) -> Iterator[StoredScaleMatch]:
    for right in dequantized(view, root.inputs[1]):
        yield StoredScaleMatch(root, right.root)


def _refuse(view: View, match: StoredScaleMatch) -> StoredScaleWitness | RuleRefusal:
    root, right = match.root, dequantized_by(view, match.right)
    if right is None or view.constant(right.q) is None or right.grid.dtype not in BYTES:
        return RuleRefusal("the second operand is not stored in bytes", root.output)
    if view.type(root.output).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("sums that are not scaled yet may overflow", root.output, is_final=True)
    rank = view.type(right.q).rank
    if right.grid.scale.axis not in (None, rank - 1):
        return RuleRefusal("the scale varies along the sum", root.output)
    if right.grid.zero.vector.any():
        return RuleRefusal("the zero point is not 0", root.output)
    if rank > 2 and view.shape(right.q)[:-2] != (1,) * (rank - 2):
        return RuleRefusal("there are several matrices", root.output)
    return StoredScaleWitness(root, right)


def _build(writer: Writer, witness: StoredScaleWitness) -> int:
    root, grid = witness.root, witness.right.grid
    type_ = writer.type(root.output)
    weights = writer.add("cast", (witness.right.q,), CastAttributes(type_.dtype.value))
    product = writer.add("matmul", (root.inputs[0], weights))
    return writer.add("mul", (product, writer.along(grid.scale.vector, type_.rank - 1, type_)))


STORED_SCALE_MOVES_BEHIND_MATMUL = Rule(
    name="stored-scale-moves-behind-matmul",
    law="x (q diag(s)) = (x q) diag(s) for constant bytes q",
    source="linearity; weight-only quantization",
    roots=("matmul",),
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (STORED_SCALE_MOVES_BEHIND_MATMUL,)
