"""How the axes of a value depend on the free dimensions, and the hidden inputs of a masked graph.

An axis is a product of factors, the outermost first, as reshapes merge and split them. A factor is either fixed or
*free*: the model's number of elements along a free factor is a function of a dimension's size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.system.alignment import round_up

Bools = npt.NDArray[np.bool_]

Sizes = tuple[int, ...]
"""The size of each dimension of a range, in steps of the range: 10 for an image of 320 if the step is 32."""


def range_text(sizes: range) -> str:
    """Return sizes in the syntax of the option --shape."""
    return f"{sizes.start}..{sizes[-1]}" + (f":{sizes.step}" if sizes.step > 1 else "")


@dataclass(frozen=True, slots=True)
class Dimension:
    """A free dimension: an executable accepts each size of a range for it."""

    name: str  # the name of the dimension or of the input
    axis: int | None  # the input's axis; None if `name` is the dimension's name
    low: int  # the smallest size, in steps
    high: int  # the largest size, in steps
    step: int = 1  # all sizes are multiples of it

    def __str__(self) -> str:
        return self.name if self.axis is None else f"{self.name}[{self.axis}]"

    @property
    def range_text(self) -> str:
        """The sizes in the syntax of the option --shape."""
        return range_text(range(self.low * self.step, self.high * self.step + 1, self.step))

    def steps_of(self, size: int) -> int | None:
        """Return a size in steps; None if it is not in the range."""
        steps, rest = divmod(size, self.step)
        return steps if rest == 0 and self.low <= steps <= self.high else None


def sizes_text(dimensions: Sequence[Dimension], sizes: Sizes) -> str:
    """Return sizes with the names of their dimensions."""
    return ", ".join(f"{d}={n * d.step}" for d, n in zip(dimensions, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Extent:
    """floor((times · n + plus) / over), with n the size of a dimension, rounded up to a multiple of `step`.

    Use the function `extent` to create it, so that equal functions are equal objects.
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

        If this extent is rounded up (`step`), the result is an upper bound of that.
        """
        if (plus, over) == (0, 1):
            return self
        most = plus + self.step - 1
        return extent(self.dimension, self.times, self.plus + most * self.over, self.over * over)

    def repeated(self, count: int) -> Extent | None:
        """Return count · self, or None if it has no such form; if it is rounded up (`step`), an upper bound."""
        if self.over != 1 or count == 1:
            return self if count == 1 else None
        return extent(self.dimension, self.times * count, (self.plus + self.step - 1) * count)

    def covering(self, count: int) -> Extent:
        """Return the least extent of this form that is at least count · self."""
        most = self.plus + (self.step - 1) * self.over
        return self if count == 1 else extent(self.dimension, self.times * count, most * count, self.over)

    def divided(self, count: int) -> Extent | None:
        """Return self / count, or None if this is not a whole number for all sizes."""
        if (self.over, self.step) != (1, 1) or self.times % count or self.plus % count:
            return None
        return extent(self.dimension, self.times // count, self.plus // count)

    def rounded(self, step: int) -> Extent:
        """Return the extent rounded up to a multiple of `step`."""
        if self.step != 1:
            raise AssertionError("it is rounded up")
        return replace(self, step=step)


def extent(dimension: int, times: int = 1, plus: int = 0, over: int = 1) -> Extent:
    """Return an extent in lowest terms."""
    common = math.gcd(times, over)
    return Extent(dimension, times // common, plus // common, over // common)


@dataclass(frozen=True, slots=True)
class Rows:
    """A part of an axis that merges two: the first `inner` of each `most` elements, of the first `outer` groups."""

    outer: Extent
    inner: Extent
    most: int

    def __str__(self) -> str:
        return f"{self.outer} x {self.inner} of {self.most}"

    def at(self, sizes: Sequence[int]) -> int:
        """Return the number of elements for the sizes of all dimensions."""
        return self.outer.at(sizes) * self.inner.at(sizes)


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of an axis."""

    size: int  # its size in the masked graph
    extent: Extent | None = None  # its size in the model; None if that is `size`
    # for a concatenation along free axes, the factors of each concatenated operand
    parts: tuple[tuple[Factor, ...], ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether the model's size depends on a dimension."""
        return self.extent is not None or bool(self.parts)

    def at(self, sizes: Sequence[int]) -> int:
        """Return the model's size for the sizes of all dimensions."""
        if self.parts:
            return sum(math.prod(factor.at(sizes) for factor in part) for part in self.parts)
        return self.size if self.extent is None else self.extent.at(sizes)

    def valid(self, sizes: Sequence[int]) -> Bools:
        """Return which elements along it are valid."""
        if self.parts:
            return np.concatenate([valid(part, sizes).reshape(-1) for part in self.parts])
        return np.arange(self.size) < self.at(sizes)


def valid(factors: Sequence[Factor], sizes: Sequence[int]) -> Bools:
    """Return which elements of an axis are valid, as an array with one axis per factor."""
    lines = (factor.valid(sizes) for factor in factors)
    return np.asarray(functools.reduce(np.logical_and.outer, lines, np.ones((), np.bool_)))


Axis = tuple[Factor, ...] | None
"""The factors of an axis; None if all elements along it are equal, so that it can have any factors of its size."""

Form = tuple[Axis, ...]


def is_free(axis: Axis) -> bool:
    """Return whether an axis has a free factor."""
    return axis is not None and any(factor.is_free for factor in axis)


def axis_of(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Return the axis of some factors in canonical form: adjacent fixed factors are merged, those of size 1 dropped."""
    found: list[Factor] = []
    for factor in factors:
        if not factor.is_free and factor.size == 1:
            continue
        if found and not factor.is_free and not found[-1].is_free:
            found[-1] = Factor(found[-1].size * factor.size)
        else:
            found.append(factor)
    return tuple(found)


def prefix(axis: Axis) -> Extent | None:
    """Return the number of valid elements of an axis if they are its first elements; None if they are not."""
    if not axis or axis[0].extent is None or any(factor.is_free for factor in axis[1:]):
        return None
    return axis[0].extent if len(axis) == 1 else axis[0].extent.repeated(axis[1].size)


def total(axis: Axis) -> Extent | None:
    """Return the number of valid elements of a concatenation; None if it is none, or has no such form."""
    if not axis or len(axis) > 1 or not axis[0].parts:
        return None
    extents = [prefix(part) for part in axis[0].parts if is_free(part)]
    free = [e for e in extents if e is not None and (e.over, e.step) == (1, 1)]
    if len(free) < len(extents) or len({e.dimension for e in free}) != 1:
        return None
    more = sum(math.prod(factor.size for factor in part) for part in axis[0].parts if not is_free(part))
    return extent(free[0].dimension, sum(e.times for e in free), more + sum(e.plus for e in free))


@dataclass(frozen=True, slots=True)
class Along:
    """An axis with its factors."""

    axis: int
    factors: tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """Places along an axis: from `start`, `step` apart, moved into the axis where they are outside of it.

    If `out` is given, a step is `size / out`, rounded down at each place.
    """

    start: Extent  # the first place
    step: int  # the distance of two places
    size: Extent  # the number of valid elements of the axis
    # how places are moved: "edge", "reflect" or "wrap", as the modes of a pad; or "ends", for a table made for the
    # largest size: the last `start` places are those of its end
    mode: str = "edge"
    out: Extent | None = None  # the number of places at the size of a run; None if steps are whole

    def array(self, count: int, sizes: Sequence[int]) -> Array:
        """Return `count` places, for the sizes of all dimensions."""
        if self.mode == "ends":
            first, size = np.arange(count, dtype=np.int64), self.size.at(sizes)
            return np.minimum(np.where(first < size - self.start.at(sizes), first, first + count - size), count - 1)
        size, steps = self.size.at(sizes), np.arange(count, dtype=np.int64)
        steps = steps if self.out is None else steps * size // self.out.at(sizes)
        found = self.start.at(sizes) + self.step * steps
        if self.mode == "edge" or size < 2:
            return np.clip(found, 0, max(0, size - 1))
        if self.mode == "wrap":
            return found % size
        within = found % (2 * size - 2)
        return np.minimum(within, 2 * size - 2 - within)


@dataclass(frozen=True, slots=True)
class Table:
    """The elements of a constant along an axis, for each size of one dimension."""

    dimension: int  # the dimension
    low: int  # the smallest size
    rows: tuple[tuple[float, ...], ...]  # the elements at this size and at each larger one

    def array(self, count: int, sizes: Sequence[int]) -> Array:
        """Return `count` elements for the sizes of all dimensions; the last one is repeated."""
        row = np.array(self.rows[sizes[self.dimension] - self.low])
        return np.pad(row, (0, count - len(row)), "edge" if len(row) else "constant")


@dataclass(frozen=True, slots=True)
class Hidden:
    """An input of a masked graph that the user does not see."""

    name: str  # its name
    # "mask": 1 for the valid elements along axes, else 0. "end": 1 for the element that `offset` valid ones follow,
    # else 0. "number": coefficient · (product of the extents) ^ power. "sizes": the sizes of all dimensions. "places":
    # places along an axis of another value. "table": listed elements. "order": the places of the valid elements along
    # the axis, and then zeros.
    kind: str
    factors: tuple[Factor, ...]  # the factors of `axis`; for a "number", the factors whose extents are multiplied
    rank: int  # the number of axes; most have size 1
    axis: int = 0  # the axis with these factors
    dtype: str = "f32"  # the element type
    offset: int = 0  # for an "end": how many valid elements follow
    coefficient: float = 0.0  # for a "number"
    power: float = 1.0  # for a "number"
    others: tuple[Along, ...] = ()  # for a "mask", further axes with their factors
    places: Places | None = None  # for "places"
    table: Table | None = None  # for a "table"

    @property
    def axes(self) -> dict[int, tuple[Factor, ...]]:
        """The axes along which its elements differ, in order, with their factors."""
        own = () if self.kind == "number" else (Along(self.axis, self.factors), *self.others)
        return {along.axis: along.factors for along in sorted(own, key=lambda along: along.axis)}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input in the masked graph."""
        return tuple(math.prod(factor.size for factor in axis) for axis in self.form)

    @property
    def form(self) -> tuple[tuple[Factor, ...], ...]:
        """How its axes depend on the dimensions."""
        axes = self.axes
        return tuple(axes.get(i, ()) for i in range(self.rank))

    def array(self, sizes: Sequence[int]) -> Array:
        """Return its elements for the sizes of all dimensions."""
        if self.kind == "sizes":
            return np.array(sizes, np.int64)
        if self.places is not None:
            return self.places.array(self.factors[0].size, sizes)
        if self.kind == "order":
            places = np.flatnonzero(valid(self.factors, sizes))
            return np.pad(places, (0, self.shape[0] - len(places)))
        if self.table is not None:
            row = self.table.array(math.prod(self.shape), sizes)
            return row.astype(DType(self.dtype).numpy).reshape(self.shape)
        counts = [factor.at(sizes) for factor in self.factors]
        if self.kind == "number":
            number = self.coefficient * float(math.prod(counts)) ** self.power
            return np.full(self.shape, number).astype(DType(self.dtype).numpy)
        if self.kind == "mask":
            factors = [factor for axis in self.axes.values() for factor in axis]
            return valid(factors, sizes).astype(np.float32).reshape(self.shape)
        found = np.zeros([factor.size for factor in self.factors], np.float32)
        found[counts[0] - 1 - self.offset] = 1
        return found.reshape(self.shape)


SIZES = "range sizes"
"""The name of the hidden input with the sizes."""


def sizes_input(dimensions: int) -> Hidden:
    """Return the hidden input with the sizes, which kernels read to leave out elements that are not needed."""
    return Hidden("", "sizes", (Factor(dimensions),), 1, dtype="i64")
