"""Rules that compute large maximum windows from smaller ones, and sums before the linear map that they follow."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from korch.equivalence.affine_chains import axis_constant, is_read_elsewhere
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer, stands
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import PoolAttributes, ReduceAttributes
from korch.primitive.pattern import Found, either, op

POOLS = ("pool_max",)


def _match_axes(view: View, root: Primitive) -> Iterator[Primitive]:
    attributes = root.attributes_as(PoolAttributes)
    if sum(n > 1 for n in attributes.kernel) > 1:
        yield root


def _separate(view: View, root: Primitive) -> Write | RuleRefusal:
    attributes = root.attributes_as(PoolAttributes)
    kernel, rank = attributes.kernel, len(attributes.kernel)
    if math.prod(kernel) <= sum(n for n in kernel if n > 1) + 1:
        return RuleRefusal("one axis after another compares no less", root.output)
    none = (1,) * rank
    identity = PoolAttributes(none, none, (0,) * rank, (0,) * rank, none)
    windows = [
        PoolAttributes(
            *(
                tuple(a if i == axis else b for i, (a, b) in enumerate(zip(field, other, strict=True)))
                for field, other in zip(_fields(attributes), _fields(identity), strict=True)
            )
        )
        for axis in reversed(range(rank))
    ]
    kept = [window for window in windows if window != identity]

    def write(writer: Writer) -> int:
        value = root.inputs[0]
        for window in kept:
            value = writer.add(root.op, (value,), window)
        return value

    return write


def _fields(a: PoolAttributes) -> tuple[tuple[int, ...], ...]:
    return (a.kernel, a.strides, a.pads_begin, a.pads_end, a.dilations)


def _match_smaller(view: View, root: Primitive) -> Iterator[tuple[Primitive, Primitive]]:
    """Yield the pooling with each other one of the same values that has a smaller window."""
    own = root.attributes_as(PoolAttributes)
    for other in view.users(root.inputs[0]):
        if other.op == root.op and other.output != root.output:
            kernel = other.attributes_as(PoolAttributes).kernel
            if len(kernel) == len(own.kernel) and math.prod(kernel) < math.prod(own.kernel):
                yield root, other


def _pool_again(_: View, match: tuple[Primitive, Primitive]) -> Write | RuleRefusal:
    root, smaller = match
    large, small = root.attributes_as(PoolAttributes), smaller.attributes_as(PoolAttributes)
    if {*large.dilations, *small.dilations, *small.strides} != {1}:
        return RuleRefusal("the windows have dilations, or the smaller one strides", root.output)
    kernel = tuple(a - b + 1 for a, b in zip(large.kernel, small.kernel, strict=True))
    begin = tuple(a - b for a, b in zip(large.pads_begin, small.pads_begin, strict=True))
    end = tuple(a - b for a, b in zip(large.pads_end, small.pads_end, strict=True))
    # The parts of large windows beyond the border are covered by the first or last of the smaller windows.
    fits = all(0 <= pad < n for pads in (begin, end) for pad, n in zip(pads, kernel, strict=True))
    if not fits:
        return RuleRefusal("the smaller window does not fit into the larger one", root.output)
    rest = replace(large, kernel=kernel, pads_begin=begin, pads_end=end)
    return lambda writer: writer.add(root.op, (smaller.output,), rest)


POOL_IS_SEPARABLE = Rule(
    name="pool-is-one-axis-after-another",
    law="max over a x b = max over a of max over b",
    source="the maximum is associative and commutative",
    roots=POOLS,
    match=_match_axes,
    rewrite=_separate,
)
LARGE_POOL_IS_POOL_OF_SMALL_POOL = Rule(
    name="large-pool-is-pool-of-small-pool",
    law="max over k = max over k-j+1 of max over j; windows of 5, 9, 13 are three of 5",
    source="the maximum is idempotent: windows may overlap",
    roots=POOLS,
    match=_match_smaller,
    rewrite=_pool_again,
)


# Sums before linear maps


_LINEAR = op("conv|matmul", "x", "weights", name="linear")
_SUM_OF_LINEAR = op("pool_sum|reduce_sum", either(_LINEAR, op("add", _LINEAR, "shift")))
"""A sum over positions of a linear map of channels, perhaps with a shift."""


def _sum_before(view: View, match: Found) -> Write | RuleRefusal:
    root, linear, shift = match.root, match.primitives["linear"], match.values.get("shift")
    attributes = root.attributes_as(ReduceAttributes, PoolAttributes)
    shape = view.shape(linear.output)
    axis = 1 if linear.op == "conv" else len(shape) - 1
    if not _is_pointwise(view, linear):
        return RuleRefusal("the linear map is not of channels", root.output)
    if isinstance(attributes, ReduceAttributes):
        summed = set(attributes.axes)
        count = math.prod(shape[a] for a in summed)
        if axis in summed or (linear.op == "conv" and 0 in summed):
            return RuleRefusal("the sum is over the channels", root.output)
    else:
        count = math.prod(attributes.kernel)
        if axis >= len(shape) - len(attributes.kernel):
            return RuleRefusal("the sum is over the channels", root.output)
        if shift is not None and any((*attributes.pads_begin, *attributes.pads_end)):
            return RuleRefusal("the shift is not summed as often at the borders", root.output)
    if math.prod(view.shape(root.output)) >= math.prod(shape):
        return RuleRefusal("no fewer values are mapped", root.output)
    inside = frozenset((root.output, linear.output, root.inputs[0]))
    if any(is_read_elsewhere(view, v, inside) for v in (linear.output, root.inputs[0])):
        return RuleRefusal("the values before the sum are needed too", root.output)
    constant = None if shift is None else axis_constant(view, shift)
    if shift is not None and (constant is None or constant.axis not in (None, axis)):
        return RuleRefusal("the shift is not per channel", root.output)

    def write(writer: Writer) -> int:
        summed = writer.add(root.op, (linear.inputs[0],), root.attributes)
        mapped = writer.add(linear.op, (summed, linear.inputs[1]), linear.attributes)
        if constant is None:
            return mapped
        along = writer.along(np.asarray(constant.vector * count), axis, writer.type(mapped))
        return writer.add("add", (mapped, along))

    return write


def _is_pointwise(view: View, linear: Primitive) -> bool:
    """Return whether a linear primitive maps the channels of each position by the same constants."""
    weights = view.constant(linear.inputs[1])
    if weights is None or not view.type(linear.output).dtype.is_float:
        return False
    if linear.op == "matmul":
        return bool(math.prod(weights.array.shape[:-2]) == 1)
    a = linear.attributes_as(ConvAttributes)
    is_one = bool(all(n == 1 for n in weights.array.shape[2:]))
    return is_one and {*a.strides} <= {1} and not any((*a.pads_begin, *a.pads_end))


SUM_COMES_BEFORE_LINEAR = Rule(
    name="sum-of-linear-is-linear-of-sum",
    law="Σ (W x + b) = W (Σ x) + n b, Σ over n places, as of an average pooling",
    source="linearity",
    roots=("pool_sum", "reduce_sum"),
    match=stands(_SUM_OF_LINEAR),
    rewrite=_sum_before,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (POOL_IS_SEPARABLE, LARGE_POOL_IS_POOL_OF_SMALL_POOL, SUM_COMES_BEFORE_LINEAR)
