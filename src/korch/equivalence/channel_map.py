"""Finds the cheapest place to compute a linear map of channels: it can move before steps that do not mix channels.

A map with constant weights W[o, c] along one axis commutes with every step that treats all channels
equally: slices, pads, transposes, reshapes and interpolation of other axes, scales that do not vary
along the axis, sums, and other linear primitives, into whose constant weights it folds. A concat of
channels splits it into a sum. `cheapest_place` walks down (towards the inputs) through such steps. It
returns the cheapest way to compute the map, with its costs and the work that it makes unnecessary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from korch.equivalence.affine_chains import axis_constant
from korch.equivalence.rule import View, Writer, is_finite_in
from korch.primitive.graph import Constant, Primitive
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.types import DType

FLOP_PER_ELEMENT = 32
"""The cost of moving or scaling an element, in floating-point operations of a linear primitive."""
MOST_STEPS = 100
"""The most steps below the map that are examined."""
MOST_VALUES = 100
"""The most values computed from a value for which it is checked whether only the map needs them."""

Parts = Mapping[tuple[object, ...], float]
"""The parts of the work that are computed or saved, each listed once, with their costs in FLOP."""


@dataclass(frozen=True, eq=False)
class MapPlace:
    """A way to compute the map."""

    costs: Parts  # the work that has to be done
    saved: Parts  # the work that is no longer needed
    write: Callable[[Writer], int]  # writes the primitives and returns the mapped value

    @property
    def gain(self) -> float:
        """The FLOP saved minus the FLOP needed."""
        return sum(self.saved.values()) - sum(self.costs.values())


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """y[o] = sum over c of weights[o, c] * x[c], along one axis of a value."""

    axis: int  # the axis of the channels
    weights: Array  # float64[o, c]
    part: tuple[int, int]  # the range of the root's input channels that c covers: first and last + 1

    @property
    def channels(self) -> int:
        """The number of channels of the result."""
        return int(self.weights.shape[0])

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the mapped value."""
        return (*shape[: self.axis], self.channels, *shape[self.axis + 1 :])

    def along(self, axis: int) -> ChannelMap:
        """Return the same map along another axis."""
        return replace(self, axis=axis)


def cheapest_place(view: View, value: int, channel_map: ChannelMap, root: int) -> MapPlace | None:
    """Return the cheapest way to map a value other than to map the value itself; None if there is none.

    `value`: the value to map, the input of the primitive that computes `root`.
    """
    return _Walk(view, root).below(value, channel_map)


@dataclass
class _Walk:
    view: View
    root: int
    known: dict[tuple[object, ...], MapPlace | None] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)  # values that are not private, as known so far
    steps: int = 0

    def is_private(self, value: int) -> bool:
        """Return whether only the root needs a value: no path from it leads to an output but through the root."""
        found, waiting = {value, self.root}, [value]
        while waiting:
            v = waiting.pop()
            if v in self.shared or self.view.is_output(v) or len(found) > MOST_VALUES:
                self.shared.add(value)
                return False
            new = [u for u in self.view.needed_by(v) if u not in found]
            found.update(new)
            waiting += new
        return True

    def at(self, value: int, m: ChannelMap) -> MapPlace | None:
        """Return the cheapest way to map a value."""
        key = (value, m.axis, m.part)
        if key not in self.known:
            self.known[key] = None  # ends the recursion in a cycle of alternatives
            places = [self._here(value, m), self.below(value, m)]
            found = [place for place in places if place is not None]
            self.known[key] = max(found, key=lambda place: place.gain, default=None)
        return self.known[key]

    def below(self, value: int, m: ChannelMap) -> MapPlace | None:
        """Return the cheapest way to map a value by mapping the inputs of a primitive that computes it."""
        best: MapPlace | None = None
        for step in self.view.producing(value, *_THROUGH):
            self.steps += 1
            if self.steps > MOST_STEPS:
                break
            # Asked before the walk goes on: a value that a shared one needs is shared, too.
            is_private = self.is_private(value)
            place = _THROUGH[step.op](self, step, m)
            if place is not None and not is_private:
                place = replace(place, saved={})
            if place is not None and (best is None or place.gain > best.gain):
                best = place
        return best

    def _here(self, value: int, m: ChannelMap) -> MapPlace | None:
        type_ = self.view.type(value)
        if self.view.constant(value) is not None or axis_constant(self.view, value) is not None:
            return self._constant(value, m)
        if type_.rank < 2:  # no primitive maps the elements of a vector
            return None
        if m.axis < type_.rank - 2 and not (m.axis == 1 and type_.rank >= 4):
            return None
        flop = 2.0 * type_.size * m.channels
        return MapPlace({("map", value, m.axis, m.part): flop}, {}, lambda w: write_map(w, value, m))

    def _constant(self, value: int, m: ChannelMap) -> MapPlace | None:
        type_, known = self.view.type(value), axis_constant(self.view, value)
        result = type_.with_shape(m.shape(type_.shape))
        if known is not None and known.axis in (None, m.axis):
            vector = np.broadcast_to(known.vector, (type_.shape[m.axis],))
            return MapPlace({}, {}, lambda w: w.along(m.weights @ vector, m.axis, result))
        constant = self.view.constant(value)
        if constant is None:
            return None
        array = constant.array

        def write(w: Writer) -> int:  # deferred, because few of the examined ways are written
            mapped = np.moveaxis(np.tensordot(m.weights, array, (1, m.axis)), 0, m.axis)
            return w.constant(mapped, type_.dtype)

        return MapPlace({}, {}, write)

    def step(
        self,
        step: Primitive,
        m: ChannelMap,
        children: list[tuple[int, ChannelMap]],
        write: Callable[[Writer, list[int]], int],
    ) -> MapPlace | None:
        """Return the way that maps the inputs of a step and repeats the step on the results."""
        places = []
        for value, below in children:
            place = self.at(value, below)
            if place is None:
                return None
            places.append(place)
        size = self.view.type(step.output).size
        new = size // max(1, self.view.shape(step.output)[m.axis]) * m.channels
        costs: dict[tuple[object, ...], float] = {("step", step.output, m.axis, m.part): float(FLOP_PER_ELEMENT * new)}
        saved: dict[tuple[object, ...], float] = {("step", step.output): float(FLOP_PER_ELEMENT * size)}
        for place in places:
            costs |= place.costs
            saved |= place.saved
        return MapPlace(costs, saved, lambda w: write(w, [place.write(w) for place in places]))

    def unary(self, step: Primitive, m: ChannelMap, below: ChannelMap, attributes: Attributes) -> MapPlace | None:
        """Return the way through a step with one input, as `step` does."""
        return self.step(step, m, [(step.inputs[0], below)], lambda w, values: w.add(step.op, values, attributes))


