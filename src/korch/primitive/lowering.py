"""Rewrites linear primitives to the element types that kernels multiply.

Fission and the equivalence rules do not depend on the target; this step runs between them. 16-bit
floats are widened to float32 and the result is rounded, as libraries accumulate in float32. Products
of bytes are kept, and get an alternative in float32 whose sums are small enough to be exact. Products
of other types, float64 and integers, become elementwise products and a sum, unless there are too many.

Such a convolution reads its input through one table of indices, so strides, dilations and pads of
any rank need no further primitives.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops.layout import MOST_INDICES
from korch.primitive.ops.linear import BYTES, ConvAttributes
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import Verbs, copied, lit, rebuilt

MULTIPLIED = (DType.F32,)
"""The element types for which all targets have matrix product kernels."""

HALF = (DType.F16, DType.BF16)

MULTIPLIED_BY_CUDA = (*MULTIPLIED, *HALF)
"""The element types for which CUDA devices have matrix product kernels, which sum 16-bit products in float32."""

MOST_PRODUCTS = 1 << 22
"""The most products to sum up. More would be slow, and take much memory if they are not fused with their sum."""

LARGEST_EXACT = 1 << 24
"""Float32 represents all integers up to this one exactly."""

NIBBLE = 16
"""The weight of the high half of a byte: a byte is NIBBLE times its high half plus its low half."""


def lower_products(
    graph: PrimitiveGraph,
    multiplied: Sequence[DType] = MULTIPLIED,
    keeps: Callable[[Primitive], bool] = lambda primitive: False,
) -> PrimitiveGraph:
    """Return a graph whose linear primitives have types that a target multiplies, where possible.

    `keeps`: whether a product of bytes is left without an alternative in float32.
    """
    if all(graph.types[p.output].dtype in multiplied for p in graph.linear):
        return graph

    def write(verbs: Verbs, primitive: Primitive, values: Mapping[int, ValueId]) -> ValueId:
        is_kept = primitive.row.category is Category.LINEAR and graph.types[primitive.inputs[0]].dtype in BYTES
        if is_kept and keeps(primitive):
            return copied(verbs, primitive, values)
        return _lowered(verbs, primitive, [values[v] for v in primitive.inputs], multiplied)

    return rebuilt(graph, write)


def _lowered(verbs: Verbs, primitive: Primitive, inputs: Sequence[ValueId], multiplied: Sequence[DType]) -> ValueId:
    op, attributes = primitive.op, primitive.attributes
    dtype = verbs.dtype(inputs[0])
    if primitive.row.category is Category.LINEAR and dtype not in multiplied:
        if dtype in HALF and DType.F32 in multiplied:
            wide = [verbs.cast(value, DType.F32) if verbs.dtype(value) is dtype else value for value in inputs]
            return verbs.cast(verbs.add(op, *wide, attributes=attributes), dtype)
        if dtype in BYTES:
            exact = verbs.add(op, *inputs, attributes=attributes)
            found = _exact_floats(verbs, primitive, inputs)
            if found is not None:
                verbs.builder.merge(exact, found)
            return verbs.builder.find(exact)
        products = _products(verbs, primitive, inputs)
        if products is not None:
            return products
    return verbs.add(op, *inputs, attributes=attributes)


def _exact_floats(verbs: Verbs, primitive: Primitive, inputs: Sequence[ValueId]) -> ValueId | None:
    """Return a linear primitive of bytes computed by exact float32 sums; None if no way is exact.

    If a sum could exceed `LARGEST_EXACT`, an operand is split into its high and low half.
    """
    for counts in ((1, 1), (1, 2), (2, 2)):
        operands = [_halves(verbs, value, count) for value, count in zip(inputs, counts, strict=True)]
        pairs = [(a, b) for a in operands[0] for b in operands[1]]
        if max(_largest_sum(verbs, primitive.op, a[0], b[0]) for a, b in pairs) > LARGEST_EXACT:
            continue
        total: ValueId | None = None
        for (a, a_unit), (b, b_unit) in pairs:
            part = verbs.cast(verbs.add(primitive.op, a.value, b.value, attributes=primitive.attributes), DType.I32)
            part = part if a_unit * b_unit == 1 else verbs.elementwise("mul", part, lit(a_unit * b_unit))
            total = part if total is None else verbs.elementwise("add", total, part)
        return total
    return None


@dataclass(frozen=True, slots=True)
class _Whole:
    """A float32 value whose elements are integers with magnitudes of at most `largest`."""

    value: ValueId
    largest: int
    known: Array | None  # the elements of a constant


def _halves(verbs: Verbs, value: ValueId, count: int) -> list[tuple[_Whole, int]]:
    """Return a value of bytes as a sum of one or two values, each with its factor."""
    low, high = (int(n) for n in (np.iinfo(verbs.dtype(value).numpy).min, np.iinfo(verbs.dtype(value).numpy).max))
    wide = verbs.cast(value, DType.F32)
    constant = verbs.builder.constant_of(value)
    known = None if constant is None else constant.array.astype(np.float64)
    if count == 1:
        return [(_Whole(wide, max(-low, high), known), 1)]
    upper = verbs.elementwise("floor", verbs.elementwise("mul", wide, lit(1 / NIBBLE)))
    lower = verbs.elementwise("sub", wide, verbs.elementwise("mul", upper, lit(NIBBLE)))
    parts = (None, None) if known is None else (np.floor(known / NIBBLE), known % NIBBLE)
    most = max(-low // NIBBLE, high // NIBBLE)
    return [(_Whole(upper, most, parts[0]), NIBBLE), (_Whole(lower, NIBBLE - 1, parts[1]), 1)]


def _largest_sum(verbs: Verbs, op: str, a: _Whole, b: _Whole) -> int:
    """Return an upper bound of the magnitudes of all sums of products and of their partial sums."""
    shape = verbs.shape(b.value)
    terms = shape[-2] if op == "matmul" else math.prod(shape[1:])
    axes = ((-1,), (-2,)) if op == "matmul" else (None, tuple(range(1, len(shape))))
    bounds = [terms * a.largest * b.largest]
    for operand, other, summed in ((a, b, axes[0]), (b, a, axes[1])):
        if operand.known is not None and summed is not None:
            sums = np.abs(operand.known).sum(summed)
            bounds.append(int(sums.max(initial=0)) * other.largest)
    return min(bounds)


def _products(verbs: Verbs, primitive: Primitive, inputs: Sequence[ValueId]) -> ValueId | None:
    """Return a linear primitive as a sum of products; None if these are too many."""
    match primitive.attributes:
        case ConvAttributes() as attributes if primitive.op == "conv":
            x, w = inputs
            types = [verbs.builder.type(value) for value in inputs]
            return _conv_products(verbs, x, w, attributes, primitive.row.infer(types, attributes).shape)
        case _ if primitive.op == "matmul":
            return _matmul_products(verbs, *inputs)
    return None


def _matmul_products(verbs: Verbs, a: ValueId, b: ValueId) -> ValueId | None:
    """Return a matrix product as a sum of products; None if these are too many."""
    m, k = verbs.shape(a)[-2:]
    n = verbs.shape(b)[-1]
    batch = np.broadcast_shapes(verbs.shape(a)[:-2], verbs.shape(b)[:-2])
    full = (*batch, m, k, n)
    if not 0 < math.prod(full) <= MOST_PRODUCTS:
        return None
    left = verbs.reshape(a, (*verbs.shape(a), 1))
    right = verbs.reshape(b, (*verbs.shape(b)[:-2], 1, k, n))
    terms = verbs.add("mul", verbs.broadcast(left, full), verbs.broadcast(right, full))
    return verbs.reshape(verbs.reduce("sum", terms, (len(full) - 2,)), (*batch, m, n))


def _conv_products(
    verbs: Verbs, x: ValueId, w: ValueId, attributes: ConvAttributes, output: tuple[int, ...]
) -> ValueId | None:
    """Return a convolution as a sum of products; None if these are too many."""
    batch, channels, *sizes = verbs.shape(x)
    groups, kernel = attributes.groups, verbs.shape(w)[2:]
    each_in, each_out = channels // groups, output[1] // groups
    taps, places = math.prod(kernel), math.prod(output[2:])
    full = (batch, groups, each_out, each_in, taps, places)
    if not 0 < math.prod(full) <= MOST_PRODUCTS or taps * places > MOST_INDICES:
        return None
    flat = verbs.reshape(x, (batch, channels, math.prod(sizes)))
    table = _sources(sizes, kernel, output[2:], attributes).reshape(-1)
    if (table < 0).any():
        # Reads from the pads are redirected to a zero that is appended to the input.
        flat = verbs.pad(flat, (0, 0, 0), (0, 0, 1))
        table = np.where(table < 0, math.prod(sizes), table)
    read = verbs.take(flat, 2, table.tolist())
    read = verbs.reshape(read, (batch, groups, 1, each_in, taps, places))
    weights = verbs.reshape(w, (1, groups, each_out, each_in, taps, 1))
    terms = verbs.add("mul", verbs.broadcast(read, full), verbs.broadcast(weights, full))
    return verbs.reshape(verbs.reduce("sum", terms, (3, 4)), output)


def _sources(sizes: Sequence[int], kernel: Sequence[int], output: Sequence[int], attributes: ConvAttributes) -> Array:
    """Return which input element each tap of each output position reads, -1 for none: [taps, positions]."""
    flat = np.zeros((1, 1), np.int64)
    for i, size in enumerate(sizes):
        tap = np.arange(kernel[i])[:, None] * attributes.dilations[i]
        place = np.arange(output[i])[None, :]
        begin, stride = attributes.pads_begin[i], attributes.strides[i]
        source = place * stride + tap - begin
        axis = np.where((source >= 0) & (source < size), source, -1)
        joined = flat[:, None, :, None] * size + axis[None, :, None, :]
        outside = (flat[:, None, :, None] < 0) | (axis[None, :, None, :] < 0)
        joined = np.where(outside, -1, joined)
        flat = joined.reshape(len(flat) * kernel[i], -1)
    return flat
