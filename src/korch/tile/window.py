"""A reduction over windows -> one over columns into a row kept close, then one along the row.

A window of 5 x 5 takes 25 steps for each element; its columns, reduced once for all windows that
share them, and five of these side by side take 10. The row holds the identity where windows hang
over the border, so that no vector is cut there, however short the row of an image is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.ops.reduce import PoolAttributes, window_extent
from korch.primitive.types import DType
from korch.tile.identity import identity
from korch.tile.index import ZERO, Expr, add, constant, scale, var
from korch.tile.program import Accumulate, Axis, Literal, Load, Pass, Store

ROW_ELEMENTS = 8192
"""Rows that are kept close stay in the first cache beside what they are made from."""

SHORT_ROW = 8
"""Rows of fewer vectors are mostly edges where windows hang over the border."""

COLUMN, TAP = "c", "r"
"""The loops over the columns that are reduced, and along a row."""


@dataclass(frozen=True, slots=True)
class WindowRow:
    """How the windows of the last axis lie in a row with its borders.

    Attributes:
        loop: the loop over them.
        inner: the loop along which vectors lie.
        windows: how many there are.
        taps: elements of each.
        stride: steps between windows.
        dilation: steps between taps.
        begin: elements of the border before the first column.
        columns: elements of the image.
    """

    loop: str
    inner: str
    windows: int
    taps: int
    stride: int
    dilation: int
    begin: int
    columns: int

    @property
    def size(self) -> int:
        """Elements of a row, with borders."""
        return (self.windows - 1) * self.stride + window_extent(self.taps, self.dilation)

    @property
    def has_border(self) -> bool:
        """Whether any window hangs over."""
        return self.columns < self.size

    def column(self, column: Expr) -> Expr:
        """Return where in the row a column of the image lies."""
        return add(column, constant(self.begin))

    def tap(self, window: Expr, tap: Expr) -> Expr:
        """Return where in the row a tap of a window lies."""
        return add(scale(window, self.stride), scale(tap, self.dilation))


def row_of(attributes: PoolAttributes, loop: str, inner: str, windows: int, columns: int) -> WindowRow | None:
    """Return the row of the last axis of windows; None if there is none.

    Args:
        attributes: the windows.
        loop: the loop over those of a row.
        inner: the loop along which vectors lie.
        windows: how many a row has.
        columns: elements of a row of the image.
    """
    taps, begin = attributes.kernel[-1], attributes.pads_begin[-1]
    if taps == 1 or windows == 1 or begin < 0:
        return None
    steps = attributes.strides[-1], attributes.dilations[-1]
    row = WindowRow(loop, inner, windows, taps, *steps, begin, columns)
    row = dataclasses.replace(row, columns=min(columns, row.size - begin))
    return row if row.columns > 0 else None


def pays(attributes: PoolAttributes, row: WindowRow, lanes: int) -> bool:
    """Return whether columns and rows take less time than whole windows.

    Args:
        attributes: the windows.
        row: what `row_of` returned.
        lanes: elements of a vector.
    """
    others = math.prod(attributes.kernel[:-1])
    is_cut = row.loop == row.inner and row.has_border and row.windows < SHORT_ROW * lanes
    return is_cut or others * row.taps >= 2 * (others + row.taps)


@dataclass(frozen=True, slots=True)
class RowTile:
    """The tile that holds the rows of a task: a stride for each of its axes."""

    buffer: str
    strides: Mapping[str, int]
    size: int

    def at(self, parts: Mapping[str, Expr]) -> Expr:
        """Return the element at an expression per axis."""
        return add(ZERO, *(scale(parts[name], s) for name, s in self.strides.items()))


def place_rows(buffer: str, axes: Sequence[Axis], address: Expr, row: WindowRow) -> RowTile:
    """Return where the rows lie: with their axes in the order of the output's, vectors innermost.

    Args:
        buffer: the tile's name.
        axes: the loops over a task's part of the output.
        address: where an element of the output lies.
        row: the row.
    """

    def key(axis: Axis) -> tuple[bool, float]:
        return axis.name != row.inner, address.coefficient(axis.name) or math.inf

    strides, size = {}, 1
    for axis in sorted(axes, key=key):
        strides[axis.name] = size
        size *= row.size if axis.name == row.loop else axis.extent
    return RowTile(buffer, strides, size)


def border_pass(place: RowTile, op: str, dtype: DType) -> Pass:
    """Return the pass that writes the identity into all of a tile."""
    fill = Literal("x0", dtype, identity(op, dtype))
    return Pass((Axis("f", place.size),), "", (fill,), (Store(place.buffer, var("f"), "x0"),))


def row_pass(place: RowTile, row: WindowRow, axes: Sequence[Axis], sink: Accumulate, dtype: DType) -> Pass:
    """Return the pass that reduces the windows of the last axis.

    Args:
        place: where the rows lie.
        row: how windows lie in them.
        axes: the loops over a task's part of the output.
        sink: where results go; its value is to be named x0.
        dtype: the type of all.
    """
    parts = {axis.name: var(axis.name) for axis in axes}
    parts[row.loop] = row.tap(parts[row.loop], var(TAP))
    load = Load("x0", dtype, place.buffer, place.at(parts))
    return Pass((*axes, Axis(TAP, row.taps, True)), "", (load,), (sink,))
