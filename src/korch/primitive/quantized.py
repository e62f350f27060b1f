"""Builds primitives for quantized integers: dequantization, quantization, and exact products.

An integer q represents the real number (q - zero)*scale. A sum of products of bytes minus their zero points is a sum
of products of the bytes in 32 bits, with corrections that each depend on one operand only:

    sum (a - za)(b - zb) = sum a*b - za * sum b - zb * sum a + terms*za*zb

Sums over constants are computed at build time. 32-bit sums wrap around, so only the result has to fit.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from korch.primitive.op import Array
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.verbs import Verbs, lit

NARROW_BITS = (2, 4)
"""The bit widths of integers that are packed, several in one byte."""


def dequantize(v: Verbs, q: ValueId, scale: ValueId, zero: ValueId | None, dtype: DType = DType.F32) -> ValueId:
    """Return (q - zero)*scale in a float type.

    Args:
        v: adds the primitives.
        q: integers of at most 16 bits, which float32 represents exactly, or of 32.
        scale: a value of any float type that broadcasts to q.
        zero: integers that broadcast to q; None for 0.
        dtype: the type of the result.
    """
    if v.dtype(q) is DType.I32 and zero is not None:
        q, zero = v.elementwise("sub", q, v.cast(zero, DType.I32)), None
    wide = v.cast(q, dtype)
    if zero is not None and not is_zero(v, zero):
        wide = v.elementwise("sub", wide, v.cast(zero, dtype))
    return v.elementwise("mul", wide, v.cast(scale, dtype))


def quantize(v: Verbs, quotient: ValueId, zero: ValueId | None, dtype: DType) -> ValueId:
    """Return saturate(round_half_even(quotient) + zero) as integers of at most 16 bits; NaN becomes the least integer.

    Args:
        v: adds the primitives.
        quotient: the real numbers divided by the scale.
        zero: integers that broadcast to the quotient; None for 0.
        dtype: the type of the result.
    """
    real = DType.F64 if v.dtype(quotient) is DType.F64 else DType.F32
    y = v.cast(v.elementwise("round", quotient), real)
    if zero is not None and not is_zero(v, zero):
        y = v.elementwise("add", y, v.cast(zero, real))
    limits = np.iinfo(dtype.numpy)
    low = v.full(limits.min, v.builder.type(y))
    # A cast turns NaN into 0, which is the least integer of unsigned types only.
    large = v.add("where", v.add("less_equal", low, y), y, low) if limits.min else v.elementwise("max", y, lit(0))
    return v.cast(v.elementwise("min", large, lit(limits.max)), dtype)


def is_zero(v: Verbs, value: ValueId) -> bool:
    """Return whether a value is a constant of zeros."""
    constant = v.builder.constant_of(value)
    return constant is not None and constant.is_zero


def pack(array: Array, bits: int, axis: int = -1) -> Array:
    """Return unsigned integers packed several to a byte; `unpack` reads those packed along the last axis.

    Args:
        array: u8, each element below 2^bits.
        bits: the bits of each integer, 2 or 4.
        axis: the axis along which adjacent elements share a byte, the first one in the lowest bits.
    """
    each, moved = 8 // bits, np.moveaxis(array, axis, 0)
    even = np.pad(moved, [(0, -len(moved) % each), *[(0, 0)] * (array.ndim - 1)])
    packed = even[::each].copy()
    for place in range(1, each):
        packed |= even[place::each] << np.uint8(bits * place)
    return np.moveaxis(packed, 0, axis)


def unpack(v: Verbs, packed: ValueId, bits: int, count: int) -> ValueId:
    """Return packed unsigned integers as one element each, the lowest bits of a byte first.

    Args:
        v: adds the primitives.
        packed: u8[..., n].
        bits: the bits of each integer, 2 or 4.
        count: the size of the result's last axis, at most n*(8/bits).
    """
    *lead, n = v.shape(packed)
    each = 8 // bits
    shape = (*lead, n, each)
    repeated = v.broadcast(v.reshape(packed, (*lead, n, 1)), shape)
    shifts = v.constant(np.arange(0, 8, bits, dtype=np.uint8).reshape((1,) * (len(lead) + 1) + (each,)))
    moved = v.elementwise("shift_right", repeated, shifts)
    single = v.reshape(v.elementwise("bitwise_and", moved, lit((1 << bits) - 1)), (*lead, n * each))
    return v.slice_axis(single, len(lead), 0, count)


def integer_matmul(v: Verbs, a: ValueId, b: ValueId, za: ValueId | None, zb: ValueId | None) -> ValueId:
    """Return the exact product of matrices of bytes minus their zero points, as i32.

    Args:
        v: adds the primitives.
        a: [..., m, k], bytes.
        b: [..., k, n], bytes, of the same rank.
        za: broadcasts to [..., m, 1]; None for 0.
        zb: broadcasts to [..., 1, n]; None for 0.
    """
    rank, terms = v.rank(a), v.shape(a)[-1]
    b, zb = _without_zero(v, b, zb)
    za, zb = (None if z is None or is_zero(v, z) else v.cast(z, DType.I32) for z in (za, zb))
    total = v.add("matmul", a, b)
    if za is not None:
        total = _minus(v, total, za, _sum(v, b, (rank - 2,)))
    if zb is not None:
        total = _minus(v, total, zb, _sum(v, a, (rank - 1,)))
    if za is not None and zb is not None:
        total = v.elementwise("add", total, v.elementwise("mul", v.elementwise("mul", za, lit(terms)), zb))
    return total


def integer_conv(
    v: Verbs, x: ValueId, w: ValueId, zx: ValueId | None, zw: ValueId | None, attributes: ConvAttributes
) -> ValueId:
    """Return the exact convolution of bytes minus their zero points, as i32; pads have the value of x's zero point.

    Args:
        v: adds the primitives.
        x: [n, c, spatial...], bytes.
        w: [o, c / groups, kernel...], bytes.
        zx: one element; None for 0.
        zw: one element, or one per output channel; None for 0.
        attributes: the attributes of the convolution.
    """
    spatial, groups = v.rank(x) - 2, attributes.groups
    zw = None if zw is None else v.reshape(zw, (v.builder.type(zw).size, *(1,) * (spatial + 1)))
    w, zw = _without_zero(v, w, zw)
    zx, zw = (None if z is None or is_zero(v, z) else z for z in (zx, zw))
    constant = None if zx is None else v.builder.constant_of(zx)
    if constant is not None and any((*attributes.pads_begin, *attributes.pads_end)):
        before, after = (0, 0, *attributes.pads_begin), (0, 0, *attributes.pads_end)
        x = v.pad(x, before, after, fill=float(constant.scalar))
        attributes = replace(attributes, pads_begin=(0,) * spatial, pads_end=(0,) * spatial)
    total = v.add("conv", x, w, attributes=attributes)
    out, wide = v.shape(total), DType.I32
    if zx is not None:
        zx = v.reshape(v.cast(zx, wide), (1,) * (spatial + 2))
        total = _minus(v, total, zx, _sums_of_weights(v, v.shape(x), w, attributes))
    if zw is not None:
        zw = v.cast(v.reshape(zw, (1, v.shape(zw)[0], *(1,) * spatial)), wide)
        ones = v.full(1, ValueType((groups, v.shape(w)[1], *v.shape(w)[2:]), DType.I8))
        sums = _for_each_output(v, v.add("conv", x, ones, attributes=attributes), out)
        total = _minus(v, total, zw, sums)
        if zx is not None:
            image = v.full(1, ValueType((1, *v.shape(x)[1:]), DType.U8))
            counts = _for_each_output(v, v.add("conv", image, ones, attributes=attributes), (1, *out[1:]))
            total = v.elementwise("add", total, v.elementwise("mul", v.elementwise("mul", counts, zx), zw))
    return total


def _minus(v: Verbs, total: ValueId, zero: ValueId, sums: ValueId) -> ValueId:
    """Return total - zero*sums, as one addition of a constant if zero and sums are constants."""
    known = [v.builder.constant_of(value) for value in (zero, sums)]
    if known[0] is not None and known[1] is not None:
        with np.errstate(all="ignore"):
            product = -(known[0].array * known[1].array)
        return v.elementwise("add", total, v.constant(product.astype(np.int32)))
    return v.elementwise("sub", total, v.elementwise("mul", zero, sums))


def _without_zero(v: Verbs, w: ValueId, zero: ValueId | None) -> tuple[ValueId, ValueId | None]:
    """Subtract the zero points from constant bytes and return no zero point, if the results fit a byte type."""
    constants = (v.builder.constant_of(w), None if zero is None else v.builder.constant_of(zero))
    if constants[0] is None or constants[1] is None:
        return w, zero
    array = constants[0].array.astype(np.int32) - constants[1].array
    for dtype in (np.int8, np.uint8):
        if np.array_equal(array.astype(dtype), array):
            return v.constant(array.astype(dtype)), None
    return w, zero


def _sums_of_weights(v: Verbs, image: Sequence[int], w: ValueId, attributes: ConvAttributes) -> ValueId:
    """Return, for each output, the sum of the weights that it multiplies by elements of the image and not by pads."""
    if any((*attributes.pads_begin, *attributes.pads_end)):
        return v.add("conv", v.full(1, ValueType((1, *image[1:]), DType.U8)), w, attributes=attributes)
    sums = _sum(v, w, range(1, v.rank(w)))
    return v.reshape(sums, (1, v.shape(w)[0], *(1,) * (v.rank(w) - 2)))


def _sum(v: Verbs, value: ValueId, axes: Sequence[int]) -> ValueId:
    """Return sums of bytes in 32 bits; the sums of a constant are a constant."""
    constant = v.builder.constant_of(value)
    if constant is None:
        return v.reduce("sum", v.cast(value, DType.I32), axes)
    return v.constant(constant.array.sum(tuple(axes), dtype=np.int32, keepdims=True))


def _for_each_output(v: Verbs, sums: ValueId, out: Sequence[int]) -> ValueId:
    """Repeat the one channel of each group for every output channel of the group."""
    batch, groups, *places = v.shape(sums)
    each = v.broadcast(v.reshape(sums, (batch, groups, 1, *places)), (batch, groups, out[1] // groups, *places))
    return v.reshape(each, (batch, out[1], *places))


def largest_terms(op: str, weights: Sequence[int]) -> int:
    """Return how many products of bytes a convolution or matrix product adds up."""
    return weights[-2] if op == "matmul" else math.prod(weights[1:])
