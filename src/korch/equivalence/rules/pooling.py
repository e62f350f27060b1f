"""Rules that compute large maximum windows from smaller ones, and sums before the linear map that they follow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from korch.equivalence.affine_chains import axis_constant, is_read_elsewhere
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer, stands
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import PoolAttributes, ReduceAttributes
from korch.primitive.pattern import Found, either, op

POOLS = ("pool_max",)


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """A pooling, and another one of the same values with a smaller window."""

    root: Primitive
    smaller: Primitive


@dataclass(frozen=True, slots=True)
class PoolWitness:
    """The right side: windows to apply one after another, the first one to `x`."""

    op: str
    x: int
    windows: tuple[PoolAttributes, ...]


def _match_axes(view: View, root: Primitive) -> Iterator[Primitive]:
    attributes = root.attributes_as(PoolAttributes)
    if sum(n > 1 for n in attributes.kernel) > 1:
        yield root


def _refuse_axes(view: View, root: Primitive) -> PoolWitness | RuleRefusal:
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
    kept = tuple(window for window in windows if window != identity)
    return PoolWitness(root.op, root.inputs[0], kept)


def _fields(a: PoolAttributes) -> tuple[tuple[int, ...], ...]:
    return (a.kernel, a.strides, a.pads_begin, a.pads_end, a.dilations)


def _match_smaller(view: View, root: Primitive) -> Iterator[PoolMatch]:
    own = root.attributes_as(PoolAttributes)
    for other in view.users(root.inputs[0]):
        if other.op == root.op and other.output != root.output:
            kernel = other.attributes_as(PoolAttributes).kernel
            if len(kernel) == len(own.kernel) and math.prod(kernel) < math.prod(own.kernel):
                yield PoolMatch(root, other)


def _refuse_smaller(view: View, match: PoolMatch) -> PoolWitness | RuleRefusal:
    large = match.root.attributes_as(PoolAttributes)
    small = match.smaller.attributes_as(PoolAttributes)
    if {*large.dilations, *small.dilations, *small.strides} != {1}:
        return RuleRefusal("the windows have dilations, or the smaller one strides", match.root.output)
    kernel = tuple(a - b + 1 for a, b in zip(large.kernel, small.kernel, strict=True))
    begin = tuple(a - b for a, b in zip(large.pads_begin, small.pads_begin, strict=True))
    end = tuple(a - b for a, b in zip(large.pads_end, small.pads_end, strict=True))
    # The parts of large windows beyond the border are covered by the first or last of the smaller windows.
    fits = all(0 <= pad < n for pads in (begin, end) for pad, n in zip(pads, kernel, strict=True))
    if not fits:
        return RuleRefusal("the smaller window does not fit into the larger one", match.root.output)
    rest = replace(large, kernel=kernel, pads_begin=begin, pads_end=end)
    return PoolWitness(match.root.op, match.smaller.output, (rest,))


def _build(writer: Writer, witness: PoolWitness) -> int:
    value = witness.x
    for window in witness.windows:
        value = writer.add(witness.op, (value,), window)
    return value


POOL_IS_SEPARABLE = Rule(
    name="pool-is-one-axis-after-another",
    law="max over a x b = max over a of max over b",
    source="the maximum is associative and commutative",
    roots=POOLS,
    match=_match_axes,
    refuse=_refuse_axes,
    build=_build,
)
LARGE_POOL_IS_POOL_OF_SMALL_POOL = Rule(
    name="large-pool-is-pool-of-small-pool",
    law="max over k = max over k-j+1 of max over j; windows of 5, 9, 13 are three of 5",
    source="the maximum is idempotent: windows may overlap",
    roots=POOLS,
    match=_match_smaller,
    refuse=_refuse_smaller,
    build=_build,
)


# Sums before linear maps


_LINEAR = op("conv|matmul", "x", "weights", name="linear")
_SUM_OF_LINEAR = op("pool_sum|reduce_sum", either(_LINEAR, op("add", _LINEAR, "shift")))
"""A sum over positions of a linear map of channels, perhaps with a shift."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledSumWitness:
    """The sum, the linear primitive, and the shift to add: float64[channels] along an axis, or None."""

    root: Primitive
    linear: Primitive
    shift: Array | None
    axis: int


def _refuse_sum(view: View, match: Found) -> PooledSumWitness | RuleRefusal:
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
    if shift is None:
        return PooledSumWitness(root, linear, None, axis)
    constant = axis_constant(view, shift)
    if constant is None or constant.axis not in (None, axis):
        return RuleRefusal("the shift is not per channel", root.output)
    return PooledSumWitness(root, linear, np.asarray(constant.vector * count), axis)


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


def _build_sum(writer: Writer, witness: PooledSumWitness) -> int:
    root, linear = witness.root, witness.linear
    summed = writer.add(root.op, (linear.inputs[0],), root.attributes)
    mapped = writer.add(linear.op, (summed, linear.inputs[1]), linear.attributes)
    if witness.shift is None:
        return mapped
    along = writer.along(witness.shift, witness.axis, writer.type(mapped))
    return writer.add("add", (mapped, along))


SUM_COMES_BEFORE_LINEAR = Rule(
    name="sum-of-linear-is-linear-of-sum",
    law="Σ (W x + b) = W (Σ x) + n b, Σ over n places, as of an average pooling",
    source="linearity",
    roots=("pool_sum", "reduce_sum"),
    match=stands(_SUM_OF_LINEAR),
    refuse=_refuse_sum,
    build=_build_sum,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (POOL_IS_SEPARABLE, LARGE_POOL_IS_POOL_OF_SMALL_POOL, SUM_COMES_BEFORE_LINEAR)
