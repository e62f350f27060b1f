"""Fission of softmax and normalizations.

Softmax always subtracts the maximum, because e^x overflows float32 above 88. Variances are means of
squared deviations, computed in two passes, which avoids cancellation.
"""

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import Shape, lit


def _softmax_axes(c: Context) -> Shape:
    """The axis of the attribute; before opset 13 also all axes after it (the operator flattened its input)."""
    rank = c.rank(c.input(0))
    if c.version >= 13:
        return (axis_of(c.attributes.integer("axis", -1), rank),) if rank else ()
    return tuple(range(axis_of(c.attributes.integer("axis", 1), rank), rank))


def _softmax(c: Context) -> Result:
    """e^(x-m) / Σ e^(x-m), with m the maximum."""
    x, axes = _wide(c, c.input(0)), _softmax_axes(c)
    shifted = c.elementwise("sub", x, c.reduce("max", x, axes))
    power = c.elementwise("exp", shifted)
    return c.cast(c.elementwise("div", power, c.reduce("sum", power, axes)), c.output_type().dtype)


def _log_softmax(c: Context) -> Result:
    """(x-m) - log Σ e^(x-m), with m the maximum."""
    x, axes = _wide(c, c.input(0)), _softmax_axes(c)
    shifted = c.elementwise("sub", x, c.reduce("max", x, axes))
    total = c.reduce("sum", c.elementwise("exp", shifted), axes)
    return c.cast(c.elementwise("sub", shifted, c.elementwise("log", total)), c.output_type().dtype)


def _inverse_deviation(c: Context, variance: ValueId, epsilon: float) -> ValueId:
    shifted = c.elementwise("add", variance, lit(epsilon))
    return c.elementwise("reciprocal", c.elementwise("sqrt", shifted))


def _per_channel(c: Context, value: ValueId, rank: int) -> ValueId:
    """Return a vector over channels with the shape 1, c, 1, ..., 1."""
    return c.reshape(value, (1, c.shape(value)[0], *(1,) * (rank - 2)))


def _wide(c: Context, value: ValueId) -> ValueId:
    """Cast 16-bit floats to float32, in which ONNX computes normalizations and other engines compute softmax."""
    is_half = c.dtype(value) in (DType.F16, DType.BF16)
    return c.cast(value, DType.F32) if is_half else value


def _layer_norm(c: Context) -> Result:
    x = _wide(c, c.input(0))
    rank, out = c.rank(x), c.output_type().dtype
    axes = tuple(range(axis_of(c.attributes.integer("axis", -1), rank), rank))
    deviation, variance, mean = c.variance(x, axes)
    inverse = _inverse_deviation(c, variance, c.attributes.number("epsilon", 1e-5))
    y = c.cast(c.elementwise("mul", deviation, inverse), out)
    y = c.elementwise("mul", y, c.input(1))
    bias = c.optional(2)
    y = y if bias is None else c.elementwise("add", y, bias)
    kept = [c.cast(v, c.output_type(i).dtype) if c.is_read(i) else v for i, v in ((1, mean), (2, inverse))]
    return y, *kept


def _rms_norm(c: Context) -> Result:
    x = _wide(c, c.input(0))
    rank = c.rank(x)
    axes = tuple(range(axis_of(c.attributes.integer("axis", -1), rank), rank))
    mean_square = c.mean(c.elementwise("mul", x, x), axes)
    inverse = _inverse_deviation(c, mean_square, c.attributes.number("epsilon", 1e-5))
    y = c.cast(c.elementwise("mul", x, inverse), c.output_type().dtype)
    return c.elementwise("mul", y, c.input(1))


def _instance_norm(c: Context) -> Result:
    x, scale, bias = c.inputs
    rank = c.rank(x)
    deviation, variance, _ = c.variance(x, tuple(range(2, rank)))
    inverse = _inverse_deviation(c, variance, c.attributes.number("epsilon", 1e-5))
    factor = c.elementwise("mul", inverse, _per_channel(c, scale, rank))
    y = c.elementwise("mul", deviation, factor)
    return c.elementwise("add", y, _per_channel(c, bias, rank))


