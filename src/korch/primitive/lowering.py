"""Primitive graph -> the same with linear primitives of the element types that kernels multiply.

Fission and the laws of equivalence know nothing of targets; this step comes between them. Half
types are widened to float32 and rounded again, as the libraries accumulate. Other types, float64
and integers, become sums of products, which generated kernels add up, unless these are too many.

A convolution reads its input through one table of indices, so that strides, dilations and pads of
any rank cost no further primitives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops.layout import MOST_INDICES
from korch.primitive.ops.linear import ConvAttributes, ConvTransposeAttributes
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import Verbs

MULTIPLIED = (DType.F32,)
"""Element types of which the kernels of all targets multiply matrices."""

HALF = (DType.F16, DType.BF16)

MOST_PRODUCTS = 1 << 22
"""More of them would be slow, and large where they are not fused with their sum."""


def lower_products(graph: PrimitiveGraph, multiplied: Sequence[DType] = MULTIPLIED) -> PrimitiveGraph:
    """Return a graph whose linear primitives are of types that a target multiplies, where possible.

    Args:
        graph: a graph without alternatives.
        multiplied: the element types of which the target multiplies matrices.
    """
    if all(graph.types[p.output].dtype in multiplied for p in graph.linear):
        return graph
    builder = GraphBuilder()
    values = {value: builder.input(name, graph.types[value]) for name, value in graph.inputs}
    by_output = {primitive.output: p for p, primitive in enumerate(graph.primitives)}
    for value in range(len(graph.types)):
        if value in graph.constants:
            values[value] = builder.constant(graph.constants[value].array)
        elif value in by_output:
            p = by_output[value]
            verbs = Verbs(builder, graph.origins[p] if graph.origins else "")
            primitive = graph.primitives[p]
            values[value] = _lowered(verbs, primitive, [values[v] for v in primitive.inputs], multiplied)
    for name, value in graph.outputs:
        builder.output(name, values[value])
    return builder.freeze()


def _lowered(verbs: Verbs, primitive: Primitive, inputs: Sequence[ValueId], multiplied: Sequence[DType]) -> ValueId:
    op, attributes = primitive.op, primitive.attributes
    dtype = verbs.dtype(inputs[0])
    if primitive.row.category is Category.LINEAR and dtype not in multiplied:
        if dtype in HALF and DType.F32 in multiplied:
            wide = [verbs.cast(value, DType.F32) for value in inputs]
            return verbs.cast(verbs.add(op, *wide, attributes=attributes), dtype)
        products = _products(verbs, primitive, inputs)
        if products is not None:
            return products
    return verbs.add(op, *inputs, attributes=attributes)


def _products(verbs: Verbs, primitive: Primitive, inputs: Sequence[ValueId]) -> ValueId | None:
    """Return a linear primitive as a sum of products; None if these are too many."""
    match primitive.attributes:
        case ConvAttributes() | ConvTransposeAttributes() as attributes if primitive.op in ("conv", "conv_transpose"):
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
    verbs: Verbs, x: ValueId, w: ValueId, attributes: ConvAttributes | ConvTransposeAttributes, output: tuple[int, ...]
) -> ValueId | None:
    """Return a convolution or its transpose as a sum of products; None if these are too many.

    Args:
        verbs: adds the primitives.
        x: [n, c, spatial...].
        w: [o, c / groups, kernel...], of the transpose [c, o / groups, kernel...].
        attributes: of the primitive.
        output: the result's shape.
    """
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
        # What lies in the pads is read from a zero behind the rest.
        flat = verbs.pad(flat, (0, 0, 0), (0, 0, 1))
        table = np.where(table < 0, math.prod(sizes), table)
    read = verbs.take(flat, 2, table.tolist())
    read = verbs.reshape(read, (batch, groups, 1, each_in, taps, places))
    if isinstance(attributes, ConvAttributes):
        weights = verbs.reshape(w, (groups, each_out, each_in, taps))
    else:
        turned = verbs.reshape(w, (groups, each_in, each_out, taps))
        weights = verbs.transpose(turned, (0, 2, 1, 3))
    weights = verbs.reshape(weights, (1, groups, each_out, each_in, taps, 1))
    terms = verbs.add("mul", verbs.broadcast(read, full), verbs.broadcast(weights, full))
    return verbs.reshape(verbs.reduce("sum", terms, (3, 4)), output)


def _sources(
    sizes: Sequence[int],
    kernel: Sequence[int],
    output: Sequence[int],
    attributes: ConvAttributes | ConvTransposeAttributes,
) -> Array:
    """Return which input element each tap of each output reads, -1 for none: [taps, places]."""
    flat = np.zeros((1, 1), np.int64)
    for i, size in enumerate(sizes):
        tap = np.arange(kernel[i])[:, None] * attributes.dilations[i]
        place = np.arange(output[i])[None, :]
        begin, stride = attributes.pads_begin[i], attributes.strides[i]
        if isinstance(attributes, ConvAttributes):
            source = place * stride + tap - begin
            is_inside = (source >= 0) & (source < size)
        else:
            scaled = place + begin - tap
            source = scaled // stride
            is_inside = (scaled % stride == 0) & (source >= 0) & (source < size)
        axis = np.where(is_inside, source, -1)
        joined = flat[:, None, :, None] * size + axis[None, :, None, :]
        outside = (flat[:, None, :, None] < 0) | (axis[None, :, None, :] < 0)
        joined = np.where(outside, -1, joined)
        flat = joined.reshape(len(flat) * kernel[i], -1)
    return flat
