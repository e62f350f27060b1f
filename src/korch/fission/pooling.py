"""Fission of pooling: a windowed maximum or sum; an average divides the sum by its number of elements."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from korch.fission.context import Context
from korch.fission.rule import Build, FissionRule, NotSplitError, Result
from korch.fission.window import Window, reach, window_of
from korch.primitive.op import Array
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import ValueId
from korch.primitive.verbs import Shape, lit


def _pool(c: Context, op: str, value: ValueId, window: Window) -> ValueId:
    """Emit a pooling primitive whose output has the operator's shape.

    With ceil_mode the last window may end beyond the padded axis.
    Elements beyond the image are not counted, like padding.

    By the standard a window that contains only padding has no maximum ("maximum number of elements
    exclude pad"). It gives -inf here, the maximum of no numbers; ONNX Runtime gives the lowest
    finite number, `onnx.reference` 0.
    """
    shape = c.output_type().shape
    if min(c.attributes.integers("pads", (0,))) < 0:
        raise NotSplitError("negative pads")
    if 0 in c.shape(value):
        raise NotSplitError("an empty input")
    cut = tuple(max(0, -begin) for begin in window.pads_begin)  # auto_pad SAME, with strides longer than windows
    sizes = tuple(n - left for n, left in zip(c.shape(value)[2:], cut, strict=True))
    value = c.slice(value, (0, 0, *cut), (*c.shape(value)[:2], *sizes))
    window = replace(window, pads_begin=tuple(max(0, begin) for begin in window.pads_begin))
    window = replace(window, pads_end=reach(window, c.shape(value)[2:], shape[2:]))
    attributes = PoolAttributes(window.kernel, window.strides, window.pads_begin, window.pads_end, window.dilations)
    result = c.add(op, value, attributes=attributes)
    if c.shape(result) != shape:
        raise NotSplitError(f"windows give {c.shape(result)}, ONNX infers {shape}")
    return result


def _window(c: Context) -> Window:
    return window_of(c, c.attributes.integers("kernel_shape"), crops=True)


def _max_pool(c: Context) -> Result:
    if c.is_read(1):
        raise NotSplitError("the positions of the maxima are read")
    return _pool(c, "pool_max", c.input(0), _window(c))


def _average_pool(c: Context) -> Result:
    window = _window(c)
    total = _pool(c, "pool_sum", c.input(0), window)
    if c.attributes.integer("count_include_pad", 0) and not c.attributes.integer("ceil_mode", 0):
        return c.divide_exactly(total, math.prod(window.kernel))
    sizes, counts = c.shape(c.input(0))[2:], c.shape(total)[2:]
    divisor = _window_counts(window, sizes, counts, bool(c.attributes.integer("count_include_pad", 0)))
    if (divisor == divisor.reshape(-1)[0]).all():
        return c.divide_exactly(total, int(divisor.reshape(-1)[0]))
    dtype = c.dtype(total).numpy
    return c.elementwise("div", total, c.constant(divisor[None, None].astype(dtype)))


def _window_counts(window: Window, sizes: Shape, counts: Shape, include_pads: bool) -> Array:
    """Return the number of elements that each window averages, per spatial position."""
    total = np.ones((1,) * len(sizes), np.int64)
    for axis, (n, count) in enumerate(zip(sizes, counts, strict=True)):
        begin = window.pads_begin[axis] if include_pads else 0
        end = window.pads_end[axis] if include_pads else 0
        taps = np.arange(window.kernel[axis]) * window.dilations[axis] - window.pads_begin[axis]
        positions = np.arange(count)[:, None] * window.strides[axis] + taps
        inside = ((positions >= -begin) & (positions < n + end)).sum(1)
        total = total * inside.reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return total


def _lp_norm(c: Context, total_of: Callable[[ValueId], ValueId]) -> ValueId:
    """Return (Σ |x|^p)^(1/p), where `total_of` emits the sums."""
    x, power = c.input(0), c.attributes.integer("p", 2)
    if power < 1:
        raise NotSplitError(f"the norm p = {power}")
    if power == 2:
        return c.elementwise("sqrt", total_of(c.elementwise("mul", x, x)))
    size = c.elementwise("abs", x)
    if power == 1:
        return total_of(size)
    return c.elementwise("pow", total_of(c.elementwise("pow", size, lit(power))), lit(1 / power))


def _lp_pool(c: Context) -> Result:
    if c.attributes.integer("p", 2) > 2:
        raise NotSplitError("a library has pools of other norms than p = 1 and p = 2")
    return _lp_norm(c, lambda powers: _pool(c, "pool_sum", powers, _window(c)))


def _global_lp_pool(c: Context) -> Result:
    return _lp_norm(c, lambda powers: c.reduce("sum", powers, tuple(range(2, c.rank(powers)))))


def _global(name: str) -> Build:
    def build(c: Context) -> Result:
        x = c.input(0)
        axes = tuple(range(2, c.rank(x)))
        return c.mean(x, axes) if name == "mean" else c.reduce(name, x, axes)

    return build


RULES: tuple[FissionRule, ...] = (
    FissionRule("MaxPool", _max_pool),
    FissionRule("AveragePool", _average_pool),
    FissionRule("LpPool", _lp_pool),
    FissionRule("GlobalAveragePool", _global("mean")),
    FissionRule("GlobalMaxPool", _global("max")),
    FissionRule("GlobalLpPool", _global_lp_pool),
)
