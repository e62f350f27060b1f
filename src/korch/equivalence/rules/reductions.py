"""Rules for reductions: sums of products as matrix products and moments in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.affine_chains import affine_step
from korch.equivalence.rule import AnyRule, Pair, Rule, RuleRefusal, View, Writer, reads
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import SliceAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.pattern import find, op

FEWEST_ELEMENTS = 4096
"""Fewer elements per mean fit into a core's level-1 cache, where a second pass costs little."""

Shape = tuple[int, ...]


def _axes(primitive: Primitive) -> Shape:
    attributes = primitive.attributes_as(ReduceAttributes)
    return tuple(attributes.axes)


# A sum of products


@dataclass(frozen=True, slots=True)
class ProductWitness:
    """The factors before they are broadcast, and the role of each axis."""

    factors: tuple[int, int]  # the two values
    shapes: tuple[Shape, Shape]  # their shapes, with ones where they are broadcast
    axes: tuple[Shape, Shape, Shape, Shape]  # the axes of the batch, of the rows, of the columns, and of the sum
    shape: Shape  # the shape of the elementwise product


def _refuse_product(view: View, match: Pair) -> ProductWitness | RuleRefusal:
    root, shape = match.root.output, view.shape(match.inner.output)
    if not view.type(root).dtype.is_float:
        return RuleRefusal("a sum of integers wraps", root)
    if math.prod(shape) == 0:
        return RuleRefusal("the sum is empty", root)
    factors = tuple(_unbroadcast(view, value) for value in match.inner.inputs)
    (a, a_shape), (b, b_shape) = factors
    summed = tuple(axis for axis in _axes(match.root) if shape[axis] > 1)
    if any(1 in (a_shape[axis], b_shape[axis]) for axis in summed) or not summed:
        return RuleRefusal("a factor does not vary along the sum", root)
    kept = [axis for axis, n in enumerate(shape) if n > 1 and axis not in summed]
    batch = tuple(axis for axis in kept if 1 not in (a_shape[axis], b_shape[axis]))
    rows = tuple(axis for axis in kept if b_shape[axis] == 1)
    columns = tuple(axis for axis in kept if a_shape[axis] == 1)
    if set(rows) & set(columns):
        return RuleRefusal("neither factor varies along an axis", root)
    if not rows or not columns:
        return RuleRefusal("each factor is used only once", root)
    return ProductWitness((a, b), (a_shape, b_shape), (batch, rows, columns, summed), shape)


def _unbroadcast(view: View, value: int) -> tuple[int, Shape]:
    """Return the value from which a value is broadcast, and its shape with leading ones."""
    source = view.unbroadcast(value)
    shape = view.shape(source)
    return source, (1,) * (len(view.shape(value)) - len(shape)) + shape


def _build_product(writer: Writer, witness: ProductWitness) -> int:
    batch, rows, columns, summed = witness.axes

    def sizes(axes: Shape) -> Shape:
        return tuple(witness.shape[axis] for axis in axes)

    def arranged(side: int, *groups: Shape) -> int:
        """Return a factor as a batch of matrices."""
        value = writer.reshape(witness.factors[side], witness.shapes[side])
        order = [axis for group in groups for axis in group]
        order += [axis for axis in range(len(witness.shape)) if axis not in order]
        if order != list(range(len(order))):
            value = writer.add("transpose", (value,), TransposeAttributes(tuple(order)))
        return writer.reshape(value, (math.prod(sizes(groups[0])), *(math.prod(sizes(group)) for group in groups[1:])))

    product = writer.add("matmul", (arranged(0, batch, rows, summed), arranged(1, batch, summed, columns)))
    order = (*batch, *rows, *columns)
    rest = tuple(axis for axis in range(len(witness.shape)) if axis not in order)
    product = writer.reshape(product, (*sizes(order), *(1 for _ in rest)))
    back = tuple((*order, *rest).index(axis) for axis in range(len(witness.shape)))
    if back == tuple(range(len(back))):
        return product
    return writer.add("transpose", (product,), TransposeAttributes(back))


# A sum as a product with ones


def _match_sum(view: View, root: Primitive) -> Iterator[Primitive]:
    for user in view.users(root.inputs[0]):
        if user.op == "matmul" and user.inputs[0] == root.inputs[0]:
            yield root
            return


def _refuse_sum(view: View, root: Primitive) -> int | RuleRefusal:
    shape = view.shape(root.inputs[0])
    if not view.type(root.output).dtype.is_float:
        return RuleRefusal("a sum of integers wraps", root.output)
    if _axes(root) != (len(shape) - 1,):
        return RuleRefusal("the sum is not over the columns", root.output)
    return root.inputs[0]


def _build_sum(writer: Writer, value: int) -> int:
    type_ = writer.type(value)
    shape = (*(1 for _ in type_.shape[:-2]), type_.shape[-1], 1)
    return writer.add("matmul", (value, writer.constant(np.ones(shape), type_.dtype)))


# Moments in one pass


@dataclass(frozen=True, slots=True)
class MomentMatch:
    """A sum, and the sum of squared deviations from its mean."""

    root: Primitive  # the one of the two that is rewritten
    mean: Primitive  # the sum of x
    squares: Primitive  # the sum of (x - m)² with m the mean


