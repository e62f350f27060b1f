"""Steps that order: rows by the number of a group that each chooses at run time, and the elements of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sort:
    """The rows of each group in blocks, which have rows of one group only.

    A key less than 0 counts from the end; others are clipped to the groups. Within a group, rows keep their order.

    Attributes:
        keys: the buffer with the group of each row, integers.
        rows: how many rows there are.
        groups: how many groups.
        block: the rows of a block.
        order: the buffer with the row at each place of each block, -1 for none.
        group: the buffer with the group of each block, -1 for one without rows.
        count: the buffer with the number of rows of each block.
    """

    keys: str
    rows: int
    groups: int
    block: int
    order: str
    group: str
    count: str

    @property
    def blocks(self) -> int:
        """The most blocks that any keys need: as many groups as possible have a block that is not full."""
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
    """The largest or smallest elements of each row, and their places, in order; one task for each row.

    Equal elements keep their order, and NaN is greater than all numbers.

    Attributes:
        source: the buffer with the rows.
        rows: how many there are.
        size: the elements of a row.
        count: how many of them are taken.
        is_largest: whether these are the largest.
        values: the buffer of the elements, "" for none.
        places: the buffer of their places, integers of 64 bits, "" for none.
    """

    source: str
    rows: int
    size: int
    count: int
    is_largest: bool
    values: str
    places: str

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
"""What a stage may do instead of steps."""


def first_places(rows: NDArray[Any], count: int, is_largest: bool) -> NDArray[np.int64]:
    """Return the places of the largest or smallest elements of each row, in order."""
    if not is_largest:
        return np.argsort(rows, axis=1, kind="stable")[:, :count]
    backwards = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    return np.asarray(rows.shape[1] - 1 - backwards)[:, :count]
