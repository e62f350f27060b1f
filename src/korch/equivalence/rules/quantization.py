"""Rules that move, merge and cancel quantizations, so that chains of operators compute in bytes.

A primitive that only moves or compares elements can do the same to the integers that represent them, because
(q - zero)*scale increases with q and depends on nothing else. An integer that is dequantized and quantized again on the
same grid is unchanged: the relative error of the quotient is at most 2^-22, and integers have at most 16 bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from korch.equivalence.quantization import (
    Dequantized,
    QuantizationGrid,
    Quantized,
    dequantized,
    dequantized_by,
    quantized_by,
    write_dequantized,
    write_quantized,
)
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.layout import ConcatAttributes, PadAttributes, TransposeAttributes
from korch.primitive.types import DType

MOVES = ("transpose", "reshape", "slice", "take", "pad", "concat", "broadcast")
LARGEST_OF = ("pool_max", "reduce_max", "reduce_min")


@dataclass(frozen=True, slots=True)
class QuantizedMoveMatch:
    """A primitive, and the dequantization of each of its inputs."""

    root: Primitive
    inner: tuple[Dequantized, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MoveWitness:
    """The primitive to apply to the integers, and the grid of the result."""

    root: Primitive
    inputs: tuple[int, ...]
    attributes: Attributes
    grid: QuantizationGrid


def _match_move(view: View, root: Primitive) -> Iterator[QuantizedMoveMatch]:
    if not view.type(root.output).dtype.is_float:
        return
    found = [next(dequantized(view, value), None) for value in root.inputs]
    inner = tuple(item for item in found if item is not None)
    if len(inner) == len(root.inputs):
        yield QuantizedMoveMatch(root, inner)


def _refuse_move(view: View, match: QuantizedMoveMatch) -> MoveWitness | RuleRefusal:
    root, found = match.root, match.inner
    first, attributes = found[0], root.attributes
    if any(not item.grid.equals(first.grid) for item in found[1:]):
        return RuleRefusal("the parts have different scales", root.output)
    grid = first.grid if first.grid.is_uniform else _moved_grid(view, root, first.grid)
    if grid is None:
        return RuleRefusal("the axis of the scale does not stay", root.output)
    if isinstance(attributes, PadAttributes) and attributes.mode == "constant":
        level = _exact_level(grid, attributes.value) if grid.is_uniform else None
        if level is None:
            return RuleRefusal("no integer stands for the pad", root.output)
        attributes = replace(attributes, value=float(level))
    return MoveWitness(root, tuple(item.q for item in found), attributes, grid)


def _exact_level(grid: QuantizationGrid, number: float) -> int | None:
    """Return the integer that represents a number exactly, None if there is none."""
    level = grid.level(number)
    return level if grid.number(level) == number else None


def _moved_grid(view: View, root: Primitive, grid: QuantizationGrid) -> QuantizationGrid | None:
    """Return the grid after a move, for a grid that varies along an axis; None if the move does not keep the axis."""
    old, new = view.shape(root.inputs[0]), view.shape(root.output)
    axes: list[int | None] = [None] * len(old)
    for axis, size in enumerate(old):
        match root.attributes:
            case TransposeAttributes(perm):
                axes[axis] = perm.index(axis)
            case _ if root.op == "reshape":
                before = math.prod(old[:axis])
                places = [i for i, n in enumerate(new) if n == size and math.prod(new[:i]) == before]
                axes[axis] = places[-1] if places else None
            case _ if root.op == "broadcast":
                axes[axis] = axis + len(new) - len(old)
            case _:
                pass
    if any(c.axis is not None and axes[c.axis] is None for c in (grid.scale, grid.zero)):
        return None
    return grid.moved(tuple(axes))


def _build_move(writer: Writer, witness: MoveWitness) -> int:
    moved = writer.add(witness.root.op, witness.inputs, witness.attributes)
    return write_dequantized(writer, moved, witness.grid, writer.type(witness.root.output).dtype)


MOVE_COMES_BEFORE_DEQUANTIZATION = Rule(
    name="move-comes-before-dequantization",
    law="move(s (q - z)) = s (move(q) - z)",
    source="an elementwise operation does not depend on where an element is",
    roots=MOVES,
    match=_match_move,
    refuse=_refuse_move,
    build=_build_move,
)


def _refuse_largest(view: View, match: QuantizedMoveMatch) -> MoveWitness | RuleRefusal:
    (found,) = match.inner
    if not found.grid.is_uniform:
        return RuleRefusal("compared elements have different scales", match.root.output)
    return MoveWitness(match.root, (found.q,), match.root.attributes, found.grid)


LARGEST_COMES_BEFORE_DEQUANTIZATION = Rule(
    name="largest-comes-before-dequantization",
    law="max(s (q - z)) = s (max(q) - z) over a window or axes, where s > 0",
    source="an increasing function keeps the order, also where it rounds",
    roots=LARGEST_OF,
    match=_match_move,
    refuse=_refuse_largest,
    build=_build_move,
)


@dataclass(frozen=True, slots=True)
class BoundMatch:
    """A maximum or minimum, and the dequantizations of its operands, of which one may be a number."""

    root: Primitive
    inner: tuple[Dequantized, ...]
    bound: float | None


@dataclass(frozen=True, slots=True, eq=False)
class BoundWitness:
    """The integers to compare: two values, or one value and `level`; one value alone if the bound has no effect."""

    root: Primitive
    inputs: tuple[int, ...]
    level: int | None
    grid: QuantizationGrid


def _match_bound(view: View, root: Primitive) -> Iterator[BoundMatch]:
    if not view.type(root.output).dtype.is_float:
        return
    for x, y in (root.inputs, root.inputs[::-1]):
        bound = view.number(y)
        if bound is not None:
            for found in itertools.islice(dequantized(view, x), 1):
                yield BoundMatch(root, (found,), bound)
    if all(view.number(value) is None for value in root.inputs):
        both = [next(dequantized(view, value), None) for value in root.inputs]
        if both[0] is not None and both[1] is not None:
            yield BoundMatch(root, (both[0], both[1]), None)


def _refuse_bound(view: View, match: BoundMatch) -> BoundWitness | RuleRefusal:
    root, found = match.root, match.inner
    grid = found[0].grid
    if match.bound is None:
        if not found[1].grid.equals(grid):
            return RuleRefusal("the operands have different scales", root.output)
        return BoundWitness(root, tuple(item.q for item in found), None, grid)
    if not grid.is_uniform:
        return RuleRefusal("the scale of the operand varies", root.output)
    end = grid.number(grid.limits[0 if root.op == "max" else 1])
    if (match.bound <= end) if root.op == "max" else (match.bound >= end):
        return BoundWitness(root, (found[0].q,), None, grid)
    level = _exact_level(grid, match.bound)
    if level is None:
        return RuleRefusal("no integer stands for the bound", root.output)
    return BoundWitness(root, (found[0].q,), level, grid)


def _build_bound(writer: Writer, witness: BoundWitness) -> int:
    q = witness.inputs[0]
    if witness.level is not None or len(witness.inputs) == 2:
        type_ = writer.type(q)
        other = witness.inputs[1] if witness.level is None else writer.verbs.full(witness.level, type_)
        q = writer.add(witness.root.op, (q, other))
    return write_dequantized(writer, q, witness.grid, writer.type(witness.root.output).dtype)


BOUND_COMES_BEFORE_DEQUANTIZATION = Rule(
    name="bound-comes-before-dequantization",
    law="max(s (q - z), s (p - z)) = s (max(q, p) - z), and so for min, where s > 0",
    source="an increasing function keeps the order, also where it rounds",
    roots=("max", "min"),
    match=_match_bound,
    refuse=_refuse_bound,
    build=_build_bound,
)


def _match_again(view: View, root: Primitive) -> Iterator[tuple[Quantized, Dequantized]]:
    outer = quantized_by(view, root)
    if outer is not None:
        yield from ((outer, inner) for inner in dequantized(view, outer.x))


def _refuse_again(view: View, match: tuple[Quantized, Dequantized]) -> Dequantized | RuleRefusal:
    outer, inner = match
    if not outer.grid.equals(inner.grid):
        return RuleRefusal("it is quantized with another scale or zero point", outer.root.output)
    return inner


QUANTIZATION_OF_DEQUANTIZED_IS_NOTHING = Rule(
    name="quantization-of-dequantized-is-nothing",
    law="round(s (q - z) / s) + z = q",
    source="the quotient is off by less than 1/2",
    roots=("cast",),
    match=_match_again,
    refuse=_refuse_again,
    build=lambda writer, inner: inner.q,
)


@dataclass(frozen=True, slots=True, eq=False)
class PartsWitness:
    """The parts to quantize one by one, and the axis along which they are concatenated."""

    parts: tuple[int, ...]
    axis: ConcatAttributes
    grid: QuantizationGrid


Rounded = tuple[Quantized, Primitive]
"""A quantization, and the primitive that computes its input."""


def _match_rounded(view: View, root: Primitive, *ops: str) -> Iterator[Rounded]:
    outer = quantized_by(view, root)
    if outer is not None:
        yield from ((outer, inner) for inner in view.producing(outer.x, *ops))


def _refuse_parts(view: View, match: Rounded) -> PartsWitness | RuleRefusal:
    outer, inner = match
    if not outer.grid.is_uniform:
        return RuleRefusal("the parts would be rounded differently", outer.root.output)
    if all(next(dequantized(view, part), None) is None for part in inner.inputs):
        return RuleRefusal("no part is dequantized", outer.root.output)
    return PartsWitness(inner.inputs, inner.attributes_as(ConcatAttributes), outer.grid)


def _build_parts(writer: Writer, witness: PartsWitness) -> int:
    parts = [write_quantized(writer, part, witness.grid) for part in witness.parts]
    return writer.add("concat", parts, witness.axis)


QUANTIZATION_MOVES_INTO_CONCAT = Rule(
    name="quantization-moves-into-concat",
    law="round(concat(x, y) / s) + z = concat(round(x / s) + z, round(y / s) + z)",
    source="an elementwise operation does not depend on where an element is",
    roots=("cast",),
    match=lambda view, root: _match_rounded(view, root, "concat"),
    refuse=_refuse_parts,
    build=_build_parts,
)


@dataclass(frozen=True, slots=True, eq=False)
class ClampWitness:
    """The value to quantize without the bound, and the quantization."""

    x: int
    quantized: Quantized


def _refuse_clamp(view: View, match: Rounded) -> ClampWitness | RuleRefusal:
    (outer, inner), root = match, match[0].root.output
    numbers = [view.number(value) for value in inner.inputs]
    bound = next((n for n in numbers if n is not None), None)
    if bound is None or not outer.grid.is_uniform:
        return RuleRefusal("the bound or the scale is not one number", root)
    end = outer.grid.limits[0 if inner.op == "max" else 1]
    if outer.grid.level(bound) != end:
        return RuleRefusal("the bound is within the range of the integers", root)
    x = inner.inputs[1 if numbers[0] is not None else 0]
    return ClampWitness(x, outer)


BOUND_BEFORE_QUANTIZATION_IS_ITS_OWN = Rule(
    name="bound-before-quantization-is-its-own",
    law="saturate(round(max(x, c) / s) + z) = saturate(round(x / s) + z), where c becomes the least integer",
    source="an increasing function keeps the order, also where it rounds",
    roots=("cast",),
    match=lambda view, root: _match_rounded(view, root, "max", "min"),
    refuse=_refuse_clamp,
    build=lambda writer, w: write_quantized(writer, w.x, w.quantized.grid),
)


@dataclass(frozen=True, slots=True, eq=False)
class UnsignedWitness:
    """The value to quantize, and the unsigned grids on which it is quantized and dequantized."""

    x: int
    first: QuantizationGrid
    then: QuantizationGrid
    dtype: DType


def _match_signed(view: View, root: Primitive) -> Iterator[tuple[Dequantized, Quantized]]:
    outer = dequantized_by(view, root)
    if outer is not None and outer.grid.dtype is DType.I8:
        found = (quantized_by(view, cast) for cast in view.producing(outer.q, "cast"))
        yield from ((outer, inner) for inner in found if inner is not None)


def _refuse_signed(view: View, match: tuple[Dequantized, Quantized]) -> UnsignedWitness | RuleRefusal:
    outer, inner = match
    if not all(_is_of_bytes(found.grid.zero.vector) for found in match):
        return RuleRefusal("a zero point is no signed byte", outer.root.output)
    dtype = view.type(outer.root.output).dtype
    return UnsignedWitness(inner.x, inner.grid.unsigned(), outer.grid.unsigned(), dtype)


def _is_of_bytes(zero: Array) -> bool:
    return bool(((zero >= -128) & (zero < 128)).all())


SIGNED_BYTES_ARE_UNSIGNED_ONES_LESS_128 = Rule(
    name="signed-bytes-are-unsigned-ones-less-128",
    law="s (q - z) = s (p - (z + 128)), where p = saturate(round(x / t) + y + 128) and q = p - 128",
    source="units multiply unsigned by signed bytes, and a ReLU's result has the zero point 0",
    roots=("mul",),
    match=_match_signed,
    refuse=_refuse_signed,
    build=lambda writer, w: write_dequantized(writer, write_quantized(writer, w.x, w.first), w.then, w.dtype),
)

RULES: tuple[AnyRule, ...] = (
    SIGNED_BYTES_ARE_UNSIGNED_ONES_LESS_128,
    MOVE_COMES_BEFORE_DEQUANTIZATION,
    LARGEST_COMES_BEFORE_DEQUANTIZATION,
    BOUND_COMES_BEFORE_DEQUANTIZATION,
    QUANTIZATION_OF_DEQUANTIZED_IS_NOTHING,
    QUANTIZATION_MOVES_INTO_CONCAT,
    BOUND_BEFORE_QUANTIZATION_IS_ITS_OWN,
)
