"""Fission of products of bytes: exact 32-bit sums, and their requantization."""

from korch.fission.context import Context
from korch.fission.linear import conv_attributes, matrices
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.ops.linear import BYTES
from korch.primitive.quantized import integer_conv, integer_matmul, quantize
from korch.primitive.types import DType, ValueId


def _zeros(c: Context, position: int, operand: ValueId, axis: int) -> ValueId | None:
    """Return an operand's zero points: one in total, or one per row (`axis` is -2) or column (-1) of its matrices."""
    zero = c.optional(position)
    if zero is None or c.builder.type(zero).size == 1:
        return None if zero is None else c.reshape(zero, (1,) * c.rank(operand))
    shape, wanted = c.shape(zero), list(c.shape(operand))
    wanted[-3 - axis] = 1
    if shape == (wanted[axis],):
        each = [1] * len(wanted)
        each[axis] = wanted[axis]
        return c.reshape(zero, each)
    if shape != tuple(wanted):
        raise NotSplitError(f"the zero points fit no {'row' if axis == -2 else 'column'}")
    return zero


def _sums(c: Context, at: tuple[int, int], zeros: tuple[int, int]) -> ValueId:
    """Return the 32-bit sums of a matrix product, given the input positions of its operands and zero points."""
    a, b = matrices(c, c.input(at[0]), c.input(at[1]))
    if c.dtype(a) not in BYTES or c.dtype(b) not in BYTES:
        raise NotSplitError(f"elements of type {c.dtype(a).value} and {c.dtype(b).value}")
    if not c.shape(a)[-1]:
        return c.full(0, c.builder.type(c.add("matmul", a, b)))
    return integer_matmul(c, a, b, _zeros(c, zeros[0], a, -2), _zeros(c, zeros[1], b, -1))


def _matmul_integer(c: Context) -> Result:
    return c.reshape(_sums(c, (0, 1), (2, 3)), c.output_type().shape)


def _qlinear_matmul(c: Context) -> Result:
    """Y = saturate(round(sums*(scale_a*scale_b/scale_y)) + zero_y)."""
    total = _sums(c, (0, 3), (2, 5))
    rank = c.rank(total)
    scales = [c.input(position) for position in (1, 4, 6)]
    if any(c.dtype(scale) is not DType.F32 for scale in scales):
        raise NotSplitError(f"scales of type {c.dtype(scales[0]).value}")
    lead = (1,) * (rank - 2)
    a, b = (c.builder.type(scale).size for scale in scales[:2])
    scales[0] = c.reshape(scales[0], (*lead, a, 1) if c.rank(scales[0]) < 2 else c.shape(scales[0]))
    scales[1] = c.reshape(scales[1], (*lead, 1, b) if c.rank(scales[1]) < 2 else c.shape(scales[1]))
    zero = c.reshape(c.input(7), (1,) * rank)
    y = _requantize(c, total, scales[0], scales[1], c.reshape(scales[2], (1,) * rank), zero)
    return c.reshape(y, c.output_type().shape)


def _requantize(c: Context, total: ValueId, a: ValueId, b: ValueId, y: ValueId, zero: ValueId) -> ValueId:
    factor = c.elementwise("div", c.elementwise("mul", a, b), y)
    quotient = c.elementwise("mul", c.cast(total, DType.F32), factor)
    return quantize(c, quotient, c.broadcast(zero, c.shape(total)), c.dtype(zero))


def _conv_integer(c: Context) -> Result:
    return _conv_sums(c, 0, 1, c.optional(2), c.optional(3))


def _conv_sums(c: Context, x: int, w: int, zx: ValueId | None, zw: ValueId | None) -> ValueId:
    image, weights = c.input(x), c.input(w)
    if c.dtype(image) not in BYTES or c.dtype(weights) not in BYTES:
        raise NotSplitError(f"elements of type {c.dtype(image).value} and {c.dtype(weights).value}")
    attributes = conv_attributes(c, image, weights)
    if zx is not None and c.builder.type(zx).size != 1:
        raise NotSplitError("a zero point for each channel of the data")
    return integer_conv(c, image, weights, zx, zw, attributes)


def _qlinear_conv(c: Context) -> Result:
    """Y = saturate(round((sums + bias)*(scale_x*scale_w/scale_y)) + zero_y)."""
    total = _conv_sums(c, 0, 3, c.input(2), c.input(5))
    rank = c.rank(total)
    bias = c.optional(8)
    if bias is not None:
        total = c.elementwise("add", total, c.reshape(bias, (1, c.shape(bias)[0], *(1,) * (rank - 2))))
    scale_x, scale_w, scale_y, zero = (c.input(position) for position in (1, 4, 6, 7))
    each = (1, c.builder.type(scale_w).size, *(1,) * (rank - 2))
    one = (1,) * rank
    return _requantize(
        c, total, c.reshape(scale_x, one), c.reshape(scale_w, each), c.reshape(scale_y, one), c.reshape(zero, one)
    )


RULES: tuple[FissionRule, ...] = (
    FissionRule("MatMulInteger", _matmul_integer, 10),
    FissionRule("ConvInteger", _conv_integer, 10),
    FissionRule("QLinearMatMul", _qlinear_matmul, 10),
    FissionRule("QLinearConv", _qlinear_conv, 10),
)
