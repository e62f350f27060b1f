"""Rules for matrix products: chains in a cheaper order, and products by constant matrices of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer, stands
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.pattern import Found, either, op

WORTH = 0.8
"""Two products may take at most this share of the multiplications of one."""

LARGEST = 1 << 20
"""The most elements of a matrix whose rank is computed."""

REGULAR = 1e6
"""A square submatrix with a smaller condition number has full rank, which is quick to check."""

EXACT = 1e-7
"""A matrix has a rank if the remainder beyond this rank is smaller than this share of it, as float32 rounding is."""


_CHAIN = either(op("matmul", op("matmul", "a", "b", name="first"), "c"), op("matmul", "a", op("matmul", "b", "c")))
"""(a b) c or a (b c)."""


@dataclass(frozen=True, slots=True)
class ChainWitness:
    """Three factors, and whether the first two of them are multiplied first."""

    factors: tuple[int, int, int]
    is_left_first: bool


def _refuse(view: View, match: Found) -> ChainWitness | RuleRefusal:
    root, is_left_first = match.root, "first" in match.values
    if not view.type(root.output).dtype.is_float:
        return RuleRefusal("products of integers wrap", root.output)
    factors = match.values["a"], match.values["b"], match.values["c"]
    a, b, c = map(view.shape, factors)
    batches = {shape[:-2] for shape in (a, b, c)}
    if len(batches) != 1:
        return RuleRefusal("the batches of the factors differ", root.output)
    m, k, n, p = a[-2], a[-1], b[-1], c[-1]
    costs = (m * k * n + m * n * p, k * n * p + m * k * p)
    now, other = costs if is_left_first else costs[::-1]
    if other >= now:
        return RuleRefusal("the other order multiplies no less", root.output)
    if math.prod(a[:-2]) == 0:
        return RuleRefusal("the product is empty", root.output)
    return ChainWitness(factors, not is_left_first)


def _build(writer: Writer, witness: ChainWitness) -> int:
    a, b, c = witness.factors
    if witness.is_left_first:
        return writer.add("matmul", (writer.add("matmul", (a, b)), c))
    return writer.add("matmul", (a, writer.add("matmul", (b, c))))


PRODUCTS_ASSOCIATE = Rule(
    name="matmul-chain-in-its-cheaper-order",
    law="(a b) c = a (b c)",
    source="associativity; linear attention: (q k') v = q (k' v)",
    roots=("matmul",),
    match=stands(_CHAIN),
    refuse=_refuse,
    build=_build,
    reorders=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class RankWitness:
    """The factors in a b = a (left right): float64[..., k, r] and float64[..., r, n]."""

    a: int
    left: Array
    right: Array


def _match_rank(view: View, root: Primitive) -> Iterator[Primitive]:
    if view.constant(root.inputs[1]) is not None:
        yield root


def _refuse_rank(view: View, root: Primitive) -> RankWitness | RuleRefusal:
    a, b = root.inputs
    constant = view.constant(b)
    shape = view.shape(b)
    if constant is None or math.prod(shape[:-2]) != 1 or not view.type(b).dtype.is_float:
        return RuleRefusal("the matrix is not a constant of floats", root.output, is_final=True)
    if view.becomes_integer(root.output):
        return RuleRefusal("the sums become integers, so they have to be exact", root.output)
    k, n = shape[-2:]
    most = int(WORTH * k * n / (k + n))
    if most == 0 or k * n > LARGEST:
        return RuleRefusal("the matrix is too small or too large", root.output, is_final=True)
    found = _factors(constant.array.reshape(k, n).astype(np.float64), most)
    if found is None:
        return RuleRefusal("the rank is too high", root.output, is_final=True)
    left, right = (factor.reshape((*shape[:-2], *factor.shape)) for factor in found)
    return RankWitness(a, left, right)


def _factors(matrix: Array, most: int) -> tuple[Array, Array] | None:
    """Return two factors of a matrix with its rank as inner size, None if its rank is above `most`.

    Source: randomized range finder (Halko, Martinsson, Tropp 2011, algorithm 4.1).
    """
    if not np.isfinite(matrix).all() or not matrix.any():
        return None
    rng, size = np.random.default_rng(0), float(np.linalg.norm(matrix))
    rows, columns = (rng.permutation(n)[: most + 1] for n in matrix.shape)
    if np.linalg.cond(matrix[np.ix_(rows, columns)], 1) < REGULAR:
        return None  # a square submatrix already has a higher rank
    probe = rng.standard_normal((matrix.shape[1], most + 1))
    basis, values, _ = np.linalg.svd(matrix @ probe, full_matrices=False)
    rank = int((values > EXACT * values[0]).sum())
    if rank > most:
        return None
    left = basis[:, :rank]
    right = left.T @ matrix
    return (left, right) if np.linalg.norm(matrix - left @ right) <= EXACT * size else None


def _build_rank(writer: Writer, witness: RankWitness) -> int:
    dtype = writer.type(witness.a).dtype
    left, right = (writer.constant(f, dtype) for f in (witness.left, witness.right))
    return writer.add("matmul", (writer.add("matmul", (witness.a, left)), right))


LOW_RANK_IS_TWO_PRODUCTS = Rule(
    name="matmul-of-low-rank-is-two-matmuls",
    law="a b = (a l) r, with b = l r and few columns in l",
    source="rank factorization",
    roots=("matmul",),
    match=_match_rank,
    refuse=_refuse_rank,
    build=_build_rank,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (PRODUCTS_ASSOCIATE, LOW_RANK_IS_TWO_PRODUCTS)
