"""How a launch counts its programs -> which grid points of its stage each of them computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from korch.primitive.op import Array
from korch.tile.program import Stage


@dataclass(frozen=True)
class ProgramOrder:
    """Which grid points of a stage each program of a launch computes.

    The points are cut into tiles, which are counted along the axes; a program has consecutive tiles.

    Attributes:
        stage: the stage. One that is printed as a loop nest has all its loops as a grid.
        axes: of the grid, in the order in which tiles are counted, outermost first.
        sides: by axis, the values that a tile has along it; 1 where there is none.
        run: tiles of a program.
        band: the values of the last axis but one that are counted innermost, a band of them at a time; 1 for none.
    """

    stage: Stage
    axes: tuple[str, ...]
    sides: Mapping[str, int] = field(default_factory=dict)
    run: int = 1
    band: int = 1

    def points(self) -> list[Array]:
        """Return the numbers of the grid points of each program, counted along the grid."""
        extents = {axis.name: axis.extent for axis in self.stage.grid}
        count = math.prod(extents.values())
        at = dict(zip(extents, np.unravel_index(np.arange(count), tuple(extents.values())), strict=True))
        number = np.zeros(count, np.int64)
        for name in self.axes:
            side = self.sides.get(name, 1)
            number = number * -(-extents[name] // side) + at[name] // side
        if self.band > 1:
            rows, columns = self.axes[-2:]
            first = at[rows] // self.band * self.band
            height = np.minimum(extents[rows] - first, self.band)
            inner = at[rows] * extents[columns] + at[columns]
            number += first * extents[columns] + at[columns] * height + at[rows] - first - inner
        number //= self.run
        order = np.argsort(number, kind="stable")
        return np.split(order, np.searchsorted(number[order], np.arange(1, number.max(initial=0) + 1)))
