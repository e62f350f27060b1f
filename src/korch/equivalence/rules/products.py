"""Matrix products in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from korch.equivalence.rule import AnyRule, Refusal, Rule, View, Writer
from korch.primitive.graph import Primitive


@dataclass(frozen=True, slots=True)
class ChainMatch:
    """(a b) c or a (b c): the product at the root, the one inside, and which side it is on."""

    root: Primitive
    inner: Primitive
    side: int


@dataclass(frozen=True, slots=True)
class ChainWitness:
    """Three factors, and which two are multiplied first."""

    factors: tuple[int, int, int]
    side: int


def _match(view: View, root: Primitive) -> Iterator[ChainMatch]:
    for side in (0, 1):
        for inner in view.producers(root.inputs[side], "matmul"):
            yield ChainMatch(root, inner, side)


def _refuse(view: View, match: ChainMatch) -> ChainWitness | Refusal:
    root, inner = match.root, match.inner
    if not view.type(root.output).dtype.is_float:
        return Refusal("products of integers wrap", root.output)
    first, last = root.inputs
    x, y = inner.inputs
    factors = (x, y, last) if match.side == 0 else (first, x, y)
    a, b, c = map(view.shape, factors)
    batches = {shape[:-2] for shape in (a, b, c)}
    if len(batches) != 1:
        return Refusal("the batches of the factors differ", root.output)
    m, k, n, p = a[-2], a[-1], b[-1], c[-1]
    costs = (m * k * n + m * n * p, k * n * p + m * k * p)
    now, other = costs if match.side == 0 else costs[::-1]
    if other >= now:
        return Refusal("the other order multiplies no less", root.output)
    if math.prod(a[:-2]) == 0:
        return Refusal("the product is empty", root.output)
    return ChainWitness(factors, 1 - match.side)


def _build(writer: Writer, witness: ChainWitness) -> int:
    a, b, c = witness.factors
    if witness.side == 0:
        return writer.add("matmul", (writer.add("matmul", (a, b)), c))
    return writer.add("matmul", (a, writer.add("matmul", (b, c))))


PRODUCTS_ASSOCIATE = Rule(
    name="matmul-chain-in-its-cheaper-order",
    law="(a b) c = a (b c)",
    source="associativity; linear attention: (q k') v = q (k' v)",
    roots=("matmul",),
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (PRODUCTS_ASSOCIATE,)
