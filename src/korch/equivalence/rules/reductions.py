"""Rules for reductions: sums of products, and sums beside products, as matrix products."""

import math
from collections.abc import Iterator

import numpy as np

from korch.equivalence.rule import AnyRule, Pair, Rule, RuleRefusal, View, Write, Writer, reads
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes

Shape = tuple[int, ...]


def _axes(primitive: Primitive) -> Shape:
    attributes = primitive.attributes_as(ReduceAttributes)
    return tuple(attributes.axes)


# A sum of products


def _product(view: View, match: Pair) -> Write | RuleRefusal:
    root, shape = match.root.output, view.shape(match.inner.output)
    if not view.type(root).dtype.is_float:
        return RuleRefusal("a sum of integers wraps", root)
    if math.prod(shape) == 0:
        return RuleRefusal("the sum is empty", root)
    (a, a_shape), (b, b_shape) = (_unbroadcast(view, value) for value in match.inner.inputs)
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

    def sizes(axes: Shape) -> Shape:
        return tuple(shape[axis] for axis in axes)

    def arranged(writer: Writer, factor: int, own: Shape, *groups: Shape) -> int:
        """Return a factor as a batch of matrices."""
        value = writer.reshape(factor, own)
        order = [axis for group in groups for axis in group]
        order += [axis for axis in range(len(shape)) if axis not in order]
        if order != list(range(len(order))):
            value = writer.add("transpose", (value,), TransposeAttributes(tuple(order)))
        return writer.reshape(value, (math.prod(sizes(groups[0])), *(math.prod(sizes(group)) for group in groups[1:])))

    def write(writer: Writer) -> int:
        left = arranged(writer, a, a_shape, batch, rows, summed)
        right = arranged(writer, b, b_shape, batch, summed, columns)
        product = writer.add("matmul", (left, right))
        order = (*batch, *rows, *columns)
        rest = tuple(axis for axis in range(len(shape)) if axis not in order)
        product = writer.reshape(product, (*sizes(order), *(1 for _ in rest)))
        back = tuple((*order, *rest).index(axis) for axis in range(len(shape)))
        if back == tuple(range(len(back))):
            return product
        return writer.add("transpose", (product,), TransposeAttributes(back))

    return write


def _unbroadcast(view: View, value: int) -> tuple[int, Shape]:
    """Return the value from which a value is broadcast, and its shape with leading ones."""
    source = view.unbroadcast(value)
    shape = view.shape(source)
    return source, (1,) * (len(view.shape(value)) - len(shape)) + shape


# A sum as a product with ones


def _match_sum(view: View, root: Primitive) -> Iterator[Primitive]:
    for user in view.users(root.inputs[0]):
        if user.op == "matmul" and user.inputs[0] == root.inputs[0]:
            yield root
            return


def _sum(view: View, root: Primitive) -> Write | RuleRefusal:
    shape = view.shape(root.inputs[0])
    if not view.type(root.output).dtype.is_float:
        return RuleRefusal("a sum of integers wraps", root.output)
    if _axes(root) != (len(shape) - 1,):
        return RuleRefusal("the sum is not over the columns", root.output)
    ones = np.ones((*(1 for _ in shape[:-2]), shape[-1], 1))
    dtype = view.type(root.output).dtype
    return lambda writer: writer.add("matmul", (root.inputs[0], writer.constant(ones, dtype)))


SUM_OF_PRODUCTS_IS_MATMUL = Rule(
    name="sum-of-products-is-matmul",
    law="Σ_k a[m,k] b[k,n] = (a b)[m,n]",
    source="definition of the matrix product",
    roots=("reduce_sum",),
    match=reads("mul"),
    rewrite=_product,
    reorders=True,
)
SUM_IS_MATMUL_WITH_ONES = Rule(
    name="sum-is-matmul-with-ones",
    law="Σ_k a[m,k] = a 1",
    source="definition of the matrix product; a sum beside a product becomes a part of the product",
    roots=("reduce_sum",),
    match=_match_sum,
    rewrite=_sum,
    reorders=True,
    needs_float32=True,
)

RULES: tuple[AnyRule, ...] = (SUM_OF_PRODUCTS_IS_MATMUL, SUM_IS_MATMUL_WITH_ONES)
