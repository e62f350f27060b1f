"""The mapping from the programs of a GPU launch, in launch order, to the grid points of a stage they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from korch.primitive.op import Array
from korch.tile.ir.program import Stage


@dataclass(frozen=True)
class ProgramOrder:
    """Which grid points of a stage each program of a launch computes.

    The grid points are cut into tiles, which are numbered along the axes; each program computes consecutive tiles.

    Attributes:
        stage: the stage. If it is printed as a loop nest, its grid consists of all its loops.
        axes: the grid axes in the order in which tiles are numbered, outermost first.
        sides: by axis, the size of a tile along it; 1 for axes that are missing here.
        run: the number of tiles per program.
        band: the size of a band: within each band of this many values of the second last axis, that axis is numbered
            innermost. 1 for no bands.
    """

    stage: Stage
    axes: tuple[str, ...]
    sides: Mapping[str, int] = field(default_factory=dict)
    run: int = 1
    band: int = 1

    def points(self) -> list[Array]:
        """Return, for each program, its grid points as linear indices into the grid."""
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
