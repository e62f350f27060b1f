"""The step that sorts rows by the number of a group, for products whose rows choose a matrix at run time."""

from __future__ import annotations

from dataclasses import dataclass


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
    def text(self) -> str:
        """Its line in the text form of programs."""
        sizes = f"{self.rows} rows of {self.keys} in {self.groups} groups by {self.block}"
        return f"sort {sizes} to {self.order}, {self.group}, {self.count}"
