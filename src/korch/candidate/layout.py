"""Layouts: the order of a value's elements in memory.

A layout consists of an order of the axes, outermost first, and of inner blocks. It is written like a format
tag of oneDNN: axes are letters, a blocked axis is a capital letter, and inner blocks follow with their sizes
(`abcd` is plain, `acdb` channels-last, `aBcd16b` has blocks of 16 channels). A layout of float32 constants
may store each number as three bfloat16 numbers whose sum it is (`BA2b16a16b2a*3`), for multiplication by
matrix units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

SPLIT_PARTS = 3
"""The number of bfloat16 numbers, with 8 significant bits each, whose sum is a float32 number, with 24."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a value's elements in memory.

    Attributes:
        order: the axes, outermost first.
        blocks: inner blocks as (axis, size), outermost first, after all of `order`. An axis that
            is no multiple of its blocks is padded with zeros.
        is_split: whether each float32 is stored as three bfloat16; within an inner block, all first
            parts come before all second parts, and these before all third parts.
    """

    order: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    is_split: bool = False

    @staticmethod
    def plain(rank: int) -> Layout:
        """Return the row-major layout."""
        return _plain(rank)

    @property
    def is_plain(self) -> bool:
        """Whether it is row-major."""
        return self == _plain(len(self.order))

    def block(self, axis: int) -> int:
        """Return the product of an axis' block sizes."""
        return math.prod(size for a, size in self.blocks if a == axis)

    def physical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the array in memory, outermost axis first, including padding."""
        outer = tuple(-(-shape[axis] // self.block(axis)) for axis in self.order)
        return outer + (SPLIT_PARTS,) * self.is_split + tuple(size for _, size in self.blocks)

    def stored_type(self, type_: ValueType) -> ValueType:
        """Return the type of the array in memory that holds a value."""
        dtype = DType.BF16 if self.is_split else type_.dtype
        return ValueType(self.physical_shape(type_.shape), dtype)

    def size_bytes(self, type_: ValueType) -> int:
        """Return the bytes of a value in memory, including padding."""
        return _size_bytes(self, type_)

    def normalized(self, shape: tuple[int, ...]) -> Layout:
        """Return the plain layout if a value of this shape has the same bytes in both layouts; otherwise this one."""
        if self.is_plain or self.is_split:
            return self
        if any(shape[axis] % self.block(axis) for axis, _ in self.blocks):
            return self
        steps = [axis for axis in self.order if shape[axis] // self.block(axis) > 1]
        steps += [axis for axis, size in self.blocks if size > 1]
        return Layout.plain(len(shape)) if steps == sorted(steps) else self

    def lays_end_to_end(self, shapes: Sequence[tuple[int, ...]], axis: int) -> bool:
        """Return whether the bytes of a concatenation are the bytes of its operands, one after another.

        This holds if every axis outside the concatenated one has only one step, and each operand except the
        last ends with a complete block.

        `shapes`: the shapes of the operands; they differ along `axis` only.
        """
        outer = self.order[: self.order.index(axis)]
        return all(-(-shapes[0][a] // self.block(a)) == 1 for a in outer) and not any(
            shape[axis] % self.block(axis) for shape in shapes[:-1]
        )

    def pack(self, array: Array) -> Array:
        """Return the elements of `array` in this order, as an array of the physical shape."""
        if self.is_split:
            whole = Layout(self.order, self.blocks).pack(array)
            return np.stack(split_float32(whole), axis=len(self.order))
        shape = array.shape
        pads = [(0, -n % self.block(axis)) for axis, n in enumerate(shape)]
        padded = np.pad(array, pads) if any(after for _, after in pads) else array
        split: list[int] = []
        position: dict[tuple[int, int], int] = {}
        for axis, n in enumerate(padded.shape):
            sizes = [size for a, size in self.blocks if a == axis]
            position[axis, -1] = len(split)
            split.append(n // math.prod(sizes))
            for level, size in enumerate(sizes):
                position[axis, level] = len(split)
                split.append(size)
        seen: dict[int, int] = {}
        perm = [position[axis, -1] for axis in self.order]
        for axis, _ in self.blocks:
            perm.append(position[axis, seen.get(axis, 0)])
            seen[axis] = seen.get(axis, 0) + 1
        packed = np.ascontiguousarray(padded.reshape(split).transpose(perm))
        return packed.reshape(self.physical_shape(shape))  # NumPy has made a scalar an array of rank 1

    def unpack(self, packed: Array, shape: tuple[int, ...]) -> Array:
        """Return the array of `shape` whose elements are stored in `packed` in this layout."""
        if self.is_split:
            parts = packed.reshape(self.physical_shape(shape)).astype(np.float32)
            first, second, third = np.moveaxis(parts, len(self.order), 0)
            return Layout(self.order, self.blocks).unpack(first + (second + third), shape)
        numbers = self.pack(np.arange(1, math.prod(shape) + 1, dtype=np.int64).reshape(shape))
        flat = np.empty(math.prod(shape), packed.dtype)
        inside = numbers.reshape(-1) > 0
        flat[numbers.reshape(-1)[inside] - 1] = packed.reshape(-1)[inside]
        return flat.reshape(shape)

    def __str__(self) -> str:
        return _text(self)

    @staticmethod
    def parse(text: str) -> Layout:
        """Return the layout that prints as `text`.

        Raises:
            ValueError: `text` is not a layout.
        """
        match = re.fullmatch(r"([a-zA-Z]*?)((?:[1-9]\d*[a-z])*)(\*3)?", text)
        order = [ord(letter.lower()) - 97 for letter in match[1]] if match else []
        pairs = re.findall(r"(\d+)([a-z])", match[2]) if match else []
        blocks = tuple((ord(axis) - 97, int(size)) for size, axis in pairs)
        found = Layout(tuple(order), blocks, bool(match and match[3]))
        is_inside = all(axis < len(order) for axis, _ in found.blocks)
        if sorted(order) != list(range(len(order))) or not is_inside or str(found) != text:
            raise ValueError(f"{text!r} is no layout; expected one like abcd or aBcd16b")
        return found


def split_float32(array: Array) -> list[Array]:
    """Return three bfloat16 tensors whose sum is the given one, except for parts below 2^-133.

    Each element is the remainder after the parts before it, rounded to nearest, or towards zero if rounding
    to nearest gives infinity. If a number is not finite, it is the first part, and the others are zero.
    """
    rest = np.array(array, np.float32)
    found = []
    for _ in range(SPLIT_PARTS):
        with np.errstate(all="ignore"):
            part = rest.astype(DType.BF16.numpy)
        towards_zero = (rest.view(np.uint32) & 0xFFFF0000).view(np.float32)
        part = np.where(np.isinf(part), towards_zero.astype(part.dtype), part)
        found.append(part)
        is_number = np.isfinite(rest)
        rest = np.where(is_number, rest, 0.0) - np.where(is_number, part.astype(np.float32), 0.0)
    return found


@lru_cache(1 << 14)
def _size_bytes(layout: Layout, type_: ValueType) -> int:
    return layout.stored_type(type_).size_bytes


@cache
def _plain(rank: int) -> Layout:
    return Layout(tuple(range(rank)))


@cache
def _text(layout: Layout) -> str:
    blocked = {axis for axis, _ in layout.blocks}
    letters = (chr(ord("A" if axis in blocked else "a") + axis) for axis in layout.order)
    blocks = "".join(f"{size}{chr(97 + axis)}" for axis, size in layout.blocks)
    return "".join(letters) + blocks + "*3" * layout.is_split


@cache
def channels_last(rank: int) -> Layout:
    """Return the layout with the channels (axis 1) innermost."""
    return Layout((0, *range(2, rank), 1))


@cache
def channels_blocked(rank: int, size: int) -> Layout:
    """Return the layout with blocks of `size` channels (axis 1) innermost."""
    return Layout(tuple(range(rank)), ((1, size),))


OF_BYTES = (DType.U8, DType.I8, DType.I32)
"""Element types of products of bytes and of their sums. Their kernels read and write channels-last."""


@cache
def layout_choices(type_: ValueType, lanes: int) -> tuple[Layout, ...]:
    """Return the layouts that are considered for a value that one kernel writes for another.

    `lanes`: float32 elements in a vector register.

    Returns:
        Plain; for values with axes n, c and two or three spatial axes also channels-last, and, unless the
        elements are in OF_BYTES, blocks of `lanes` channels if the number of channels is a multiple of
        `lanes`. A layout with the same bytes as another one is left out.
    """
    plain = Layout.plain(type_.rank)
    if type_.rank not in (4, 5) or type_.size == 0:
        return (plain,)
    wanted = [plain, channels_last(type_.rank)]
    if lanes and type_.shape[1] % lanes == 0 and type_.dtype not in OF_BYTES:
        wanted.append(channels_blocked(type_.rank, lanes))
    return tuple(dict.fromkeys(layout.normalized(type_.shape) for layout in wanted))


def layouts_by_kind(type_: ValueType, lanes: int) -> dict[str, Layout]:
    """Return the layouts of `layout_choices` by name: "plain", "last" and "blocked"."""
    found = {"plain": Layout.plain(type_.rank)}
    if type_.rank >= 2:
        found |= {"last": channels_last(type_.rank), "blocked": channels_blocked(type_.rank, lanes)}
    available = layout_choices(type_, lanes)
    return {kind: layout for kind, layout in found.items() if layout in available}


def replaced(layouts: Sequence[Layout], position: int, layout: Layout) -> tuple[Layout, ...]:
    """Return a copy of `layouts` with another layout at one position."""
    return (*layouts[:position], layout, *layouts[position + 1 :])