def write_map(writer: Writer, value: int, m: ChannelMap) -> int:
    """Write the map of a value along one of its last two axes, or along axis 1 of an image."""
    type_ = writer.type(value)
    channels, given = m.weights.shape
    if m.axis >= type_.rank - 2:
        is_last = m.axis == type_.rank - 1
        weights = m.weights.T if is_last else m.weights
        ones = (1,) * (type_.rank - 2)
        constant = writer.constant(weights.reshape(*ones, *weights.shape), type_.dtype)
        return writer.add("matmul", (value, constant) if is_last else (constant, value))
    spatial = type_.rank - 2
    ones, none = (1,) * spatial, (0,) * spatial
    constant = writer.constant(m.weights.reshape(channels, given, *ones), type_.dtype)
    return writer.add("conv", (value, constant), ConvAttributes(ones, none, none, ones))


def _sum(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    return walk.step(step, m, [(value, m) for value in step.inputs], lambda w, values: w.add(step.op, values))


def _neg(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    return walk.unary(step, m, m, step.attributes)


def _scale(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    """s*x and x/s, where s does not vary along the channels."""
    for position in (0, 1) if step.op == "mul" else (0,):
        data, factor = step.inputs[position], step.inputs[1 - position]
        again = _same_for_all(walk.view, factor, m)
        if again is None:
            continue

        def write(
            w: Writer, values: list[int], again: Callable[[Writer], int] = again, position: int = position
        ) -> int:
            pair = (values[0], again(w))
            return w.add(step.op, pair if position == 0 else pair[::-1])

        place = walk.step(step, m, [(data, m)], write)
        if place is not None:
            return place
    return None


def _same_for_all(view: View, value: int, m: ChannelMap) -> Callable[[Writer], int] | None:
    """Return a function that writes a value for the map's channels; None if the value varies along the channels."""
    shape = view.shape(value)
    wanted = BroadcastAttributes(m.shape(shape))
    for primitive in view.producing(value, "broadcast"):
        given = view.shape(primitive.inputs[0])
        axis = m.axis - (len(shape) - len(given))
        if axis < 0 or (given[axis] == 1 and shape[m.axis] != 1):
            return lambda w: w.add("broadcast", (primitive.inputs[0],), wanted)
    constant = view.constant(value)
    if constant is None or constant.array.size == 0:
        return None
    first = constant.array[(*[slice(None)] * m.axis, slice(1))]
    if not constant.is_uniform and not np.array_equal(np.broadcast_to(first, shape), constant.array):
        return None
    dtype = view.type(value).dtype
    return lambda w: w.add("broadcast", (w.constant(first, dtype),), wanted)


def _broadcast(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    given, shape = walk.view.shape(step.inputs[0]), walk.view.shape(step.output)
    axis = m.axis - (len(shape) - len(given))
    if axis < 0 or given[axis] != shape[m.axis]:
        return None
    return walk.unary(step, m, m.along(axis), BroadcastAttributes(m.shape(shape)))


def _take(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    attributes = step.attributes_as(TakeAttributes)
    return None if attributes.axis == m.axis else walk.unary(step, m, m, attributes)


def _slice(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    a = step.attributes_as(SliceAttributes)
    whole = (0, walk.view.shape(step.inputs[0])[m.axis], 1)
    if (a.start[m.axis], a.size[m.axis], a.step[m.axis]) != whole:
        return None
    return walk.unary(step, m, m, SliceAttributes(a.start, m.shape(a.size), a.step))


def _pad(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    a = step.attributes_as(PadAttributes)
    if a.before[m.axis] or a.after[m.axis] or (a.mode == "constant" and a.value != 0):
        return None
    return walk.unary(step, m, m, PadAttributes(a.before, a.after, a.mode, a.value))


def _transpose(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    attributes = step.attributes_as(TransposeAttributes)
    below = m.along(attributes.perm[m.axis])
    return walk.unary(step, m, below, TransposeAttributes(attributes.perm))


def _reshape(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    """A reshape that keeps the axis: the number of elements before it and its size are unchanged."""
    given, shape = walk.view.shape(step.inputs[0]), walk.view.shape(step.output)
    before = math.prod(shape[: m.axis])
    for axis, n in enumerate(given):
        if n == shape[m.axis] and n > 1 and math.prod(given[:axis]) == before:
            return walk.unary(step, m, m.along(axis), ReshapeAttributes(m.shape(shape)))
    return None


def _concat(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    attributes = step.attributes_as(ConcatAttributes)
    if attributes.axis != m.axis:
        return walk.step(
            step, m, [(value, m) for value in step.inputs], lambda w, values: w.add("concat", values, attributes)
        )
    children, first = [], 0
    for value in step.inputs:
        end = first + walk.view.shape(value)[m.axis]
        part = (m.part[0] + first, m.part[0] + end)
        children.append((value, ChannelMap(m.axis, m.weights[:, first:end], part)))
        first = end
    return walk.step(step, m, children, _write_sum)


def _write_sum(writer: Writer, values: list[int]) -> int:
    total = values[0]
    for value in values[1:]:
        total = writer.add("add", (total, value))
    return total


def _reduce(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    attributes = step.attributes_as(ReduceAttributes, PoolAttributes)
    if isinstance(attributes, ReduceAttributes):
        crosses = m.axis in attributes.axes
    else:
        crosses = m.axis >= walk.view.type(step.output).rank - len(attributes.kernel)
    return None if crosses else walk.unary(step, m, m, attributes)


def _matmul(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    """(a b) W = a (b W) and W (a b) = (W a) b; products of constants are computed immediately."""
    a, b = step.inputs
    type_ = walk.view.type(step.output)
    if m.axis < type_.rank - 2:
        return None
    is_last = m.axis == type_.rank - 1
    mapped, other = (b, a) if is_last else (a, b)
    place = walk.at(mapped, m)
    if place is None:
        return None
    flop = 2.0 * type_.size * walk.view.shape(a)[-1]
    again = flop * m.channels / max(1, type_.shape[m.axis])
    costs: Parts = {("matmul", step.output, m.axis, m.part): again, **place.costs}
    saved: Parts = {("matmul", step.output): flop, **place.saved}

    def write(w: Writer) -> int:
        value = place.write(w)
        return w.add("matmul", (other, value) if is_last else (value, other))

    return MapPlace(costs, saved, write)


def _conv(walk: _Walk, step: Primitive, m: ChannelMap) -> MapPlace | None:
    attributes = step.attributes_as(ConvAttributes)
    constant = walk.view.constant(step.inputs[1])
    if m.axis != 1 or attributes.groups != 1 or constant is None:
        return None
    dtype = walk.view.type(step.output).dtype
    if not _surely_finite(m, constant, dtype) and not is_finite_in(_mapped(m, constant), dtype):
        return None
    types = [walk.view.type(value) for value in step.inputs]
    flop = float(step.row.work_flop(types, attributes, walk.view.type(step.output)))
    costs: Parts = {("conv", step.output, m.part): flop * m.channels / m.weights.shape[1]}

    def write(w: Writer) -> int:
        return w.add("conv", (step.inputs[0], w.constant(_mapped(m, constant), dtype)), attributes)

    return MapPlace(costs, {("conv", step.output): flop}, write)


def _mapped(m: ChannelMap, constant: Constant) -> Array:
    """Return the weights of the convolution that includes the map of its result."""
    return np.tensordot(m.weights, constant.array.astype(np.float64), (1, 0))


def _surely_finite(m: ChannelMap, constant: Constant, dtype: DType) -> bool:
    """Return whether a bound, which is cheaper than the mapped weights, shows that all of them are finite."""
    largest = float(np.abs(constant.array).max(initial=0.0))
    most = float(np.abs(m.weights).sum(axis=1).max(initial=0.0)) * largest
    return is_finite_in(np.array([2.0 * most]), dtype)


_THROUGH: Mapping[str, Callable[[_Walk, Primitive, ChannelMap], MapPlace | None]] = {
    "add": _sum,
    "sub": _sum,
    "neg": _neg,
    "mul": _scale,
    "div": _scale,
    "broadcast": _broadcast,
    "take": _take,
    "slice": _slice,
    "pad": _pad,
    "transpose": _transpose,
    "reshape": _reshape,
    "concat": _concat,
    "reduce_sum": _reduce,
    "pool_sum": _reduce,
    "matmul": _matmul,
    "conv": _conv,
}
