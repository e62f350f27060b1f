"""Ordering steps: sort rows by a group number that is known at run time, or select the top elements of each row."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sort:
    """Sorts rows by group into blocks, each of which holds rows of one group only.

    A negative key counts from the last group; keys out of range are clipped. Within a group, rows keep their order.
    """

    keys: str  # the buffer with the group number of each row, integers
    rows: int  # the number of rows
    groups: int  # the number of groups
    block: int  # the capacity of a block in rows
    order: str  # the output buffer with the row number at each position of each block, -1 for none
    group: str  # the output buffer with the group of each block, -1 for a block without rows
    count: str  # the output buffer with the number of rows of each block

    @property
    def blocks(self) -> int:
        """The largest number of blocks that any keys need: when as many groups as possible have a partial block."""
        partial = min(self.rows, self.groups)
        return partial + (self.rows - partial) // self.block

    @property
    def written(self) -> dict[str, int]:
        """The buffers that it writes, with the number of their elements."""
        return {self.order: self.blocks * self.block, self.group: self.blocks, self.count: self.blocks}

    @property
    def read(self) -> tuple[str, int]:
        """The buffer that it reads, with the number of its elements."""
        return self.keys, self.rows

    @property
    def work(self) -> int:
        """How many elements it looks at."""
        return self.rows

    @property
    def text(self) -> str:
        """Its line in the text form of programs."""
        sizes = f"{self.rows} rows of {self.keys} in {self.groups} groups by {self.block}"
        return f"sort {sizes} to {self.order}, {self.group}, {self.count}"


@dataclass(frozen=True, slots=True)
class Top:
    """Selects the largest or smallest elements of each row, sorted, and their positions; one task per row.

    Equal elements keep their order, and NaN is greater than all numbers.
    """

    source: str  # the buffer with the rows
    rows: int  # the number of rows
    size: int  # the number of elements per row
    count: int  # how many elements of a row are selected
    is_largest: bool  # whether the largest are selected, else the smallest
    values: str  # the output buffer for the elements, "" for none
    places: str  # the output buffer for their positions in the row, 64-bit integers, "" for none

    @property
    def read(self) -> tuple[str, int]:
        """The buffer that it reads, with the number of its elements."""
        return self.source, self.rows * self.size

    @property
    def work(self) -> int:
        """How many elements it looks at."""
        return self.rows * self.size

    @property
    def written(self) -> dict[str, int]:
        """The buffers that it writes, with the number of their elements."""
        return {name: self.rows * self.count for name in (self.values, self.places) if name}

    @property
    def text(self) -> str:
        """Its line in the text form of programs."""
        which = "largest" if self.is_largest else "smallest"
        named = (("values", self.values), ("places", self.places))
        to = " ".join(f"{what} {name}" for what, name in named if name)
        return f"top {self.count} {which} of {self.size} in {self.rows} rows of {self.source} to {to}"


Ordering = Sort | Top
"""The operation of a stage that has no steps."""


def first_places(rows: NDArray[Any], count: int, is_largest: bool) -> NDArray[np.int64]:
    """Return the positions of the `count` largest or smallest elements of each row, in sorted order."""
    if not is_largest:
        return np.argsort(rows, axis=1, kind="stable")[:, :count]
    backwards = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    return np.asarray(rows.shape[1] - 1 - backwards)[:, :count]
