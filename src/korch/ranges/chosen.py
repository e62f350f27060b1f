"""The rules of primitives that choose elements along axes: pads, slices and takes.

Where the chosen elements depend on the size in a way that one slice of the largest value can't express, as for the last
elements of a free axis, a reversed axis or a pad that reflects, indices that are computed before a run gather them.
"""

import math
from collections.abc import Sequence

import numpy as np

from korch.primitive.op import Array
from korch.primitive.ops.layout import PadAttributes, SliceAttributes, TakeAttributes
from korch.primitive.types import DType
from korch.ranges.form import Axis, Extent, Factor, Places, Sizes, Table, axis_of, is_free, prefix
from korch.ranges.mask import Fill, Value, plain
from korch.ranges.site import Site, fixed, result_of, tabulated


def pad(site: Site) -> Value:
    """Return the result of a pad."""
    site.same_attributes()
    attributes = site.attributes_as(PadAttributes)
    site.order(0, [axis for axis, (a, b) in enumerate(zip(attributes.before, attributes.after, strict=True)) if a or b])
    form: list[Axis] = []
    masked: list[int] = []
    gathered: list[int] = []
    for axis, (before, after) in enumerate(zip(attributes.before, attributes.after, strict=True)):
        factors = site.factors(0, axis) if before or after else ()
        if not (before or after):
            form.append(site.operands[0].form[axis])
        elif not is_free(factors):
            form.append(axis_of([Factor(site.output[axis][0])]))
        else:
            form.append((Factor(site.output[axis][0], site.multiple(factors, 1).then(before + after)),))
            if attributes.mode != "constant":
                gathered.append(axis)
            elif after:
                masked.append(axis)
    site.mask(0, masked, attributes.value)
    if not gathered:
        return result_of(site, form)
    site.check(form)
    left, right = list(attributes.before), list(attributes.after)
    value = site.operands[0]
    for axis in gathered:
        along = site.multiple(site.factors(0, axis), 1)
        places = Places(Extent(0, 0, -left[axis]), 1, along, attributes.mode)
        value = site.masks.gathered(value, axis, site.output[axis][0], places)
        left[axis] = right[axis] = 0
    return plain(site.masks.verbs.pad(value.id, left, right, attributes.mode, attributes.value), tuple(form))


def part(site: Site) -> Value:
    """Return the result of a slice."""
    found = [a for a in site.step.attributes if isinstance(a, SliceAttributes)]
    cut = [axis for axis, given in enumerate(site.inputs[0]) if tuple(a.size[axis] for a in found) != given]
    site.order(0, cut)
    value = site.operands[0]
    lasts: list[tuple[int, int]] = []
    moving: list[tuple[int, Places]] = []
    form: list[Axis] = []
    fills: list[Fill | None] = []
    for axis, given in enumerate(site.inputs[0]):
        start, size, step = (tuple(getattr(a, name)[axis] for a in found) for name in ("start", "size", "step"))
        is_whole = size == given and (set(step) == {1} or set(given) == {1})
        fills.append(value.fills[axis] if is_whole else None)
        if is_whole:
            form.append(value.form[axis])
            continue
        factors = site.factors(0, axis)
        if not is_free(factors):
            if not all(map(fixed, (start, size, step))):
                raise site.refusal("it takes a part of a fixed axis that depends on the size")
            form.append(axis_of([Factor(size[0])]))
            continue
        own = _part(site, factors, given, start, size, step)
        form.append(own[0])
        if isinstance(own[1], int):
            lasts.append((axis, own[1]))
        elif own[1] is not None:
            moving.append((axis, own[1]))
    return _sliced(site, form, fills, lasts, moving)


def _sliced(
    site: Site,
    form: list[Axis],
    fills: list[Fill | None],
    lasts: Sequence[tuple[int, int]],
    moving: Sequence[tuple[int, Places]],
) -> Value:
    if not (lasts or moving):
        return result_of(site, form, fills)
    site.check(form)
    verbs, attributes, value = site.masks.verbs, site.attributes_as(SliceAttributes), site.operands[0]
    start, size, step = (list(field) for field in (attributes.start, attributes.size, attributes.step))
    for axis, offset in lasts:
        value = plain(site.masks.only_last(value, axis, offset), _without(value.form, axis))
    for axis, places in moving:
        value = site.masks.gathered(value, axis, size[axis], places)
    for axis, _ in (*lasts, *moving):
        start[axis], step[axis] = 0, 1
    return plain(verbs.slice(value.id, start, size, step), tuple(form), fills)


def _without(form: Sequence[Axis], axis: int) -> tuple[Axis, ...]:
    return (*form[:axis], (), *form[axis + 1 :])


