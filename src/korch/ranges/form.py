"""How the axes of a value depend on the dimensions of a range, and what a masked graph reads besides its inputs.

An axis is a product of factors, the outermost first, as reshapes merge and split them. A factor is fixed, or it is
*free*: the model has a number of elements along it that follows from a dimension's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.alignment import round_up
from korch.primitive.op import Array
from korch.primitive.types import DType

Sizes = tuple[int, ...]
"""The size of each dimension of a range."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of which an executable takes each size of a range.

    Attributes:
        name: the dimension's name, or the input's.
        axis: the input's axis; None if `name` is the dimension's.
        low: the smallest size.
        high: the largest size.
    """

    name: str
    axis: int | None
    low: int
    high: int

    def __str__(self) -> str:
        return self.name if self.axis is None else f"{self.name}[{self.axis}]"

    @property
    def range_text(self) -> str:
        """The sizes, as the option --shape writes them."""
        return f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class Extent:
    """floor((times · n + plus) / over), with n the size of a dimension, rounded up to a multiple of `step`.

    It is made by `extent`, so that equal functions are equal.
    """

    dimension: int
    times: int = 1
    plus: int = 0
    over: int = 1
    step: int = 1

    def __str__(self) -> str:
        text = f"({self.times}n{self.dimension}+{self.plus})/{self.over}"
        return text if self.step == 1 else f"{text} by {self.step}"

    def at(self, sizes: Sequence[int]) -> int:
        """Return the number of elements for the sizes of all dimensions."""
        return round_up((self.times * sizes[self.dimension] + self.plus) // self.over, self.step)

    def then(self, plus: int, over: int = 1) -> Extent:
        """Return floor((self + plus) / over), since floor(floor(x / a) + b) / c) is floor((x + a·b) / (a·c)).

        Of what is rounded up, it is at least that.
        """
        if (plus, over) == (0, 1):
            return self
        most = plus + self.step - 1
        return extent(self.dimension, self.times, self.plus + most * self.over, self.over * over)

    def repeated(self, count: int) -> Extent | None:
        """Return count · self, or None if it has no such form; of what is rounded up, it is at least that."""
        if self.over != 1 or count == 1:
            return self if count == 1 else None
        return extent(self.dimension, self.times * count, (self.plus + self.step - 1) * count)

    def rounded(self, step: int) -> Extent:
        """Return it rounded up to a multiple of a number."""
        if self.step != 1:
            raise AssertionError("it is rounded up")
        return replace(self, step=step)


def extent(dimension: int, times: int = 1, plus: int = 0, over: int = 1) -> Extent:
    """Return an extent in lowest terms."""
    common = math.gcd(times, over)
    return Extent(dimension, times // common, plus // common, over // common)


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of an axis: its size in the masked graph, and the model's; an extent of None is the same size."""

    size: int
    extent: Extent | None = None

    def at(self, sizes: Sequence[int]) -> int:
        """Return the model's size for the sizes of all dimensions."""
        return self.size if self.extent is None else self.extent.at(sizes)


Axis = tuple[Factor, ...] | None
"""The factors of an axis; None if all elements along it are equal, so that it has any factors of its size."""

Form = tuple[Axis, ...]


def is_free(axis: Axis) -> bool:
    """Return whether an axis has a free factor."""
    return axis is not None and any(factor.extent is not None for factor in axis)


def axis_of(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Return an axis of some factors, with its fixed ones joined, so that equal axes are equal."""
    found: list[Factor] = []
    for factor in factors:
        if factor.extent is None and factor.size == 1:
            continue
        if found and factor.extent is None and found[-1].extent is None:
            found[-1] = Factor(found[-1].size * factor.size)
        else:
            found.append(factor)
    return tuple(found)


def prefix(axis: Axis) -> Extent | None:
    """Return the extent of an axis whose valid elements are its first ones; None if they are not."""
    if not axis or axis[0].extent is None or any(factor.extent is not None for factor in axis[1:]):
        return None
    return axis[0].extent if len(axis) == 1 else axis[0].extent.repeated(axis[1].size)


@dataclass(frozen=True, slots=True)
class Hidden:
    """An input of a masked graph that the user does not see.

    Attributes:
        name: its name.
        kind: "mask": 1 for the valid elements along an axis, else 0. "end": 1 for the one that `offset` valid ones
            follow. "number": coefficient · (product of the extents) ^ power.
        factors: those of the axis; of a number, those whose extents are multiplied.
        rank: the number of axes; all but one have size 1.
        axis: that one.
        dtype: the element type.
        offset: of an "end".
        coefficient: of a "number".
        power: of a "number".
    """

    name: str
    kind: str
    factors: tuple[Factor, ...]
    rank: int
    axis: int = 0
    dtype: str = "f32"
    offset: int = 0
    coefficient: float = 0.0
    power: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        size = 1 if self.kind == "number" else math.prod(factor.size for factor in self.factors)
        return tuple(size if i == self.axis else 1 for i in range(self.rank))

    @property
    def form(self) -> tuple[tuple[Factor, ...], ...]:
        """How its axes depend on the dimensions."""
        return tuple(self.factors if i == self.axis and self.kind != "number" else () for i in range(self.rank))

    def array(self, sizes: Sequence[int]) -> Array:
        """Return its elements for the sizes of all dimensions."""
        counts = [factor.at(sizes) for factor in self.factors]
        if self.kind == "number":
            number = self.coefficient * float(math.prod(counts)) ** self.power
            return np.full(self.shape, number).astype(DType(self.dtype).numpy)
        found = np.zeros([factor.size for factor in self.factors], np.float32)
        if self.kind == "mask":
            found[tuple(slice(count) for count in counts)] = 1
        else:
            found[counts[0] - 1 - self.offset] = 1
        return found.reshape(self.shape)


def size_input(dimension: int, largest: int) -> Hidden:
    """Return the hidden input that has the size of a dimension, which kernels read to leave out what is not needed."""
    return Hidden("", "number", (Factor(largest, extent(dimension)),), 0, dtype="i64", coefficient=1.0)
