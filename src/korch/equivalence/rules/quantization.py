"""Rules that move, merge and cancel quantizations, so that chains of operators compute in bytes.

A primitive that only moves or compares elements can do the same to the integers that represent them, because
(q - zero)*scale increases with q and depends on nothing else. An integer that is dequantized and quantized again on the
same grid is unchanged: the relative error of the quotient is at most 2^-22, and integers have at most 16 bits.
"""

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
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer
from korch.primitive.graph import Primitive
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.layout import PadAttributes, TransposeAttributes
from korch.primitive.types import DType

MOVES = ("transpose", "reshape", "slice", "take", "pad", "concat", "broadcast")
LARGEST_OF = ("pool_max", "reduce_max", "reduce_min")


@dataclass(frozen=True, slots=True)
class QuantizedMoveMatch:
    """A primitive, and the dequantization of each of its inputs."""

    root: Primitive
    inner: tuple[Dequantized, ...]


def _match_move(view: View, root: Primitive) -> Iterator[QuantizedMoveMatch]:
    if not view.type(root.output).dtype.is_float:
        return
    found = [next(dequantized(view, value), None) for value in root.inputs]
    inner = tuple(item for item in found if item is not None)
    if len(inner) == len(root.inputs):
        yield QuantizedMoveMatch(root, inner)


def _move(view: View, match: QuantizedMoveMatch) -> Write | RuleRefusal:
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
    return lambda writer: _write_moved(writer, match, attributes, grid)


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


def _write_moved(writer: Writer, match: QuantizedMoveMatch, attributes: Attributes, grid: QuantizationGrid) -> int:
    moved = writer.add(match.root.op, [item.q for item in match.inner], attributes)
    return write_dequantized(writer, moved, grid, writer.type(match.root.output).dtype)


MOVE_COMES_BEFORE_DEQUANTIZATION = Rule(
    name="move-comes-before-dequantization",
    law="move(s (q - z)) = s (move(q) - z)",
    source="an elementwise operation does not depend on where an element is",
    roots=MOVES,
    match=_match_move,
    rewrite=_move,
)


def _compare(view: View, match: QuantizedMoveMatch) -> Write | RuleRefusal:
    (found,) = match.inner
    if not found.grid.is_uniform:
        return RuleRefusal("compared elements have different scales", match.root.output)
    return lambda writer: _write_moved(writer, match, match.root.attributes, found.grid)


LARGEST_COMES_BEFORE_DEQUANTIZATION = Rule(
    name="largest-comes-before-dequantization",
    law="max(s (q - z)) = s (max(q) - z) over a window or axes, where s > 0",
    source="an increasing function keeps the order, also where it rounds",
    roots=LARGEST_OF,
    match=_match_move,
    rewrite=_compare,
)


@dataclass(frozen=True, slots=True)
class BoundMatch:
    """A maximum or minimum, and the dequantizations of its operands, of which one may be a number."""

    root: Primitive
    inner: tuple[Dequantized, ...]
    bound: float | None


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


def _bound(view: View, match: BoundMatch) -> Write | RuleRefusal:
    root, found = match.root, match.inner
    grid, dtype = found[0].grid, view.type(root.output).dtype
    if match.bound is None:
        if not found[1].grid.equals(grid):
            return RuleRefusal("the operands have different scales", root.output)
        both = [item.q for item in found]
        return lambda writer: write_dequantized(writer, writer.add(root.op, both), grid, dtype)
    if not grid.is_uniform:
        return RuleRefusal("the scale of the operand varies", root.output)
    q, end = found[0].q, grid.number(grid.limits[0 if root.op == "max" else 1])
    if (match.bound <= end) if root.op == "max" else (match.bound >= end):  # the bound has no effect
        return lambda writer: write_dequantized(writer, q, grid, dtype)
    level = _exact_level(grid, match.bound)
    if level is None:
        return RuleRefusal("no integer stands for the bound", root.output)

    def write(writer: Writer) -> int:
        other = writer.verbs.full(level, writer.type(q))
        return write_dequantized(writer, writer.add(root.op, (q, other)), grid, dtype)

    return write


BOUND_COMES_BEFORE_DEQUANTIZATION = Rule(
    name="bound-comes-before-dequantization",
    law="max(s (q - z), s (p - z)) = s (max(q, p) - z), and so for min, where s > 0",
    source="an increasing function keeps the order, also where it rounds",
    roots=("max", "min"),
    match=_match_bound,
    rewrite=_bound,
)


def _match_again(view: View, root: Primitive) -> Iterator[tuple[Quantized, Dequantized]]:
    outer = quantized_by(view, root)
    if outer is not None:
        yield from ((outer, inner) for inner in dequantized(view, outer.x))