def _part(
    site: Site, factors: tuple[Factor, ...], given: Sizes, start: Sizes, size: Sizes, step: Sizes
) -> tuple[Axis, Places | int | None]:
    """Return the axis of a slice of a free axis, and how its elements are found.

    They are at the same places for all sizes (None); or one element, which a number of valid ones follow; or at places
    that depend on the size.
    """
    along = prefix(factors)
    if along is None or not fixed(step):
        raise site.refusal("it takes a part of an axis whose valid elements are not its first ones")
    behind = {n - 1 - s for n, s in zip(given, start, strict=True)}
    lowest = along.at([d.low for d in site.samples.dimensions])
    if fixed(size) and fixed(start):
        reached = start[0] + step[0] * (size[0] - 1)
    else:
        reached = -1
    if set(size) == {1} and not fixed(start) and len(behind) == 1:
        reached = min(behind)
    if reached >= lowest:
        raise site.refusal(f"it takes {size[0]} elements of a free axis, which has {lowest} at the smallest size")
    count = None if fixed(size) else _derived(site, along, size, "its number of elements")
    axis = axis_of([Factor(size[0], count)])
    if count is not None and count.at([d.low for d in site.samples.dimensions]) < 0:
        raise site.refusal(f"it drops more elements of a free axis than the {lowest} that the smallest size has")
    if fixed(start):
        return axis, None
    if set(size) == {1} and len(behind) == 1 and len(factors) == 1 and site.dtype(0) is not DType.BOOL:
        return axis, behind.pop()
    first = _derived(site, along, start, "its first element")
    if first.at([d.low for d in site.samples.dimensions]) < 0:
        raise site.refusal(f"it takes elements before a free axis, which has {lowest} at the smallest size")
    return axis, Places(first, step[0], along)


MOST_RATIO = 8
"""The greatest numerator and denominator of a quotient of sizes."""


def _derived(site: Site, along: Extent, vector: Sizes, what: str) -> Extent:
    """Return floor((p · along + d) / q), with the least q and p, that gives a number in all samples."""
    sizes = site.samples.sizes
    counts = tuple(map(along.at, sizes))
    ratios = [(p, q) for q in range(1, MOST_RATIO + 1) for p in range(1, MOST_RATIO + 1) if np.gcd(p, q) == 1]
    for p, q in ratios:
        most = along.repeated(p)
        fits = [range(q * m - p * n, q * m - p * n + q) for n, m in zip(counts, vector, strict=True)]
        extents = [most.then(d, q) for d in fits[0] if all(d in fit for fit in fits)] if most is not None else []
        if (found := site.explained(extents)) is not None:
            return found
    raise site.refusal(f"{what} does not follow from the size of a free axis")


def take(site: Site) -> Value:
    """Return the result of a choice of elements by constant indices."""
    attributes = site.attributes_as(TakeAttributes)
    value, axis = site.operands[0], attributes.axis
    factors = site.factors(0, axis)
    indices = [np.array(a.indices, np.int64) for a in site.step.attributes if isinstance(a, TakeAttributes)]
    if not is_free(factors):
        site.same_attributes()
        return _taken(site, value, axis, axis_of([Factor(len(attributes.indices))]))
    counts = {a.repeats if isinstance(a, TakeAttributes) else 0 for a in site.step.attributes}
    if len(counts) == 1 and 0 not in counts:
        result = _taken(site, value, axis, axis_of((*factors, Factor(counts.pop()))))
        return Value(result.id, result.form, value.fills)
    along = site.multiple(factors, 1)
    if len({tuple(own) for own in indices}) == 1:
        if max(attributes.indices, default=0) >= along.at([d.low for d in site.samples.dimensions]):
            raise site.refusal("it takes elements of a free axis that it does not have at the smallest size")
        return _taken(site, value, axis, axis_of([Factor(len(attributes.indices))]))
    given, size = site.inputs[0][axis], len(attributes.indices)
    if all(np.array_equal(own, np.arange(len(own)) % n) for own, n in zip(indices, given, strict=True)):
        count = site.multiple(factors, size // given[0])
        return _gathered(site, axis, (Factor(size, count),), Places(Extent(0, 0, 0), 1, along, "wrap"))
    if all(np.array_equal(own, np.arange(len(own)) * n // len(own)) for own, n in zip(indices, given, strict=True)):
        own = site.concrete(None, tuple(map(len, indices)))
        count = prefix(own) or Extent(0, 0, size)
        return _gathered(site, axis, own, Places(Extent(0, 0, 0), 1, along, out=count))
    if all(_is_clipped(own, indices[0], n) for own, n in zip(indices, given, strict=True)):
        count = _derived(site, along, tuple(map(len, indices)), "its number of elements")
        return _taken(site, site.masks.extended(value, axis), axis, (Factor(size, count),))
    table = tabulated(site.samples, indices, site.refusal("the elements that it takes depend on the size"))
    return _gathered(site, axis, site.concrete(None, tuple(map(len, indices))), table)


def _gathered(site: Site, axis: int, own: tuple[Factor, ...], places: Places | Table) -> Value:
    """Return the elements of the operand at places that depend on the size."""
    value = site.operands[0]
    form = [own if i == axis else a for i, a in enumerate(value.form)]
    site.check(form)
    size = math.prod(factor.size for factor in own)
    return plain(site.masks.gathered(value, axis, size, places).id, tuple(form))


def _is_clipped(indices: Array, largest: Array, size: int) -> bool:
    """Return whether indices are the first ones of the largest size, or the last element instead of larger ones."""
    return np.array_equal(indices, np.minimum(largest[: len(indices)], size - 1))


def _taken(site: Site, value: Value, axis: int, own: Axis) -> Value:
    """Return the result of a take whose indices are those of the largest size."""
    site.operands[0] = value
    form = [own if i == axis else a for i, a in enumerate(value.form)]
    return result_of(site, form, [None if i == axis else fill for i, fill in enumerate(value.fills)])
