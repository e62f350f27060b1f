"""Inputs of a smaller size -> a run of a plan for a larger size: inputs are padded, and outputs are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from korch.primitive.op import Array
from korch.ranges.form import Factor, Sizes
from korch.ranges.plan import RangePlan
from korch.runtime.executable import Executable

NO_STATES: Mapping[int, int] = MappingProxyType({})

Indices = np.ndarray[tuple[int, ...], np.dtype[np.intp]]


class Padded:
    """An array of a plan's size, with an input's elements at its beginning and zeros after them.

    Masked graphs rely on the zeros (`korch.ranges.masked`).
    """

    def __init__(self, form: Sequence[tuple[Factor, ...]], dtype: np.dtype[Any]) -> None:
        self._whole = np.zeros(_planned(form), dtype)
        self._filled: tuple[int, ...] = ()

    def fill(self, array: Array) -> Array:
        """Copy an input into the array, and return the whole array."""
        if any(old > new for old, new in zip(self._filled, array.shape, strict=False)):
            self._whole[tuple(map(slice, self._filled))] = 0
        self._filled = array.shape
        self._whole[tuple(map(slice, array.shape))] = array
        return self._whole


class PaddedPlan:
    """A plan, and memory for its padded inputs, which is reused between runs."""

    def __init__(self, executable: Executable, plan: RangePlan) -> None:
        """Store a plan."""
        self.executable, self.plan = executable, plan
        self._infos = executable.get_inputs()
        self._spare: list[list[Padded]] = []

    def take(self) -> list[Padded]:
        """Return memory for each input, which no other thread uses until `give_back`."""
        try:
            return self._spare.pop()
        except IndexError:
            return [Padded(form, i.dtype) for i, form in zip(self._infos, self.plan.inputs, strict=False)]

    def give_back(self, memory: list[Padded]) -> None:
        """Make the memory that `take` returned available to other runs."""
        self._spare.append(memory)


@dataclass(frozen=True, slots=True)
class OutputCut:
    """How the model's elements of an output are selected from the plan's output."""

    # the sizes of the axes' factors in the plan; empty if all elements belong to the model's output
    factors: tuple[int, ...]
    counts: tuple[slice, ...]  # the sizes of the factors in the model; the product over an axis is in `shape`
    # for each factor that is a concatenation, its index and the indices of the model's elements along it
    joined: tuple[tuple[int, Indices], ...]
    shape: tuple[int, ...]  # the shape of the model's output

    @staticmethod
    def of(form: Sequence[tuple[Factor, ...]], sizes: Sizes) -> OutputCut:
        """Return the cut for some sizes."""
        factors = [factor for axis in form for factor in axis]
        counts = [factor.at(sizes) for factor in factors]
        is_whole = counts == [factor.size for factor in factors]
        shape = tuple(size_at(axis, sizes) for axis in form)
        slices = tuple(slice(None if factor.parts else n) for factor, n in zip(factors, counts, strict=True))
        joined = tuple((i, np.flatnonzero(factor.valid(sizes))) for i, factor in enumerate(factors) if factor.parts)
        return OutputCut(() if is_whole else tuple(f.size for f in factors), slices, joined, shape)

    def apply(self, array: Array) -> Array:
        """Return the model's elements; they are copied if they are not dense, or are a small part of the array."""
        if not self.factors:
            return array
        valid = array.reshape(self.factors)[self.counts]
        for axis, places in self.joined:
            valid = valid.take(places, axis)
        is_small = valid.size < array.size // 2
        return (valid.copy() if is_small else np.ascontiguousarray(valid)).reshape(self.shape)


class Fitting:
    """How inputs of some sizes run on a plan: the masks, the padding and the cuts."""

    def __init__(self, padded: PaddedPlan, sizes: Sizes, kept: Mapping[int, int] = NO_STATES) -> None:
        """Compute the masks, the padding and the cuts.

        `kept`: states, which already have the plan's sizes: the position of the output of each, by that of its input.
        Their outputs lie in the memory of the inputs.
        """
        plan = padded.plan
        self._kept, outputs = kept, set(kept.values())
        self._padded = padded
        self._is_exact = plan.is_exact
        self._masks = [np.asarray(hidden.array(sizes), order="C") for hidden in plan.hidden]
        self._known = {*kept, *range(len(plan.inputs), len(plan.inputs) + len(self._masks))}
        self._is_whole = [
            i in kept or tuple(size_at(a, sizes) for a in form) == _planned(form) for i, form in enumerate(plan.inputs)
        ]
        self._cuts = {i: OutputCut.of(form, sizes) for i, form in enumerate(plan.outputs) if i not in outputs}

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the model's outputs."""
        if self._is_exact:
            return self._padded.executable.compute(arrays)
        memory = self._padded.take()
        try:
            inputs = [
                array if is_whole else own.fill(array)
                for array, own, is_whole in zip(arrays, memory, self._is_whole, strict=True)
            ]
            into = {output: inputs[i] for i, output in self._kept.items()}
            found = self._padded.executable.compute([*inputs, *self._masks], into, self._known)
        finally:
            self._padded.give_back(memory)
        return tuple(self._cuts[i].apply(array) if i in self._cuts else array for i, array in enumerate(found))


def padded_run(executable: Executable, plan: RangePlan, sizes: Sizes, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return a plan's outputs for inputs of smaller sizes."""
    return Fitting(PaddedPlan(executable, plan), sizes).run(arrays)


def padded_inputs(plan: RangePlan, sizes: Sizes, arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays that a plan reads for inputs of smaller sizes: padded inputs and hidden inputs."""
    inputs = [Padded(form, array.dtype).fill(array) for form, array in zip(plan.inputs, arrays, strict=True)]
    return [*inputs, *(hidden.array(sizes) for hidden in plan.hidden)]


def _planned(form: Sequence[tuple[Factor, ...]]) -> tuple[int, ...]:
    return tuple(math.prod(factor.size for factor in axis) for axis in form)


def size_at(axis: Sequence[Factor], sizes: Sequence[int]) -> int:
    """Return the size of an axis in the model at some sizes of the dimensions."""
    return math.prod(factor.at(sizes) for factor in axis)
