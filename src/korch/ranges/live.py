"""Extents of which a size of the range needs only the first elements.

A kernel for a range is built from types whose extents are the largest ones, so that places and strides in memory stay
the same for all sizes. An extent of which a smaller size needs less is a `Live`: a number, the largest extent, that
knows how many elements are needed. Schedules make loops of extents, cut them into blocks and flatten them with the
functions of this module, which keep that knowledge; any other arithmetic gives a plain number, hence a loop over all
elements, which is always right. Loops over a `Live` then end at a parameter of the program
(`korch.tile.ir.parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from korch.ranges.form import Extent, Rows
from korch.system.alignment import ceil_div, round_up


@dataclass(frozen=True, slots=True)
class Count:
    """The number of needed elements: the maximum of some extents, which depend on the same dimension."""

    extents: tuple[Extent, ...] = (Extent(0),)  # the extents
    step: int = 1  # the maximum is rounded up to a multiple of this
    times: int = 1  # the result is multiplied by this
    # for rows that combine two axes: the count of the outer one, and the largest number along the inner one
    rows: tuple[Count, int] | None = None

    @classmethod
    def of(cls, extents: Collection[Extent], step: int = 1) -> Count | None:
        """Return the maximum of some extents; None if they depend on several dimensions, or on none."""
        if len({extent.dimension for extent in extents if extent.times}) != 1:
            return None
        (dimension,) = {extent.dimension for extent in extents if extent.times}
        own = {replace(extent, dimension=dimension) for extent in extents}
        return cls(tuple(sorted(own, key=str)), step)

    @property
    def dimension(self) -> int:
        """The dimension on which the count depends; for rows, the inner one's."""
        return self.extents[0].dimension

    def at(self, sizes: Sequence[int]) -> int:
        """Return the count for the sizes of all dimensions."""
        found = self.times * round_up(max(extent.at(sizes) for extent in self.extents), self.step)
        return found if self.rows is None else self.rows[0].at(sizes) * min(self.rows[1], found)

    def affine(self, times: int, plus: int = 0) -> Count | None:
        """Return times * count + plus; None if it has no such form."""
        if plus == 0:
            return replace(self, times=self.times * times, rows=self.rows and (self.rows[0], self.rows[1] * times))
        repeated = [extent.repeated(self.times * times) for extent in self.extents]
        own = tuple(extent.then(plus) for extent in repeated if extent is not None)
        is_sum = self.step == 1 and len(own) == len(self.extents) and self.rows is None
        return Count(own) if is_sum else None

    def divided(self, over: int) -> Count | None:
        """Return the count divided by a number, rounded up; None if it has no such form."""
        own = tuple(extent.then(over - 1, over) for extent in self.extents)
        return Count(own) if (self.step, self.times, self.rows) == (1, 1, None) else None

    @property
    def by_outer(self) -> Count | None:
        """For rows, their count if all elements along the inner axis are counted."""
        return self.rows[0].affine(self.rows[1]) if self.rows is not None else self


class Live(int):
    """An extent of which a size needs the first `count` elements; or their blocks of `over`: ceil(count / over).

    It equals the number. `limit` is the count at the largest size.
    """

    count: Count
    limit: int
    over: int

    def __new__(cls, limit: int, count: Count, over: int = 1) -> Live:
        """Return the extent that has `limit` elements, in blocks of `over`, at the largest size."""
        found = super().__new__(cls, ceil_div(limit, over))
        found.count, found.limit, found.over = count, int(limit), over
        return found


class Limit(Live):
    """An extent that a guard of a pass compares with; guards with other extents hold for all elements."""


def limit(extent: int) -> int:
    """Return an extent with which a guard is to compare."""
    return Limit(extent.limit, extent.count, extent.over) if isinstance(extent, Live) else extent


def live(most: int, extents: Collection[Extent | Rows]) -> int:
    """Return an extent of which as many elements are needed as the maximum of `extents`."""
    first = next(iter(extents), None)
    if isinstance(first, Rows) and len(extents) == 1:
        outer, inner = Count((first.outer,)), Count((first.inner,))
        return Live(most, replace(inner, rows=(outer, first.most)))
    count = Count.of(whole_groups(extents))
    return int(most) if count is None or most <= 1 else Live(most, count)


def whole_groups(extents: Collection[Extent | Rows]) -> frozenset[Extent]:
    """Return the extents that include all elements of the groups of rows; nothing if there are none."""
    found = {e.outer.repeated(e.most) if isinstance(e, Rows) else e for e in extents}
    return frozenset(e for e in found if e is not None) if None not in found else frozenset()


def count_of(extent: object) -> Count | None:
    """Return how many elements of an extent are needed; None if all are."""
    return extent.count if isinstance(extent, Live) else None


def blocks(extent: int, block: int) -> int:
    """Return the number of blocks of an extent: the extent divided by `block`, rounded up."""
    most = ceil_div(extent, block)
    return Live(extent.limit, extent.count, extent.over * block) if isinstance(extent, Live) and most > 1 else most


def affine(extent: int, times: int, plus: int = 0) -> int:
    """Return times * extent + plus."""
    most = times * extent + plus
    count = None
    if isinstance(extent, Live):
        whole = extent.count if extent.over == 1 else extent.count.divided(extent.over)
        count = whole and whole.affine(times, plus)
    return most if count is None else Live(most, count)


def rounded(extent: int, step: int) -> int:
    """Return an extent rounded up to a multiple of `step`."""
    most = round_up(extent, step)
    if not isinstance(extent, Live) or extent.over > 1 or extent.count.rows is not None or extent.count.times > 1:
        return most
    is_whole = all(own.step % step == 0 for own in extent.count.extents)
    return Live(most, extent.count if is_whole else replace(extent.count, step=math.lcm(extent.count.step, step)))


def flattened(extents: Sequence[int]) -> int:
    """Return the number of points of some axes, which are numbered with the last axis fastest."""
    first, *others = [extent for extent in extents if extent != 1] or [1]
    if not others or not isinstance(first, Live):
        return math.prod(extents) if others else first
    inner = flattened(others)
    is_row = isinstance(inner, Live) and inner.over == 1 and inner.count.rows is None
    if is_row and isinstance(inner, Live) and inner.count.dimension != first.count.dimension:
        return Live(math.prod(extents), replace(inner.count, rows=(first.count, int(inner))))
    return affine(first, int(inner))


def joined(first: int, second: int) -> int:
    """Return an extent that has the needed elements of two extents of the same number."""
    return first if count_of(first) == count_of(second) else int(first)


def rows_apart(extent: int) -> tuple[int, int] | None:
    """Return the extents of the two axes that rows combine; None for other extents."""
    if not isinstance(extent, Live) or extent.count.rows is None or extent.over > 1 or extent.count.times > 1:
        return None
    outer, most = extent.count.rows
    return Live(extent.limit // most, outer), Live(most, replace(extent.count, rows=None))
