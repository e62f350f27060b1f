"""What dequantizations and quantizations stand in a graph.

A dequantization is (q - zero)*scale of integers q, a quantization saturate(round(x / scale) + zero); fission writes
both from elementwise primitives (`primitive/quantized.py`). Rules read them here as one step each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.affine import AxisConstant, axis_constant
from korch.equivalence.rule import View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.types import NARROW, DType, ValueType

NONE = AxisConstant(None, np.asarray(0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The real numbers that integers stand for: (q - zero)*scale.

    Attributes:
        scale: positive and finite, the same everywhere or along one axis.
        zero: whole numbers.
        dtype: of the integers.
    """

    scale: AxisConstant
    zero: AxisConstant
    dtype: DType

    @property
    def is_uniform(self) -> bool:
        """Whether scale and zero point are the same for all elements."""
        return self.scale.axis is None and self.zero.axis is None

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest integer."""
        info = np.iinfo(self.dtype.numpy)
        return int(info.min), int(info.max)

    def equals(self, other: Grid) -> bool:
        """Return whether the same integers stand for the same numbers."""
        return self.dtype is other.dtype and all(
            a.axis == b.axis and np.array_equal(a.vector, b.vector)
            for a, b in ((self.scale, other.scale), (self.zero, other.zero))
        )

    def level(self, number: float) -> int:
        """Return the integer that a number becomes on a uniform grid, in float32."""
        low, high = self.limits
        with np.errstate(all="ignore"):
            quotient = np.rint(np.float32(number) / np.float32(self.scale.vector)) + float(self.zero.vector)
        return low if np.isnan(quotient) else int(min(max(quotient, low), high))

    def number(self, level: int) -> float:
        """Return the number that an integer stands for on a uniform grid, in float32."""
        return float(np.float32(level - float(self.zero.vector)) * np.float32(self.scale.vector))

    def moved(self, axes: tuple[int | None, ...]) -> Grid:
        """Return the grid after axes moved: `axes[i]` is the new place of axis i."""
        scale, zero = (c if c.axis is None else AxisConstant(axes[c.axis], c.vector) for c in (self.scale, self.zero))
        return Grid(scale, zero, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Dequantized:
    """Integers and what they stand for; `root` is the last primitive."""

    root: Primitive
    q: int
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Real numbers and the grid to which they are rounded; `root` is the last primitive."""

    root: Primitive
    x: int
    grid: Grid


def dequantized(view: View, value: int) -> Iterator[Dequantized]:
    """Yield each way in which a value is dequantized from integers of at most 16 bits."""
    for root in view.producing(value, "mul"):
        found = dequantized_by(view, root)
        if found is not None:
            yield found


def dequantized_by(view: View, root: Primitive) -> Dequantized | None:
    """Return what a multiplication dequantizes, None if it does not."""
    if not view.type(root.output).dtype.is_float:
        return None
    for data, factor in (root.inputs, root.inputs[::-1]):
        scale = axis_constant(view, factor)
        if scale is None or not _is_scale(scale.vector):
            continue
        found = _integers(view, data)
        if found is not None:
            q, zero = found
            return Dequantized(root, q, Grid(scale, zero, view.type(q).dtype))
    return None


def _is_scale(vector: Array) -> bool:
    return bool((np.isfinite(vector) & (vector > 0)).all())


def _integers(view: View, value: int) -> tuple[int, AxisConstant] | None:
    """Return the integers of a value that is integers minus a zero point, and the zero point."""
    for cast in view.producing(value, "cast"):
        if _is_small(view.type(cast.inputs[0]).dtype):
            return cast.inputs[0], NONE
    for sub in view.producing(value, "sub"):
        zero = axis_constant(view, sub.inputs[1])
        if zero is None or not np.array_equal(zero.vector, np.rint(zero.vector)):
            continue
        for cast in view.producing(sub.inputs[0], "cast"):
            if _is_small(view.type(cast.inputs[0]).dtype):
                return cast.inputs[0], zero
    return None


def _is_small(dtype: DType) -> bool:
    return dtype in NARROW


def quantized_by(view: View, root: Primitive) -> Quantized | None:
    """Return what a cast to integers quantizes, None if it does not."""
    dtype = view.type(root.output).dtype
    if root.op != "cast" or not _is_small(dtype):
        return None
    limits = np.iinfo(dtype.numpy)
    for low in view.producing(root.inputs[0], "min"):
        if view.number(low.inputs[1]) != limits.max:
            continue
        for high in view.producing(low.inputs[0], "max"):
            if view.number(high.inputs[1]) == limits.min:
                found = _rounded(view, high.inputs[0])
                if found is not None:
                    x, scale, zero = found
                    return Quantized(root, x, Grid(scale, zero, dtype))
    return None


def _rounded(view: View, value: int) -> tuple[int, AxisConstant, AxisConstant] | None:
    """Return x, scale and zero point of round(x / scale) + zero."""
    sources: list[tuple[int, AxisConstant]] = [(value, NONE)]
    for add in view.producing(value, "add"):
        zero = axis_constant(view, add.inputs[1])
        if zero is not None:
            sources.append((add.inputs[0], zero))
    for source, zero in sources:
        for rounding in view.producing(source, "round"):
            for division in view.producing(rounding.inputs[0], "div"):
                scale = axis_constant(view, division.inputs[1])
                if scale is not None and _is_scale(scale.vector):
                    return division.inputs[0], scale, zero
    return None


def write_dequantized(writer: Writer, q: int, grid: Grid, dtype: DType) -> int:
    """Write (q - zero)*scale in a float type."""
    type_ = ValueType(writer.type(q).shape, dtype)
    value = writer.add("cast", (q,), CastAttributes(dtype.value))
    if np.any(grid.zero.vector):
        value = writer.add("sub", (value, writer.along(grid.zero.vector, grid.zero.axis or 0, type_)))
    return writer.add("mul", (value, writer.along(grid.scale.vector, grid.scale.axis or 0, type_)))


def write_quantized(writer: Writer, x: int, grid: Grid) -> int:
    """Write saturate(round(x / scale) + zero) as integers."""
    type_ = writer.type(x)

    def number(value: float) -> int:
        return writer.along(np.asarray(value), 0, type_)

    value = writer.add("div", (x, writer.along(grid.scale.vector, grid.scale.axis or 0, type_)))
    value = writer.add("round", (value,))
    if np.any(grid.zero.vector):
        value = writer.add("add", (value, writer.along(grid.zero.vector, grid.zero.axis or 0, type_)))
    low, high = grid.limits
    value = writer.add("min", (writer.add("max", (value, number(low))), number(high)))
    return writer.add("cast", (value,), CastAttributes(grid.dtype.value))