@dataclass(frozen=True, slots=True)
class MomentWitness:
    """x, the axes of the sums, and whether to write the sum of x or that of the squares."""

    x: int
    axes: Shape
    is_mean: bool


_MEAN = op("div|mul", op("reduce_sum", "x", name="sum"), "count", name="mean")
_SQUARE = op("mul", op("sub", "x", op("broadcast", _MEAN), name="deviation"), "deviation")
"""(x - m)², where m is the sum of x over some axes, divided or multiplied by a number."""


def _match_squares(view: View, root: Primitive) -> Iterator[MomentMatch]:
    for found in find(view, _SQUARE, root.inputs[0]):
        total, mean = found.primitives["sum"], found.primitives["mean"]
        if _is_mean(view, mean, total):
            yield MomentMatch(root, total, root)


def _is_mean(view: View, scaled: Primitive, total: Primitive) -> bool:
    """Return whether the scaled sum is the mean."""
    step = affine_step(view, scaled)
    shape = view.shape(total.inputs[0])
    count = math.prod(shape[axis] for axis in _axes(total))
    if step is None or np.ndim(step.scale) or np.any(step.shift):
        return False
    return abs(float(step.scale) * count - 1) < 1e-6


def _match_mean(view: View, root: Primitive) -> Iterator[MomentMatch]:
    for squares in view.reached(root.inputs[0], "sub", "mul", root.op):
        for found in _match_squares(view, squares):
            if found.mean == root:
                yield MomentMatch(root, root, squares)


def _refuse_moment(view: View, match: MomentMatch) -> MomentWitness | RuleRefusal:
    root, x = match.root.output, match.mean.inputs[0]
    axes, shape = _axes(match.mean), view.shape(x)
    if axes != _axes(match.squares):
        return RuleRefusal("the mean is over other axes than the squares", root)
    if math.prod(shape[axis] for axis in axes) < FEWEST_ELEMENTS:
        return RuleRefusal("the elements fit into the level-1 cache", root)
    return MomentWitness(x, axes, match.root is match.mean)


def _build_moment(writer: Writer, witness: MomentWitness) -> int:
    """Write sums over x - k, with k the first element; the choice of k affects only rounding."""
    type_, axes = writer.type(witness.x), ReduceAttributes(witness.axes)
    rank, shape = type_.rank, type_.shape
    count = math.prod(shape[axis] for axis in witness.axes)
    size = tuple(1 if axis in witness.axes else n for axis, n in enumerate(shape))
    first = writer.add("slice", (witness.x,), SliceAttributes((0,) * rank, size, (1,) * rank))
    shift = writer.add("broadcast", (first,), BroadcastAttributes(shape))
    moved = writer.add("sub", (witness.x, shift))
    total = writer.add("reduce_sum", (moved,), axes)
    kept = writer.type(total)
    if witness.is_mean:
        whole = writer.add("mul", (first, writer.along(np.array(float(count)), 0, kept)))
        return writer.add("add", (whole, total))
    squares = writer.add("reduce_sum", (writer.add("mul", (moved, moved)),), axes)
    mean = writer.add("div", (total, writer.along(np.array(float(count)), 0, kept)))
    return writer.add("sub", (squares, writer.add("mul", (total, mean))))


SUM_OF_PRODUCTS_IS_MATMUL = Rule(
    name="sum-of-products-is-matmul",
    law="Σ_k a[m,k] b[k,n] = (a b)[m,n]",
    source="definition of the matrix product",
    roots=("reduce_sum",),
    match=reads("mul"),
    refuse=_refuse_product,
    build=_build_product,
    reorders=True,
)
SUM_IS_MATMUL_WITH_ONES = Rule(
    name="sum-is-matmul-with-ones",
    law="Σ_k a[m,k] = a 1",
    source="definition of the matrix product; a sum beside a product becomes a part of the product",
    roots=("reduce_sum",),
    match=_match_sum,
    refuse=_refuse_sum,
    build=_build_sum,
    reorders=True,
    needs_float32=True,
)
SQUARES_ARE_SUMMED_IN_ONE_PASS = Rule(
    name="squares-are-summed-with-their-mean",
    law="Σ(x - m)² = Σ(x - k)² - (Σ(x - k))²/n, with m = Σx/n and k = x[0]",
    source="Steiner's theorem; shifted data (Chan, Golub, LeVeque 1983)",
    roots=("reduce_sum",),
    match=_match_squares,
    refuse=_refuse_moment,
    build=_build_moment,
    reorders=True,
)
MEAN_IS_SUMMED_SHIFTED = Rule(
    name="mean-is-summed-with-its-squares",
    law="Σx = n k + Σ(x - k), with k = x[0]",
    source="as above: so that the mean is found in the same pass",
    roots=("reduce_sum",),
    match=_match_mean,
    refuse=_refuse_moment,
    build=_build_moment,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (
    SUM_OF_PRODUCTS_IS_MATMUL,
    SUM_IS_MATMUL_WITH_ONES,
    SQUARES_ARE_SUMMED_IN_ONE_PASS,
    MEAN_IS_SUMMED_SHIFTED,
)
