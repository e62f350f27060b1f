"""Fission of reductions: Reduce* with axes as an attribute or as an input, ArgMax and ArgMin."""

from collections.abc import Callable

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import Build, FissionRule, NotSplitError, Result
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.verbs import Shape


def reduced_axes(c: Context) -> Shape | None:
    """Return the axes that a Reduce* operator reduces; None if it reduces nothing."""
    rank = c.rank(c.input(0))
    if c.is_given(1):
        axes = c.ints(1)
        if axes is None:
            raise NotSplitError("axes are computed at run time")
    else:
        axes = c.attributes.integers("axes", ())
    if not axes:
        return None if c.attributes.integer("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis_of(axis, rank) for axis in axes}))


def _reduction(
    before: Callable[[Context, ValueId], ValueId] | None,
    reduce: Callable[[Context, ValueId, Shape], ValueId],
    after: Callable[[Context, ValueId], ValueId] | None = None,
    floats_only: bool = False,
) -> Build:
    """Build `after(reduce(before(x)))`, and drop the reduced axes unless they are kept."""

    def build(c: Context) -> Result:
        x = c.input(0)
        axes = reduced_axes(c)
        if c.dtype(x).value == "bool" or (floats_only and not c.is_float(x)):
            raise NotSplitError(f"elements of type {c.dtype(x).value}")
        value = before(c, x) if before else x
        value = value if axes is None else reduce(c, value, axes)
        value = after(c, value) if after else value
        return c.reshape(value, c.output_type().shape)

    return build


def _plain(name: str) -> Callable[[Context, ValueId, Shape], ValueId]:
    return lambda c, x, axes: c.reduce(name, x, axes)


def _square(c: Context, x: ValueId) -> ValueId:
    return c.elementwise("mul", x, x)


def _log_sum_exp(c: Context, x: ValueId, axes: Shape) -> ValueId:
    """log(Σ e^x) as log(Σ e^(x-m)) + m, with m the maximum, or 0 where the maximum is infinite."""
    maximum = c.reduce("max", x, axes)
    zeros = c.full(0, c.builder.type(maximum))
    shift = c.add("where", c.elementwise("isinf", maximum), zeros, maximum)
    total = c.reduce("sum", c.elementwise("exp", c.elementwise("sub", x, shift)), axes)
    return c.elementwise("add", c.elementwise("log", total), shift)


def _abs(c: Context, x: ValueId) -> ValueId:
    return c.elementwise("abs", x)


def _log(c: Context, x: ValueId) -> ValueId:
    return c.elementwise("log", x)


def _sqrt(c: Context, x: ValueId) -> ValueId:
    return c.elementwise("sqrt", x)


def _place_of(name: str) -> Build:
    """Build the index of the first or last element that is the maximum or minimum; any NaN counts as the extreme."""

    def build(c: Context) -> Result:
        x = c.input(0)
        shape, rank = c.shape(x), c.rank(x)
        if not rank:
            raise NotSplitError("a scalar has no axis")
        axis = axis_of(c.attributes.integer("axis", 0), rank)
        is_last = bool(c.attributes.integer("select_last_index", 0))
        if not shape[axis]:
            raise NotSplitError("the axis has no elements")
        is_best = c.elementwise("equal", x, c.reduce(name, x, (axis,)))
        if c.is_float(x):
            is_best = c.add("or", is_best, c.elementwise("isnan", x))
        along = [shape[axis] if i == axis else 1 for i in range(rank)]
        places = c.broadcast(c.constant(np.arange(shape[axis], dtype=np.int32).reshape(along)), shape)
        none = c.full(-1 if is_last else shape[axis], ValueType(shape, DType.I32))
        found = c.reduce("max" if is_last else "min", c.add("where", is_best, places, none), (axis,))
        return c.reshape(c.cast(found, DType.I64), c.output_type().shape)

    return build


RULES: tuple[FissionRule, ...] = (
    FissionRule("ArgMax", _place_of("max")),
    FissionRule("ArgMin", _place_of("min")),
    FissionRule("ReduceSum", _reduction(None, _plain("sum"))),
    FissionRule("ReduceProd", _reduction(None, _plain("prod"))),
    FissionRule("ReduceMax", _reduction(None, _plain("max"))),
    FissionRule("ReduceMin", _reduction(None, _plain("min"))),
    FissionRule("ReduceMean", _reduction(None, lambda c, x, axes: c.mean(x, axes), floats_only=True)),
    FissionRule("ReduceL1", _reduction(_abs, _plain("sum"))),
    FissionRule("ReduceL2", _reduction(_square, _plain("sum"), _sqrt, floats_only=True)),
    FissionRule("ReduceSumSquare", _reduction(_square, _plain("sum"))),
    FissionRule("ReduceLogSum", _reduction(None, _plain("sum"), _log, floats_only=True)),
    FissionRule("ReduceLogSumExp", _reduction(None, _log_sum_exp, floats_only=True)),
)
