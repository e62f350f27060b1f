"""Fission of quantization and dequantization, per tensor, per axis or per block."""

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.constant_memo import once_per_array
from korch.primitive.op import Array
from korch.primitive.quantized import NARROW_BITS, dequantize, is_zero, pack, quantize, unpack
from korch.primitive.types import NARROW, DType, ValueId, ValueType
from korch.primitive.verbs import lit

INTEGERS = frozenset(NARROW)
FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})


def _along(c: Context, value: ValueId, x: ValueId) -> ValueId:
    """Return a scale or zero point in the shape of x."""
    shape, given = c.shape(x), c.shape(value)
    block = c.attributes.integer("block_size", 0)
    axis = axis_of(c.attributes.integer("axis", 1), len(shape)) if given else 0
    if given and given != (1,) and not 0 <= axis < len(shape):
        raise ValueError(f"the axis {axis} is none of the {len(shape)} axes of the data")
    if block < 0:
        raise ValueError(f"block_size is {block}, not at least 0")
    if block and given:
        return _by_blocks(c, value, shape, axis, block)
    if given and given != (1,):
        if len(given) != 1 or given[0] != shape[axis]:
            raise ValueError(
                f"scales or zero points of the shape {list(given)} do not fit axis {axis} of {list(shape)}; "
                f"expected one number, or {shape[axis]}"
            )
        value = c.reshape(value, tuple(n if i == axis else 1 for i, n in enumerate(shape)))
    elif given:
        value = c.reshape(value, (1,) * len(shape))
    return c.broadcast(value, shape)


def _by_blocks(c: Context, value: ValueId, shape: tuple[int, ...], axis: int, block: int) -> ValueId:
    """Repeat the one element per block of an axis for all positions of the block; the last block may be incomplete."""
    given = c.shape(value)
    wanted = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    if given != wanted:
        raise ValueError(f"scales or zero points of blocks of {block} have the shape {list(given)}, not {list(wanted)}")
    lead, rest = given[: axis + 1], given[axis + 1 :]
    wide = c.broadcast(c.reshape(value, (*lead, 1, *rest)), (*lead, block, *rest))
    whole = c.reshape(wide, (*given[:axis], given[axis] * block, *rest))
    return c.slice_axis(whole, axis, 0, shape[axis])


def _dequantize(c: Context) -> Result:
    """Y = (x - zero_point) * scale (ONNX DequantizeLinear-10)."""
    x, scale, result = c.input(0), c.input(1), c.output_type().dtype
    if c.dtype(x) not in INTEGERS | {DType.I32} or not {c.dtype(scale), result} <= FLOATS:
        raise NotSplitError(
            f"elements of type {c.dtype(x).value} and {c.dtype(scale).value}, dequantized to {result.value}"
        )
    factor = _along(c, scale, x)
    zero = c.optional(2)
    offset = None if zero is None or is_zero(c, zero) else _along(c, zero, x)
    narrow = _stored_narrow(c, x, offset)
    x, offset = narrow if narrow[0] != x else _without_zero(c, x, zero, offset)
    return c.cast(dequantize(c, x, factor, offset), result)


def _without_zero(
    c: Context, x: ValueId, zero: ValueId | None, offset: ValueId | None
) -> tuple[ValueId, ValueId | None]:
    """Subtract the zero points from constant bytes and return no zero point, if the results fit signed bytes."""
    constants = c.builder.constant_of(x), None if zero is None else c.builder.constant_of(zero)
    is_byte = c.dtype(x) in (DType.I8, DType.U8) and not c.attributes.integer("block_size", 0)
    if constants[0] is None or constants[1] is None or not is_byte or constants[1].array.ndim > 1:
        return x, offset
    shape, points = constants[0].array.shape, constants[1].array.reshape(-1).astype(np.int32)
    if points.size > 1:
        axis = axis_of(c.attributes.integer("axis", 1), len(shape))
        points = points.reshape(tuple(n if i == axis else 1 for i, n in enumerate(shape)))
    array = constants[0].array - points
    signed = array.astype(np.int8)
    return (c.constant(signed), None) if np.array_equal(signed, array) else (x, offset)


