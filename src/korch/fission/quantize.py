"""Fission of quantization: integers to real numbers and back, per tensor, per axis or per block."""

from __future__ import annotations

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import NotSplit, Result, Rule, rule
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import lit

INTEGERS = frozenset({DType.I8, DType.U8, DType.I16, DType.U16})


def _along(c: Context, value: ValueId, x: ValueId) -> ValueId | NotSplit:
    """Return a scale or zero point in the shape of x."""
    shape, given = c.shape(x), c.shape(value)
    block = int(c.attribute("block_size", 0))
    axis = axis_of(int(c.attribute("axis", 1)), len(shape)) if given else 0
    if block:
        if given[axis] * block < shape[axis]:
            return NotSplit("the blocks do not cover the axis")
        return c.take(value, axis, [i // block for i in range(shape[axis])])
    if given and given != (1,):
        if len(given) != 1 or given[0] != shape[axis]:
            return NotSplit("the scales fit no axis")
        value = c.reshape(value, tuple(n if i == axis else 1 for i, n in enumerate(shape)))
    elif given:
        value = c.reshape(value, (1,) * len(shape))
    return c.broadcast(value, shape)


def _dequantize(c: Context) -> Result:
    """Y = (x - zero_point) * scale (ONNX DequantizeLinear-10)."""
    x, scale = c.input(0), c.input(1)
    if c.dtype(x) not in INTEGERS | {DType.I32} or c.dtype(scale) is not DType.F32:
        return NotSplit(f"elements of type {c.dtype(x).value} and {c.dtype(scale).value}")
    if c.output_type().dtype is not DType.F32:
        return NotSplit("the result is no float32")
    factor = _along(c, scale, x)
    if isinstance(factor, NotSplit):
        return factor
    difference = c.cast(x, DType.I32)
    zero = c.optional(2)
    if zero is not None:
        offset = _along(c, c.cast(zero, DType.I32), x)
        if isinstance(offset, NotSplit):
            return offset
        difference = c.elementwise("sub", difference, offset)
    return c.elementwise("mul", c.cast(difference, DType.F32), factor)


def _quantize(c: Context) -> Result:
    """Y = saturate(round_half_even(x / scale) + zero_point) (ONNX QuantizeLinear-10)."""
    x, scale, dtype = c.input(0), c.input(1), c.output_type().dtype
    if c.dtype(x) is not DType.F32 or c.dtype(scale) is not DType.F32 or dtype not in INTEGERS:
        return NotSplit(f"elements of type {c.dtype(x).value}, quantized to {dtype.value}")
    if int(c.attribute("precision", 0)) not in (0, 1):
        return NotSplit("the quotient has another precision")
    factor = _along(c, scale, x)
    if isinstance(factor, NotSplit):
        return factor
    y = c.elementwise("round", c.elementwise("div", x, factor))
    zero = c.optional(2)
    if zero is not None:
        offset = _along(c, c.cast(zero, DType.F32), x)
        if isinstance(offset, NotSplit):
            return offset
        y = c.elementwise("add", y, offset)
    limits = np.iinfo(dtype.numpy)
    y = c.elementwise("min", c.elementwise("max", y, lit(limits.min)), lit(limits.max))
    return c.cast(y, dtype)


RULES: tuple[Rule, ...] = (rule("DequantizeLinear", _dequantize, 10), rule("QuantizeLinear", _quantize, 10))
