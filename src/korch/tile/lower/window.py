"""Splits a reduction over windows into one over columns, into a row in cache, and one along that row.

A window of 5 x 5 takes 25 steps for each element. If each column is reduced once for all windows that
share it (5 steps), and then five adjacent column results are reduced (5 steps), it takes 10. The row
holds the identity where windows extend beyond the border, so that no vector is partly filled there,
however short a row of the image is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.ops.reduce import PoolAttributes, identity, window_extent
from korch.primitive.types import DType
from korch.tile.ir.index import ZERO, Expr, add, constant, scale, var
from korch.tile.ir.program import Accumulate, Axis, Literal, Load, Pass, Store

ROW_ELEMENTS = 8192
"""The maximum elements of the rows of a task: they fit in the L1 cache together with the data they are made from."""

SHORT_ROW = 8
"""Rows of fewer vectors than this consist mostly of edges, where windows extend beyond the border."""

COLUMN, TAP = "c", "r"
"""The loops over the columns that are reduced, and over the taps of a window along the row."""


@dataclass(frozen=True, slots=True)
class WindowRow:
    """The positions of the windows of the last axis in a row with its borders."""

    loop: str  # the loop over the windows
    inner: str  # the loop along which vectors run
    windows: int  # the number of windows
    taps: int  # elements per window
    stride: int  # the distance between windows
    dilation: int  # the distance between taps
    begin: int  # elements of the border before the first column
    columns: int  # the number of image elements in the row

    @property
    def size(self) -> int:
        """The elements of a row, including borders."""
        return (self.windows - 1) * self.stride + window_extent(self.taps, self.dilation)

    @property
    def has_border(self) -> bool:
        """Whether any window extends beyond the border of the image."""
        return self.columns < self.size

    def column(self, column: Expr) -> Expr:
        """Return the position in the row of a column of the image."""
        return add(column, constant(self.begin))

    def tap(self, window: Expr, tap: Expr) -> Expr:
        """Return the position in the row of a tap of a window."""
        return add(scale(window, self.stride), scale(tap, self.dilation))


def row_of(attributes: PoolAttributes, loop: str, inner: str, windows: int, columns: int) -> WindowRow | None:
    """Return the row of the last axis of windows; None if the windows can't be reduced in rows.

    `columns`: the elements of a row of the image.
    """
    taps, begin = attributes.kernel[-1], attributes.pads_begin[-1]
    if taps == 1 or windows == 1 or begin < 0:
        return None
    steps = attributes.strides[-1], attributes.dilations[-1]
    row = WindowRow(loop, inner, windows, taps, *steps, begin, columns)
    row = dataclasses.replace(row, columns=min(columns, row.size - begin))
    return row if row.columns > 0 else None


def pays(attributes: PoolAttributes, row: WindowRow, lanes: int) -> bool:
    """Return whether reducing columns and then rows is faster than reducing whole windows.

    `lanes`: elements of a vector.
    """
    others = math.prod(attributes.kernel[:-1])
    is_cut = row.loop == row.inner and row.has_border and row.windows < SHORT_ROW * lanes
    return is_cut or others * row.taps >= 2 * (others + row.taps)


@dataclass(frozen=True, slots=True)
class RowTile:
    """The tile that holds the rows of a task, with its stride along each axis."""

    buffer: str
    strides: Mapping[str, int]
    size: int

    def at(self, parts: Mapping[str, Expr]) -> Expr:
        """Return the index of the element at the given position along each axis."""
        return add(ZERO, *(scale(parts[name], s) for name, s in self.strides.items()))


def place_rows(buffer: str, axes: Sequence[Axis], address: Expr, row: WindowRow) -> RowTile:
    """Return the tile of the rows: its axes are in the order of the output's, with the vector axis innermost."""

    def key(axis: Axis) -> tuple[bool, float]:
        return axis.name != row.inner, address.coefficient(axis.name) or math.inf

    strides, size = {}, 1
    for axis in sorted(axes, key=key):
        strides[axis.name] = size
        size *= row.size if axis.name == row.loop else axis.extent
    return RowTile(buffer, strides, size)


def border_pass(place: RowTile, op: str, dtype: DType) -> Pass:
    """Return the pass that fills a tile with the identity."""
    fill = Literal("x0", dtype, identity(op, dtype))
    return Pass((Axis("f", place.size),), "", (fill,), (Store(place.buffer, var("f"), "x0"),))


def row_pass(place: RowTile, row: WindowRow, axes: Sequence[Axis], sink: Accumulate, dtype: DType) -> Pass:
    """Return the pass that reduces the windows of the last axis.

    `row`: the positions of the windows in a row. `sink`: the accumulator of the results; the name of its value must be
    x0.
    """
    parts = {axis.name: var(axis.name) for axis in axes}
    parts[row.loop] = row.tap(parts[row.loop], var(TAP))
    load = Load("x0", dtype, place.buffer, place.at(parts))
    return Pass((*axes, Axis(TAP, row.taps, True)), "", (load,), (sink,))