def _stored_narrow(c: Context, x: ValueId, zero: ValueId | None) -> tuple[ValueId, ValueId | None]:
    """Pack a constant matrix of bytes that need fewer bits, and return it unpacked with a matching zero point."""
    constant = c.builder.constant_of(x)
    if constant is None or constant.is_uniform or c.rank(x) < 2 or c.dtype(x) not in (DType.I8, DType.U8):
        return x, zero
    found = _narrowed(constant.array)
    if found is None:
        return x, zero
    packed, bits, least = found
    return unpack(c, c.constant(packed), bits, c.shape(x)[-1]), _plus(c, zero, -least, c.shape(x))


@once_per_array
def _narrowed(array: Array) -> tuple[Array, int, int] | None:
    """Return bytes packed with fewer bits, these bits, and the byte that 0 stands for; None if they need all bits."""
    if not array.size:
        return None
    low, high = int(array.min()), int(array.max())
    for bits in NARROW_BITS:
        least = 0 if array.dtype == np.uint8 else -(1 << bits - 1)
        if low >= least and high < least + (1 << bits):
            return pack((array - np.array(least, array.dtype)).view(np.uint8), bits), bits, least
    return None


def _plus(c: Context, zero: ValueId | None, number: int, shape: tuple[int, ...]) -> ValueId | None:
    """Return zero points plus a number as 32-bit integers of a shape; None stands for zero points of 0."""
    if not number:
        return zero
    if zero is None:
        return c.full(number, ValueType(shape, DType.I32))
    return c.elementwise("add", c.cast(zero, DType.I32), lit(number))


def _quantize(c: Context) -> Result:
    """Y = saturate(round_half_even(x / scale) + zero_point) (ONNX QuantizeLinear-10)."""
    x, scale, dtype = c.input(0), c.input(1), c.output_type().dtype
    if not {c.dtype(x), c.dtype(scale)} <= FLOATS | {DType.I32} or dtype not in INTEGERS:
        raise NotSplitError(f"elements of type {c.dtype(x).value}, quantized to {dtype.value}")
    if c.attributes.integer("precision", 0) not in (0, 1):
        raise NotSplitError("the quotient has another precision")
    factor = _along(c, scale, x)
    zero = c.optional(2)
    offset = None if zero is None or is_zero(c, zero) else _along(c, zero, x)
    real = c.dtype(x) if c.dtype(x) is c.dtype(scale) else DType.F32
    quotient = c.elementwise("div", c.cast(x, real), c.cast(factor, real))
    return quantize(c, quotient, offset, dtype)


def _quantize_dynamically(c: Context) -> Result:
    """Return bytes, their scale and their zero point for the range of the elements, extended to contain 0."""
    x = c.input(0)
    axes = range(c.rank(x))
    low, high = (c.reshape(c.reduce(name, x, axes), ()) for name in ("min", "max"))
    low, high = c.elementwise("min", low, lit(0)), c.elementwise("max", high, lit(0))
    extent = c.elementwise("sub", high, low)
    is_flat = c.elementwise("equal", extent, c.full(0, c.builder.type(extent)))
    extent = c.add("where", is_flat, c.full(1, c.builder.type(extent)), extent)
    scale = c.elementwise("div", extent, lit(255))
    zero = quantize(c, c.elementwise("neg", c.elementwise("div", low, scale)), None, DType.U8)
    quotient = c.elementwise("div", x, scale)
    return quantize(c, quotient, c.broadcast(zero, c.shape(x)), DType.U8), scale, zero


RULES: tuple[FissionRule, ...] = (
    FissionRule("DequantizeLinear", _dequantize, 10),
    FissionRule("QuantizeLinear", _quantize, 10),
    FissionRule("DynamicQuantizeLinear", _quantize_dynamically, 11),
)
