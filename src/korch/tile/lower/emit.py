"""Emits the tile operations that compute one value at one index; elementwise and layout primitives are inlined.

`Emitter.value` walks a group's body from a value back to values that are in memory. On the way a
layout primitive only changes the index; a constant pad or a concatenation becomes guards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import assert_never

from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
    pad_source,
)
from korch.primitive.types import DType, row_major_strides
from korch.tile.ir.growth import MOST_OPERATIONS, TextLimitError
from korch.tile.ir.index import (
    ZERO,
    Expr,
    Ranges,
    add,
    bounds,
    choice,
    coarsened,
    constant,
    entry,
    quotient,
    remainder,
    scale,
)
from korch.tile.ir.program import Apply, Inside, Literal, Load, Select, TileOp

Index = tuple[Expr, ...]
Guards = tuple[Inside, ...]
Home = Callable[[int, Index, Ranges], tuple[str, Expr] | None]
"""Maps a value and an index to an element in memory (buffer, index), or to None if it must be computed."""


def physical_offset(layout: Layout, shape: tuple[int, ...], index: Index, ranges: Ranges) -> Expr:
    """Return the offset, in elements, of `index` of a value of `shape` that is stored in a layout."""
    parts = [
        scale(remainder(quotient(remainder(index[axis], whole, ranges), inner, ranges), size, ranges), stride)
        if whole
        else scale(quotient(index[axis], inner, ranges), stride)
        for axis, whole, inner, size, stride in _digits(layout, shape)
    ]
    return add(*parts) if parts else ZERO


@cache
def _digits(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return (axis, whole, inner, size, stride) for each physical axis, which holds one digit of the index of `axis`.

    The digit is index % whole / inner % size if `whole` is not 0, else index / inner.
    """
    strides = row_major_strides(layout.physical_shape(shape))
    found = [
        (axis, 0, layout.block(axis), 0, stride)
        for axis, stride in zip(layout.order, strides[: len(layout.order)], strict=True)
    ]
    seen: dict[int, int] = {}
    for (axis, size), stride in zip(layout.blocks, strides[len(layout.order) :], strict=False):
        seen[axis] = seen.get(axis, 1) * size
        whole = layout.block(axis)
        found.append((axis, whole, whole // seen[axis], size, stride))
    return tuple(found)


@dataclass
class Operations:
    """The operations of one pass, named in order; equal ones are emitted once."""

    ops: list[TileOp] = field(default_factory=list, kw_only=True)
    _memo: dict[object, str] = field(default_factory=dict, kw_only=True)

    def load(self, dtype: DType, buffer: str, index: Expr, guards: Guards = ()) -> str:
        """Emit a load, and return its name."""
        key = ("load", buffer, index, guards)
        return self._op(lambda name: Load(name, dtype, buffer, index, guards), key)

    def literal(self, dtype: DType, number: float | int | bool) -> str:
        """Emit a literal, and return its name."""
        return self._op(lambda name: Literal(name, dtype, number), ("literal", dtype, repr(number)))

    def apply(self, dtype: DType, op: str, *arguments: str) -> str:
        """Emit an elementwise operation, and return its name."""
        return self._op(lambda name: Apply(name, dtype, op, arguments), ("apply", op, dtype, arguments))

    def select(self, dtype: DType, guards: Guards, inside: str, outside: str) -> str:
        """Emit a selection by guards, and return its name."""
        return self._op(lambda name: Select(name, dtype, guards, inside, outside), ("select", guards, inside, outside))

    def _op(self, make: Callable[[str], TileOp], key: object) -> str:
        if key not in self._memo:
            if len(self.ops) >= MOST_OPERATIONS:
                raise TextLimitError(f"it would have more than {MOST_OPERATIONS} operations")
            name = f"x{len(self.ops)}"
            self.ops.append(make(name))
            self._memo[key] = name
        return self._memo[key]


@dataclass
class Emitter(Operations):
    """Collects the operations of one pass that compute values of a group."""

    body: PrimitiveGraph
    home: Home
    ranges: Ranges

    def value(self, value: int, index: Index, guards: Guards = ()) -> str:
        """Return the name of a value's element at `index`."""
        key = (value, index, guards)
        if key not in self._memo:
            self._memo[key] = self._value(value, index, guards)
        return self._memo[key]

    def give(self, value: int, index: Index, name: str) -> None:
        """Record that operation `name` already computes a value's element at `index`."""
        self._memo[(value, index, ())] = name

    def under(self, ranges: Ranges) -> Emitter:
        """Return a new emitter, without operations, for the same values under other ranges."""
        return Emitter(self.body, self.home, ranges)

    def include(self, ops: Sequence[TileOp], change: Callable[[Expr], Expr]) -> dict[str, str]:
        """Emit operations of another emitter with a function applied to their indices; return their names here."""
        names: dict[str, str] = {}
        for op in ops:
            guards: Guards = ()
            if isinstance(op, Load | Select):
                guards = tuple(replace(guard, expr=change(guard.expr)) for guard in op.guards)
            match op:
                case Load(name, dtype, buffer, index):
                    names[name] = self.load(dtype, buffer, change(index), guards)
                case Literal(name, dtype, number):
                    names[name] = self.literal(dtype, number)
                case Apply(name, dtype, applied, arguments):
                    names[name] = self.apply(dtype, applied, *(names[argument] for argument in arguments))
                case Select(name, dtype, _, inside, outside):
                    names[name] = self.select(dtype, guards, names[inside], names[outside])
                case _:
                    assert_never(op)
        return names

    def inside(self, expr: Expr, low: int, high: int) -> Guards:
        """Return the guard low <= expr < high; none if the ranges imply it."""
        least, most = bounds(expr, self.ranges)
        if low <= least and most < high:
            return ()
        return (Inside(*coarsened(expr, low, high, self.ranges)),)

    def _value(self, value: int, index: Index, guards: Guards) -> str:
        type_ = self.body.types[value]
        uniform = self.body.constants.get(value)
        if uniform is not None:
            return self.literal(type_.dtype, uniform.scalar.item())
        place = self.home(value, index, self.ranges)
        if place is not None:
            return self.load(type_.dtype, *place, guards)
        if type_.size == 0:
            return self.literal(type_.dtype, 0)  # its guards never hold
        primitive = self.body.primitives[self.body.producers[value][0]]
        if primitive.row.category is Category.ELEMENTWISE:
            arguments = tuple(self.value(v, index, guards) for v in primitive.inputs)
            return self.apply(type_.dtype, primitive.op, *arguments)
        if primitive.op == "concat":
            return self._concat(primitive, index, guards)
        if primitive.op == "pad":
            return self._pad(primitive, index, guards)
        return self.value(primitive.inputs[0], self._moved(primitive, index), guards)

    def _moved(self, primitive: Primitive, index: Index) -> Index:
        """Return the input index that a primitive of one input reads for an output index."""
        shape = self.body.types[primitive.inputs[0]].shape
        if primitive.op == "broadcast" or primitive.op.startswith("reduce_"):
            lead = len(index) - len(shape)
            return tuple(ZERO if n == 1 else index[lead + a] for a, n in enumerate(shape))
        match primitive.attributes:
            case TransposeAttributes(perm):
                moved = [ZERO] * len(perm)
                for position, axis in enumerate(perm):
                    moved[axis] = index[position]
                return tuple(moved)
            case ReshapeAttributes(out_shape):
                return self._reshaped(out_shape, shape, index)
            case SliceAttributes(start, _, step):
                return tuple(add(constant(s), scale(e, k)) for s, k, e in zip(start, step, index, strict=True))
            case TakeAttributes(axis, indices):
                taken = entry(indices, index[axis], self.ranges)
                return (*index[:axis], taken, *index[axis + 1 :])
        raise AssertionError(f"no index rule for {primitive.op}")

    def _reshaped(self, out_shape: Sequence[int], shape: Sequence[int], index: Index) -> Index:
        strides = row_major_strides(tuple(out_shape))
        rest = add(ZERO, *(scale(e, s) for e, s in zip(index, strides, strict=True)))
        moved: list[Expr] = []
        for axis in range(len(shape) - 1, -1, -1):
            if shape[axis] == 1:
                moved.append(ZERO)
                continue
            is_first = all(n == 1 for n in shape[:axis])
            moved.append(rest if is_first else remainder(rest, shape[axis], self.ranges))
            rest = quotient(rest, shape[axis], self.ranges)
        return tuple(reversed(moved))

    def _pad(self, primitive: Primitive, index: Index, guards: Guards) -> str:
        attributes = primitive.attributes
        if not isinstance(attributes, PadAttributes):
            raise AssertionError("pad without its attributes")
        source = self.body.types[primitive.inputs[0]]
        conditions: list[Inside] = []
        moved: list[Expr] = []
        for axis, size in enumerate(source.shape):
            before, after = attributes.before[axis], attributes.after[axis]
            inner = add(index[axis], constant(-before))
            if attributes.mode == "constant":
                conditions.extend(self.inside(inner, 0, size))
                moved.append(inner)
            else:
                moved.append(folded(index[axis], size, (before, after), attributes.mode, self.ranges))
        if not conditions:
            return self.value(primitive.inputs[0], tuple(moved), guards)
        found = self.value(primitive.inputs[0], tuple(moved), (*guards, *conditions))
        kind = float if source.dtype.is_float else int
        fill = self.literal(source.dtype, kind(attributes.value))
        return self.select(source.dtype, tuple(conditions), found, fill)

    def _concat(self, primitive: Primitive, index: Index, guards: Guards) -> str:
        attributes = primitive.attributes
        if not isinstance(attributes, ConcatAttributes):
            raise AssertionError("concat without its attributes")
        axis, at, parts = attributes.axis, 0, []
        for value in primitive.inputs:
            size = self.body.types[value].shape[axis]
            if size:
                parts.append((value, at, at + size))
            at += size
        result: str | None = None
        for value, low, high in reversed(parts):
            condition = self.inside(index[axis], low, high)
            moved = (*index[:axis], add(index[axis], constant(-low)), *index[axis + 1 :])
            found = self.value(value, moved, (*guards, *condition))
            dtype = self.body.types[value].dtype
            result = found if result is None else self.select(dtype, condition, found, result)
        if result is None:
            raise AssertionError("an empty concat has no elements to compute")
        return result


def folded(outer: Expr, size: int, pads: tuple[int, int], mode: str, ranges: Ranges) -> Expr:
    """Return the index that a non-constant pad reads along one axis.

    `size`: the elements of the axis before padding. `pads`: the elements added before and after it.
    """
    before, after = pads
    inner = add(outer, constant(-before))
    if not before and not after:
        return inner
    reach = size - 1 if mode == "reflect" else size
    if max(before, after) > reach and mode != "edge":
        table = [pad_source(i, size, before, mode) for i in range(before + size + after)]
        return entry(table, outer, ranges)
    if mode == "edge":
        low, high = ZERO, constant(size - 1)
    elif mode == "wrap":
        low, high = add(inner, constant(size)), add(inner, constant(-size))
    else:
        low, high = scale(inner, -1), add(constant(2 * (size - 1)), scale(inner, -1))
    return choice(inner, ((0, low), (size, inner)), high, ranges)
