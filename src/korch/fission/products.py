"""Linear operations on float64 and integers as sums of products, which generated kernels add up.

The libraries multiply float32 only. A convolution reads its input through one table of indices, so
that strides, dilations and pads of any rank cost no further primitives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from korch.primitive.op import Array
from korch.primitive.ops.layout import MOST_INDICES

if TYPE_CHECKING:
    from korch.fission.context import Context

MOST_PRODUCTS = 1 << 22
"""More of them would be slow, and large where they are not fused with their sum."""


def matmul_products(context: Context, a: int, b: int) -> int | None:
    """Return a matrix product as a sum of products; None if these are too many."""
    m, k = context.shape(a)[-2:]
    n = context.shape(b)[-1]
    batch = np.broadcast_shapes(context.shape(a)[:-2], context.shape(b)[:-2])
    full = (*batch, m, k, n)
    if not 0 < math.prod(full) <= MOST_PRODUCTS:
        return None
    left = context.reshape(a, (*context.shape(a), 1))
    right = context.reshape(b, (*context.shape(b)[:-2], 1, k, n))
    terms = context.add("mul", context.broadcast(left, full), context.broadcast(right, full))
    return context.reshape(context.reduce("sum", terms, (len(full) - 2,)), (*batch, m, n))


def conv_products(context: Context, op: str, x: int, w: int, attributes: Any, output: tuple[int, ...]) -> int | None:
    """Return a convolution or its transpose as a sum of products; None if these are too many.

    Args:
        context: the operator.
        op: `conv` or `conv_transpose`.
        x: [n, c, spatial...].
        w: [o, c / groups, kernel...], of the transpose [c, o / groups, kernel...].
        attributes: of the primitive.
        output: the result's shape.
    """
    batch, channels, *sizes = context.shape(x)
    groups, kernel = attributes.groups, context.shape(w)[2:]
    each_in, each_out = channels // groups, output[1] // groups
    taps, places = math.prod(kernel), math.prod(output[2:])
    full = (batch, groups, each_out, each_in, taps, places)
    if not 0 < math.prod(full) <= MOST_PRODUCTS or taps * places > MOST_INDICES:
        return None
    flat = context.reshape(x, (batch, channels, math.prod(sizes)))
    table = _sources(op, sizes, kernel, output[2:], attributes).reshape(-1)
    if (table < 0).any():
        # What lies in the pads is read from a zero behind the rest.
        flat = context.pad(flat, (0, 0, 0), (0, 0, 1))
        table = np.where(table < 0, math.prod(sizes), table)
    read = context.take(flat, 2, table.tolist())
    read = context.reshape(read, (batch, groups, 1, each_in, taps, places))
    if op == "conv":
        weights = context.reshape(w, (groups, each_out, each_in, taps))
    else:
        turned = context.reshape(w, (groups, each_in, each_out, taps))
        weights = context.transpose(turned, (0, 2, 1, 3))
    weights = context.reshape(weights, (1, groups, each_out, each_in, taps, 1))
    terms = context.add("mul", context.broadcast(read, full), context.broadcast(weights, full))
    return context.reshape(context.reduce("sum", terms, (3, 4)), output)


def _sources(op: str, sizes: list[int], kernel: tuple[int, ...], output: tuple[int, ...], attributes: Any) -> Array:
    """Return which input element each tap of each output reads, -1 for none: [taps, places]."""
    flat = np.zeros((1, 1), np.int64)
    for i, size in enumerate(sizes):
        tap = np.arange(kernel[i])[:, None] * attributes.dilations[i]
        place = np.arange(output[i])[None, :]
        begin, stride = attributes.pads_begin[i], attributes.strides[i]
        if op == "conv":
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
