"""Finds and writes dequantizations and quantizations in a graph.

A dequantization is (q - zero)*scale of integers q. A quantization is saturate(round(x / scale) + zero), or the least
integer for NaN. Fission writes both as elementwise primitives (`primitive/quantized.py`); rules treat each as one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from korch.equivalence.affine_chains import AxisConstant, axis_constant
from korch.equivalence.rule import View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.pattern import Found, Number, either, find_at, op
from korch.primitive.quantized import dequantize, quantize
from korch.primitive.types import NARROW, DType, ValueId, ValueType

NONE = AxisConstant(None, np.asarray(0.0))

_WIDENED = op("cast", "q")
_DEQUANTIZED = op("mul", either(_WIDENED, op("sub", _WIDENED, "zero")), "scale")
_LEVEL = op("round", op("div", "x", "scale"))
_UNSIGNED = op("max", either(_LEVEL, op("add", _LEVEL, "zero")), Number("low"))
_ANY = either(op("round", op("div", "x", "scale"), name="level"), op("add", _LEVEL, "zero", name="level"))
_SIGNED = op("where", op("less_equal", Number("low"), "level"), _ANY, Number("low"))
_QUANTIZED = {
    is_signed: op("cast", op("min", p, Number("high"))) for is_signed, p in ((False, _UNSIGNED), (True, _SIGNED))
}
"""The patterns of quantizations to unsigned and signed integers.

They differ because a cast turns NaN into 0, which is the least integer of unsigned types only.
"""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizationGrid:
    """The real numbers that integers represent: (q - zero)*scale."""

    scale: AxisConstant  # positive and finite, the same everywhere or along one axis
    zero: AxisConstant  # whole numbers
    dtype: DType  # the type of the integers

    @property
    def is_uniform(self) -> bool:
        """Whether scale and zero point are the same for all elements."""
        return self.scale.axis is None and self.zero.axis is None

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest integer."""
        info = np.iinfo(self.dtype.numpy)
        return int(info.min), int(info.max)

    def equals(self, other: QuantizationGrid) -> bool:
        """Return whether the same integers represent the same numbers in both grids."""
        return self.dtype is other.dtype and all(
            a.axis == b.axis and np.array_equal(a.vector, b.vector)
            for a, b in ((self.scale, other.scale), (self.zero, other.zero))
        )

    def level(self, number: float) -> int:
        """Return the integer to which a number is quantized on a uniform grid, in float32."""
        low, high = self.limits
        with np.errstate(all="ignore"):
            quotient = np.rint(np.float32(number) / np.float32(self.scale.vector)) + float(self.zero.vector)
        return low if np.isnan(quotient) else int(min(max(quotient, low), high))

    def number(self, level: int) -> float:
        """Return the number that an integer represents on a uniform grid, in float32."""
        return float(np.float32(level - float(self.zero.vector)) * np.float32(self.scale.vector))

    def unsigned(self) -> QuantizationGrid:
        """Return the unsigned grid on which this grid's signed bytes plus 128 represent the same numbers."""
        return QuantizationGrid(self.scale, AxisConstant(self.zero.axis, self.zero.vector + 128), DType.U8)

    def moved(self, axes: tuple[int | None, ...]) -> QuantizationGrid:
        """Return the grid after a permutation or insertion of axes: `axes[i]` is the new position of axis i."""
        scale, zero = (c if c.axis is None else AxisConstant(axes[c.axis], c.vector) for c in (self.scale, self.zero))
        return QuantizationGrid(scale, zero, self.dtype)


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A dequantization: integers and their grid; `root` is its last primitive."""

    root: Primitive
    q: int
    grid: QuantizationGrid = field(compare=False)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantization: real numbers and the grid to which they are rounded; `root` is its last primitive."""

    root: Primitive
    x: int
    grid: QuantizationGrid = field(compare=False)


def dequantized(view: View, value: int) -> Iterator[Dequantized]:
    """Yield each dequantization from integers of at most 16 bits that computes a value."""
    for root in view.producing(value, "mul"):
        found = dequantized_by(view, root)
        if found is not None:
            yield found


def dequantized_by(view: View, root: Primitive) -> Dequantized | None:
    """Return the dequantization whose last primitive is a multiplication, None if it is not one."""
    if view.type(root.output).dtype.is_float:
        for found in find_at(view, _DEQUANTIZED, root):
            q, grid = found.values["q"], _grid(view, found, view.type(found.values["q"]).dtype)
            if grid is not None:
                return Dequantized(root, q, grid)
    return None


def quantized_by(view: View, root: Primitive) -> Quantized | None:
    """Return the quantization whose last primitive is a cast to integers, None if it is not one."""
    dtype = view.type(root.output).dtype
    if dtype not in NARROW:
        return None
    info = np.iinfo(dtype.numpy)
    for found in find_at(view, _QUANTIZED[info.min < 0], root):
        grid = _grid(view, found, dtype)
        if grid is not None and (found.numbers["low"], found.numbers["high"]) == (info.min, info.max):
            return Quantized(root, found.values["x"], grid)
    return None


def _grid(view: View, found: Found, dtype: DType) -> QuantizationGrid | None:
    """Return the grid with the matched scale and zero point, None if they do not form a valid grid."""
    scale = axis_constant(view, found.values["scale"])
    zero = axis_constant(view, found.values["zero"]) if "zero" in found.values else NONE
    if dtype not in NARROW or scale is None or zero is None:
        return None
    is_scale = (np.isfinite(scale.vector) & (scale.vector > 0)).all()
    return (
        QuantizationGrid(scale, zero, dtype) if is_scale and np.array_equal(zero.vector, np.rint(zero.vector)) else None
    )


def write_dequantized(writer: Writer, q: int, grid: QuantizationGrid, dtype: DType) -> int:
    """Write (q - zero)*scale in a float type."""
    type_ = ValueType(writer.type(q).shape, dtype)
    return dequantize(writer.verbs, ValueId(q), *_write_grid(writer, grid, type_), dtype)


def write_quantized(writer: Writer, x: int, grid: QuantizationGrid) -> int:
    """Write saturate(round(x / scale) + zero) as integers; NaN becomes the least integer."""
    scale, zero = _write_grid(writer, grid, writer.type(x))
    return quantize(writer.verbs, ValueId(writer.add("div", (x, scale))), zero, grid.dtype)


def _write_grid(writer: Writer, grid: QuantizationGrid, type_: ValueType) -> tuple[ValueId, ValueId | None]:
    """Write the scale and the zero point of a grid in a type; None for a zero point of 0."""
    scale = ValueId(writer.along(grid.scale.vector, grid.scale.axis or 0, type_))
    if not np.any(grid.zero.vector):
        return scale, None
    return scale, ValueId(writer.along(grid.zero.vector, grid.zero.axis or 0, type_))