def _keep(view: View, match: tuple[Quantized, Dequantized]) -> Write | RuleRefusal:
    outer, inner = match
    if not outer.grid.equals(inner.grid):
        return RuleRefusal("it is quantized with another scale or zero point", outer.root.output)
    return lambda writer: inner.q


QUANTIZATION_OF_DEQUANTIZED_IS_NOTHING = Rule(
    name="quantization-of-dequantized-is-nothing",
    law="round(s (q - z) / s) + z = q",
    source="the quotient is off by less than 1/2",
    roots=("cast",),
    match=_match_again,
    rewrite=_keep,
)


Rounded = tuple[Quantized, Primitive]
"""A quantization, and the primitive that computes its input."""


def _match_rounded(view: View, root: Primitive, *ops: str) -> Iterator[Rounded]:
    outer = quantized_by(view, root)
    if outer is not None:
        yield from ((outer, inner) for inner in view.producing(outer.x, *ops))


def _quantize_parts(view: View, match: Rounded) -> Write | RuleRefusal:
    outer, inner = match
    if not outer.grid.is_uniform:
        return RuleRefusal("the parts would be rounded differently", outer.root.output)
    if all(next(dequantized(view, part), None) is None for part in inner.inputs):
        return RuleRefusal("no part is dequantized", outer.root.output)

    def write(writer: Writer) -> int:
        parts = [write_quantized(writer, part, outer.grid) for part in inner.inputs]
        return writer.add("concat", parts, inner.attributes)

    return write


QUANTIZATION_MOVES_INTO_CONCAT = Rule(
    name="quantization-moves-into-concat",
    law="round(concat(x, y) / s) + z = concat(round(x / s) + z, round(y / s) + z)",
    source="an elementwise operation does not depend on where an element is",
    roots=("cast",),
    match=lambda view, root: _match_rounded(view, root, "concat"),
    rewrite=_quantize_parts,
)


def _leave_out_bound(view: View, match: Rounded) -> Write | RuleRefusal:
    (outer, inner), root = match, match[0].root.output
    numbers = [view.number(value) for value in inner.inputs]
    bound = next((n for n in numbers if n is not None), None)
    if bound is None or not outer.grid.is_uniform:
        return RuleRefusal("the bound or the scale is not one number", root)
    end = outer.grid.limits[0 if inner.op == "max" else 1]
    if outer.grid.level(bound) != end:
        return RuleRefusal("the bound is within the range of the integers", root)
    x = inner.inputs[1 if numbers[0] is not None else 0]
    return lambda writer: write_quantized(writer, x, outer.grid)


BOUND_BEFORE_QUANTIZATION_IS_ITS_OWN = Rule(
    name="bound-before-quantization-is-its-own",
    law="saturate(round(max(x, c) / s) + z) = saturate(round(x / s) + z), where c becomes the least integer",
    source="an increasing function keeps the order, also where it rounds",
    roots=("cast",),
    match=lambda view, root: _match_rounded(view, root, "max", "min"),
    rewrite=_leave_out_bound,
)


def _match_signed(view: View, root: Primitive) -> Iterator[tuple[Dequantized, Quantized]]:
    outer = dequantized_by(view, root)
    if outer is not None and outer.grid.dtype is DType.I8:
        found = (quantized_by(view, cast) for cast in view.producing(outer.q, "cast"))
        yield from ((outer, inner) for inner in found if inner is not None)


def _as_unsigned(view: View, match: tuple[Dequantized, Quantized]) -> Write | RuleRefusal:
    outer, inner = match
    if not all(_is_of_bytes(found.grid.zero.vector) for found in match):
        return RuleRefusal("a zero point is no signed byte", outer.root.output)
    dtype = view.type(outer.root.output).dtype

    def write(writer: Writer) -> int:
        q = write_quantized(writer, inner.x, inner.grid.unsigned())
        return write_dequantized(writer, q, outer.grid.unsigned(), dtype)

    return write


def _is_of_bytes(zero: Array) -> bool:
    return bool(((zero >= -128) & (zero < 128)).all())


SIGNED_BYTES_ARE_UNSIGNED_ONES_LESS_128 = Rule(
    name="signed-bytes-are-unsigned-ones-less-128",
    law="s (q - z) = s (p - (z + 128)), where p = saturate(round(x / t) + y + 128) and q = p - 128",
    source="units multiply unsigned by signed bytes, and a ReLU's result has the zero point 0",
    roots=("mul",),
    match=_match_signed,
    rewrite=_as_unsigned,
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
