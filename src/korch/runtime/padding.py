"""Inputs of a smaller size -> a run of a plan for a larger one: inputs are padded, and outputs are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.op import Array
from korch.ranges.form import Factor, Sizes
from korch.ranges.plan import RangePlan
from korch.runtime.executable import Executable


class Served:
    """A plan, and memory for its padded inputs.

    What lies behind the elements of an input is of earlier runs, since no result depends on it. At first it is zero, so
    that integers are always indices that the model has been given.
    """

    def __init__(self, executable: Executable, plan: RangePlan) -> None:
        self.executable, self.plan = executable, plan
        self._infos = executable.get_inputs()
        self._spare: list[list[Array]] = []

    def take(self) -> list[Array]:
        """Return an array for each input that no other thread has, until `give_back`."""
        try:
            return self._spare.pop()
        except IndexError:
            return [np.zeros(_planned(f), i.dtype) for i, f in zip(self._infos, self.plan.inputs, strict=False)]

    def give_back(self, arrays: list[Array]) -> None:
        """Let other runs have what `take` has returned."""
        self._spare.append(arrays)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the model's elements of an output are taken from a plan's.

    Attributes:
        factors: the sizes of the axes' factors in the plan; empty if all elements are the model's.
        counts: their sizes in the model, of which the product over an axis is in `shape`.
        shape: the model's.
    """

    factors: tuple[int, ...]
    counts: tuple[slice, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(form: Sequence[tuple[Factor, ...]], sizes: Sizes) -> Cut:
        """Return the cut for some sizes."""
        factors = [factor for axis in form for factor in axis]
        counts = [factor.at(sizes) for factor in factors]
        is_whole = counts == [factor.size for factor in factors]
        shape = tuple(size_at(axis, sizes) for axis in form)
        return Cut(() if is_whole else tuple(f.size for f in factors), tuple(map(slice, counts)), shape)

    def apply(self, array: Array) -> Array:
        """Return the model's elements, copied if they are not dense or a small part."""
        if not self.factors:
            return array
        valid = array.reshape(self.factors)[self.counts]
        is_small = valid.size < array.size // 2
        return (valid.copy() if is_small else np.ascontiguousarray(valid)).reshape(self.shape)


class Fitting:
    """How inputs of some sizes run on a plan: with which masks, pads and cuts."""

    def __init__(self, served: Served, sizes: Sizes) -> None:
        plan = served.plan
        self._served = served
        self._masks = [hidden.array(sizes) for hidden in plan.hidden]
        shapes = [tuple(size_at(axis, sizes) for axis in form) for form in plan.inputs]
        self._parts = [
            None if shape == _planned(form) else tuple(map(slice, shape))
            for shape, form in zip(shapes, plan.inputs, strict=True)
        ]
        self._is_padded = any(part is not None for part in self._parts)
        self._cuts = [Cut.of(form, sizes) for form in plan.outputs]

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the model's outputs."""
        found = (
            self._padded_run(arrays) if self._is_padded else self._served.executable.compute([*arrays, *self._masks])
        )
        return tuple(cut.apply(array) for cut, array in zip(self._cuts, found, strict=True))

    def _padded_run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        room = self._served.take()
        try:
            inputs = []
            for array, whole, part in zip(arrays, room, self._parts, strict=True):
                if part is not None:
                    whole[part] = array
                inputs.append(array if part is None else whole)
            return self._served.executable.compute([*inputs, *self._masks])
        finally:
            self._served.give_back(room)


def padded_run(executable: Executable, plan: RangePlan, sizes: Sizes, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return a plan's outputs for inputs of smaller sizes."""
    return Fitting(Served(executable, plan), sizes).run(arrays)


def padded(array: Array, form: Sequence[tuple[Factor, ...]]) -> Array:
    """Return an array with zeros behind its elements, in the size of a plan."""
    shape = _planned(form)
    if array.shape == shape:
        return array
    whole = np.zeros(shape, array.dtype)
    whole[tuple(slice(n) for n in array.shape)] = array
    return whole


def cut(array: Array, form: Sequence[tuple[Factor, ...]], sizes: Sizes) -> Array:
    """Return the elements of an array that the model has at some sizes."""
    return Cut.of(form, sizes).apply(array)


def _planned(form: Sequence[tuple[Factor, ...]]) -> tuple[int, ...]:
    return tuple(math.prod(factor.size for factor in axis) for axis in form)


def size_at(axis: Sequence[Factor], sizes: Sequence[int]) -> int:
    """Return the model's size of an axis."""
    return math.prod(factor.at(sizes) for factor in axis)
