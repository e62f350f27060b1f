"""A primitive in all samples, with its operands: the argument of the rules in `free.py`."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from korch.errors import UnsupportedError
from korch.primitive.op import Array, Attributes
from korch.primitive.types import DType
from korch.ranges.form import Axis, Extent, Factor, Sizes, Table, axis_of, is_free, prefix, total
from korch.ranges.lockstep import AmbiguousError, LockStep, Lockstep, Samples, refusal
from korch.ranges.mask import Fill, Masks, Value, plain

AnyAttributes = TypeVar("AnyAttributes", bound=Attributes)


def fixed(vector: Sizes) -> bool:
    """Return whether a size is the same in all samples."""
    return len(set(vector)) == 1


def fit(samples: Samples, vector: Sizes, known: Iterable[Extent]) -> tuple[Factor, ...] | None:
    """Return factors whose product is the size of an axis in all samples; None if there are none.

    `known`: extents that may be among the factors.
    """
    if fixed(vector):
        return axis_of([Factor(vector[0])])
    extents = {extent: tuple(map(extent.at, samples.sizes)) for extent in known}
    for extent, sizes in extents.items():
        ratios = {(n % m if m else 1, n // m if m else 0) for n, m in zip(vector, sizes, strict=True)}
        if len(ratios) == 1 and (ratio := ratios.pop())[0] == 0:
            return axis_of([Factor(sizes[0], extent), Factor(ratio[1])])
    for outer, sizes in extents.items():
        for inner, others in extents.items():
            if outer.dimension < inner.dimension and all(
                n * m == size for n, m, size in zip(sizes, others, vector, strict=True)
            ):
                return axis_of([Factor(sizes[0], outer), Factor(others[0], inner)])
    return None


def tabulated(samples: Samples, arrays: Sequence[Array], what: UnsupportedError) -> Table:
    """Return a table of vectors that depend on the size of one dimension.

    `what`: the error if it depends on several dimensions.

    Raises:
        AmbiguousError: the samples do not have all sizes.
    """
    for d, dimension in enumerate(samples.dimensions):
        rows: dict[int, Array] = {}
        same = (
            np.array_equal(rows.setdefault(own[d], array), array)
            for own, array in zip(samples.sizes, arrays, strict=True)
        )
        if not all(same):
            continue
        if not rows.keys() >= set(range(dimension.low, samples.sizes[0][d] + 1)):
            raise AmbiguousError(what.what, what.where, what.expected, what.hint)
        low = min(rows)
        return Table(d, low, tuple(tuple(map(float, rows[n])) for n in range(low, low + len(rows))))
    raise what


class Site:
    """A primitive in all samples, with its operands in the masked graph.

    Attributes:
        step: the primitive.
        operands: the values that it reads; `mask` may replace them.
        known: extents that may be among the factors of an axis.
        inputs: per operand and axis, the size in each sample.
        output: per axis of the result, the size in each sample.
    """

    def __init__(
        self, lockstep: Lockstep, step: LockStep, operands: list[Value], masks: Masks, known: list[Extent]
    ) -> None:
        self.samples, self.step, self.operands, self.masks = lockstep.samples, step, operands, masks
        self.known = known
        self.inputs = [_shape_of(lockstep, step, k) for k in range(len(operands))]
        self.output = lockstep.shapes[step.output]

    @property
    def attributes(self) -> Attributes:
        """The attributes in the largest graph."""
        return self.step.attributes[0]

    def attributes_as(self, kind: type[AnyAttributes]) -> AnyAttributes:
        """Return the attributes in the largest graph, which must be of the given class."""
        if not isinstance(self.attributes, kind):
            raise AssertionError(self.attributes)
        return self.attributes

    def refusal(self, what: str) -> UnsupportedError:
        """Return the error that says why this primitive can't run for a range of sizes, and which axes are free."""
        forms = [value.form for value in self.operands]
        free = [f"{axis} of operand {k}" for k, form in enumerate(forms) for axis, a in enumerate(form) if is_free(a)]
        where = f" (free: axis {', axis '.join(free)})" if free else ""
        return refusal(self.samples, self.step.origin, f"{self.step.op}: {what}{where}")

    def ambiguous(self, what: str) -> AmbiguousError:
        """Return the error that says that more samples are needed."""
        found = self.refusal(what)
        return AmbiguousError(found.what, found.where, found.expected, found.hint)

    def same_attributes(self) -> None:
        """Raise an error if the attributes depend on the size."""
        if len(set(self.step.attributes)) > 1:
            raise self.refusal("its attributes depend on the size")

    def explained(self, extents: Sequence[Extent]) -> Extent | None:
        """Return the first of the extents that explain an axis's sizes in all samples; None if there are none.

        Raises:
            AmbiguousError: they differ at some size of the range.
        """
        if len(extents) > 1:
            dimension = self.samples.dimensions[number := extents[0].dimension]
            period = math.lcm(*(extent.over for extent in extents))  # they differ in each period or never
            for n in range(dimension.low, min(dimension.high, dimension.low + period) + 1):
                sizes = [n if i == number else 0 for i in range(number + 1)]
                if len({extent.at(sizes) for extent in extents}) > 1:
                    raise self.ambiguous("its number of elements does not follow from the sizes that are compared")
        return extents[0] if extents else None

    def multiple(self, factors: tuple[Factor, ...], count: int) -> Extent:
        """Return `count` times the number of valid elements of a free axis."""
        along = prefix(factors)
        if along is None:
            raise self.refusal("it reads an axis whose valid elements are not its first ones")
        found = along.repeated(count)
        if found is None:
            raise self.refusal(f"its axis has a size divided by {along.over}, which is multiplied by {count}")
        return found

    def quotient(self, factor: Factor, counts: Sizes) -> Extent | None:
        """Return the extent of `counts` if a free factor has a fixed multiple of it in all samples; else None."""
        whole, ratios = factor.extent, {divmod(n, m) for n, m in zip(self.vector(factor), counts, strict=True) if m}
        if whole is None or len(ratios) > 1 or not (times := ratios.pop()) > (1, 0) or times[1]:
            return None
        return whole.divided(times[0])

    def concrete(self, axis: Axis, vector: Sizes) -> tuple[Factor, ...]:
        """Return an axis's factors; if all elements along it are equal (None), any factors that match its size."""
        if axis is not None:
            return axis
        found = fit(self.samples, vector, self.known)
        if found is None:
            raise self.refusal(f"an axis has {' or '.join(map(str, vector))} elements, which no dimension explains")
        return found

    def join(self, first: Axis, second: Axis) -> Axis:
        """Return the factors of an axis that two operands share; raise an error if they conflict."""
        if first is None or second is None or first == second:
            return second if first is None else first
        if (same := prefix(first)) is not None and same == prefix(second):
            return min(first, second, key=len)
        raise self.refusal("its operands depend on the size in different ways along an axis")

    def factors(self, k: int, axis: int) -> tuple[Factor, ...]:
        """Return the factors of an operand's axis."""
        return self.concrete(self.operands[k].form[axis], self.inputs[k][axis])

    def mask(self, k: int, axes: Sequence[int], number: float, accepts_soft: bool = False) -> None:
        """Replace an operand by one that has a number beyond its valid elements along some axes."""
        value = self.operands[k]
        factors = {axis: self.factors(k, axis) for axis in axes}
        free = [axis for axis in axes if is_free(factors[axis])]
        if free:
            form = tuple(factors[i] if i in free else axis for i, axis in enumerate(value.form))
            value = Value(value.id, form, value.fills, value.part)
            self.operands[k] = self.masks.filled(value, free, number, accepts_soft)

    def order(self, k: int, axes: Iterable[int]) -> bool:
        """Put the valid elements of concatenations along some axes first; return whether there is one."""
        value = self.operands[k]
        for axis in axes:
            if (valid := total(value.form[axis])) is not None:
                value = self.masks.ordered(value, axis, valid)
        is_ordered = value is not self.operands[k]
        self.operands[k] = value
        return is_ordered

    def fill(self, k: int, axis: int) -> Fill | None:
        """Return what is known of the elements beyond an operand's valid ones along an axis."""
        return self.operands[k].fills[axis]

    def dtype(self, k: int) -> DType:
        """Return an operand's element type."""
        return self.masks.verbs.dtype(self.operands[k].id)

    def vector(self, factor: Factor) -> Sizes:
        """Return a factor's size in each sample."""
        return tuple(map(factor.at, self.samples.sizes))

    def check(self, form: Sequence[Axis]) -> None:
        """Raise an error if the factors do not give the result's sizes in all samples."""
        for axis, vector in zip(form, self.output, strict=True):
            if axis is None:
                continue
            sizes = tuple(math.prod(factor.at(sizes) for factor in axis) for sizes in self.samples.sizes)
            if sizes != vector:
                raise self.refusal(
                    f"its result has {' or '.join(map(str, vector))} elements along an axis, not {sizes}"
                )


def _shape_of(lockstep: Lockstep, step: LockStep, k: int) -> tuple[Sizes, ...]:
    operand = step.operands[k]
    if operand.constants:
        return tuple(zip(*(constant.type.shape for constant in operand.constants), strict=True))
    return lockstep.shapes[operand.value]


def result_of(site: Site, form: Sequence[Axis], fills: Sequence[Fill | None] = ()) -> Value:
    """Add the primitive to the masked graph and return its value."""
    site.check(form)
    verbs = site.masks.verbs
    id_ = verbs.add(site.step.op, *(value.id for value in site.operands), attributes=site.attributes)
    return plain(id_, tuple(form), fills)