def _group_norm(c: Context) -> Result:
    """Scale and bias are per group before opset 21, per channel from then on."""
    x, scale, bias = c.inputs
    shape, groups = c.shape(x), c.attributes.integer("num_groups")
    if shape[1] % groups:
        raise NotSplitError(f"{shape[1]} channels are not {groups} equal groups")
    wide = c.reshape(_wide(c, x), (shape[0], groups, shape[1] // groups, *shape[2:]))
    deviation, variance, _ = c.variance(wide, tuple(range(2, len(shape) + 1)))
    inverse = _inverse_deviation(c, variance, c.attributes.number("epsilon", 1e-5))
    if c.shape(scale) == (groups,) and c.version < 21:
        repeats = [g for g in range(groups) for _ in range(shape[1] // groups)]
        scale, bias = c.take(scale, 0, repeats), c.take(bias, 0, repeats)
    y = c.reshape(c.elementwise("mul", deviation, inverse), shape)
    y = c.cast(y, c.output_type().dtype)
    y = c.elementwise("mul", y, _per_channel(c, scale, len(shape)))
    return c.elementwise("add", y, _per_channel(c, bias, len(shape)))


def _batch_norm(c: Context) -> Result:
    """x·f + (b - mean·f) with f = scale / sqrt(variance + epsilon), folded per channel."""
    if c.attributes.integer("training_mode", 0) or c.is_read(1) or c.attributes.integer("spatial", 1) == 0:
        raise NotSplitError("batch normalization in training mode")
    x, scale, bias, mean, variance = c.inputs
    if any(c.dtype(v) is not c.dtype(x) for v in c.inputs):
        raise NotSplitError("statistics of another type")
    root = c.elementwise("sqrt", c.elementwise("add", variance, lit(c.attributes.number("epsilon", 1e-5))))
    factor = c.elementwise("div", scale, root)
    shift = c.elementwise("sub", bias, c.elementwise("mul", mean, factor))
    rank = max(c.rank(x), 2)
    if c.rank(x) < 2:
        raise NotSplitError("an input without channels")
    y = c.elementwise("mul", x, _per_channel(c, factor, rank))
    return c.elementwise("add", y, _per_channel(c, shift, rank))


def _lp_norm(c: Context) -> Result:
    x, power = c.input(0), c.attributes.integer("p", 2)
    axes = (axis_of(c.attributes.integer("axis", -1), c.rank(x)),)
    if power == 1:
        norm = c.reduce("sum", c.elementwise("abs", x), axes)
    else:
        norm = c.elementwise("sqrt", c.reduce("sum", c.elementwise("mul", x, x), axes))
    # Where the norm is 0, all elements are 0, and the result has to be 0, too: 0 / 1.
    ones = c.full(1, c.builder.type(norm))
    divisor = c.add("where", c.elementwise("equal", norm, lit(0.0)), ones, norm)
    return c.elementwise("div", x, divisor)


def _mean_variance_norm(c: Context) -> Result:
    x = c.input(0)
    rank = c.rank(x)
    axes = tuple(axis_of(axis, rank) for axis in c.attributes.integers("axes", (0, 2, 3)))
    deviation, variance, _ = c.variance(x, axes)
    root = c.elementwise("add", c.elementwise("sqrt", variance), lit(1e-9))
    return c.elementwise("div", deviation, root)


def _lrn(c: Context) -> Result:
    """X / (bias + alpha/size · Σ x²)^beta, the sum over a window of channels."""
    x, size = c.input(0), c.attributes.integer("size")
    if size < 1:
        raise ValueError(f"size is {size}")
    spatial = c.rank(x) - 2
    ones, zeros = (1,) * spatial, (0,) * spatial
    # The window need not reach beyond the first and the last channel, because nothing is added there.
    farthest = max(0, c.shape(x)[1] - 1)
    before, after = min((size - 1) // 2, farthest), min(size // 2, farthest)
    window = PoolAttributes((before + 1 + after, *ones), (1, *ones), (before, *zeros), (after, *zeros), (1, *ones))
    total = c.add("pool_sum", c.elementwise("mul", x, x), attributes=window)
    alpha, beta = c.attributes.number("alpha", 1e-4), c.attributes.number("beta", 0.75)
    scaled = c.elementwise("mul", total, lit(float(np.float32(alpha)) / size))
    base = c.elementwise("add", scaled, lit(c.attributes.number("bias", 1.0)))
    return c.elementwise("div", x, c.elementwise("pow", base, lit(beta)))


RULES: tuple[FissionRule, ...] = (
    FissionRule("Softmax", _softmax),
    FissionRule("LogSoftmax", _log_softmax),
    FissionRule("LayerNormalization", _layer_norm, 17),
    FissionRule("RMSNormalization", _rms_norm, 23),
    FissionRule("InstanceNormalization", _instance_norm),
    FissionRule("GroupNormalization", _group_norm, 18),
    FissionRule("BatchNormalization", _batch_norm),
    FissionRule("LpNormalization", _lp_norm),
    FissionRule("MeanVarianceNormalization", _mean_variance_norm, 9),
    FissionRule("LRN", _lrn),
)
