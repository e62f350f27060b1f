"""A lone dense convolution and a target with matrix units -> the sizes of its kernel.

The choice is between three ways: all strips of channels, or a thread's own, stay in the cache as
pieces while the rows of the image go by; or rows stay while a thread's own strips go by.
What is split while products are computed is taken to cost nothing, the rest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from korch.alignment import round_up
from korch.provider.conv.shape import Layer
from korch.provider.matrix_units import STEP_BYTES, TOGETHER
from korch.target import Target

TILE = TOGETHER // 2
"""Pixels of a tile; a step has as many pairs of terms, and channels come in pairs of tiles."""

STEP_COST = 1.0
"""What the products of a step of 32 pixels and 32 channels cost: the unit of time here."""

TAIL_COST = 0.6
"""The same for 16 pixels or fewer."""

SPLIT_COST = 0.03
"""What it costs to split 32 numbers."""

BLOCKS_COST = 1.08
"""What it costs to stop after each block of rows that stay, and to read the weights once more."""

ROWS_SHARE, CHUNK_SHARE = 0.45, 0.1
"""The parts for rows that stay, and for each of two chunks of a strip that goes by."""

STAY_SHARE, BLOCK_SHARE = 0.5, 0.2
"""The parts of the level-2 cache for split operands that stay, and for those of the rows that go by."""


@dataclass(frozen=True, slots=True)
class Split:
    """Sizes in the terms of `native/korch_conv_amx.h`, and `cost`.

    Attributes:
        skip: columns of the image for each that is kept, `width` in a row.
        stride: kept columns between neighbouring windows.
        pitch: pixels of a row with its zeros; `extra` zeros follow the last.
        classes: of rows, each with `depth` rows.
        block: rows of the result that are computed together.
        chunks: parts of the rows that are separate tasks; `parts` the same of the channels.
        group: strips that stay in the cache, 0 if rows stay.
        units: steps of a strip that are multiplied at a time.
        image: numbers of the split operand that a block reads.
        floats: workspace of a thread.
        cost: an estimate of the time, in products of a step of 32 pixels and 32 channels.
    """

    skip: int
    width: int
    stride: int
    pitch: int
    extra: int
    classes: int
    depth: int
    block: int
    chunks: int
    parts: int
    group: int
    units: int
    image: int
    floats: int
    cost: float

    @property
    def numbers(self) -> dict[str, int]:
        """The constants of the kernel."""
        return {
            "SKIP": self.skip,
            "WIDTH": self.width,
            "STRIDE": self.stride,
            "PITCH": self.pitch,
            "EXTRA": self.extra,
            "CLASSES": self.classes,
            "DEPTH": self.depth,
            "BLOCK": self.block,
            "CHUNKS": self.chunks,
            "PARTS": self.parts,
            "GROUP": self.group,
            "UNITS": self.units,
            "IMAGE": self.image,
            "FLOATS": self.floats,
        }


def split_of(layer: Layer, images: int, target: Target) -> Split:
    """Choose the sizes for a dense layer."""
    return min(_choices(_Sizes(layer, images, target)), key=lambda split: split.cost)


class _Sizes:
    """What follows from the convolution alone."""

    def __init__(self, layer: Layer, images: int, target: Target) -> None:
        self.images, self.target = images, target
        self.channels, self.out = layer.channels, layer.out
        self.window, self.strides, self.dilations = layer.window, layer.strides, layer.dilations
        width, left, jump = layer.size[1], layer.pads[1], layer.strides[1]
        self.skip = jump if self._jumps(width, left) else 1
        self.width = layer.out[1] if self.skip > 1 else width
        self.stride = jump // self.skip
        reach = (layer.out[1] - 1) * self.stride + (layer.window[1] - 1) * layer.dilations[1] + 1
        pitch = max(left + self.width, reach - left, layer.out[1] * self.stride)
        self.pitch = round_up(pitch, self.stride)
        self.extra = max(0, reach - self.pitch)
        rows, jump = self.window[0], self.strides[0]
        self.classes = 1 if rows == 1 or self.dilations[0] % jump == 0 else jump
        self.beyond = (rows - 1) * self.dilations[0] // jump
        self.steps = -(-self.channels[0] // TOGETHER)
        self.units = math.prod(self.window) * self.steps
        self.strips = -(-self.channels[1] // TOGETHER)

    def _jumps(self, width: int, left: int) -> bool:
        is_inside = left == 0 and (self.out[1] - 1) * self.strides[1] < width
        return self.window[1] == 1 and is_inside

    def image(self, rows: int) -> int:
        """Return the numbers of the split operand that a block reads, with what a last tile reads."""
        across = (rows + self.beyond) * self.pitch // self.stride
        pixels = self.stride * (across + -(-self.extra // self.stride))
        return (3 * self.steps * self.classes * pixels + TOGETHER) * TOGETHER

    def products(self, rows: int) -> float:
        """Return the time of a step for all results of a block, and one strip."""
        pixels = (rows - 1) * (self.pitch // self.stride) + self.out[1]
        whole, rest = divmod(pixels, TOGETHER)
        tail = 0.0 if rest == 0 else TAIL_COST if rest <= TILE else 1.0
        return STEP_COST * (whole + tail)

    def split_rows(self, rows: int) -> float:
        """Return the time of splitting what a block reads."""
        return SPLIT_COST * (rows + self.beyond) * self.classes * self.width * self.steps

    def split_strip(self) -> float:
        """Return the time of splitting a strip."""
        return SPLIT_COST * self.units * TOGETHER


def _choices(sizes: _Sizes) -> Iterator[Split]:
    teams = max(1, sizes.target.threads // math.gcd(sizes.images, sizes.target.threads))
    yield from _rows_pass(sizes, min(teams, sizes.out[0]), 1)
    if teams > 1 and sizes.strips > 1:
        yield from _rows_pass(sizes, 1, min(teams, sizes.strips))
    yield from _strips_pass(sizes)


def _split(
    sizes: _Sizes, block: int, chunks: int, parts: int, group: int, units: int, floats: int, cost: float
) -> Split:
    return Split(
        sizes.skip,
        sizes.width,
        sizes.stride,
        sizes.pitch,
        sizes.extra,
        sizes.classes,
        block + sizes.beyond,
        block,
        chunks,
        parts,
        group,
        units,
        sizes.image(block),
        floats,
        cost,
    )


def _rows_pass(sizes: _Sizes, chunks: int, parts: int) -> Iterator[Split]:
    """Yield the ways in which strips stay."""
    strip_bytes = sizes.units * STEP_BYTES
    own = -(-sizes.strips // parts)
    fitting = max(1, int(STAY_SHARE * sizes.target.l2_bytes / strip_bytes))
    group = -(-own // -(-own // fitting))
    all_rows = -(-sizes.out[0] // chunks)
    rounds = -(-sizes.images * chunks * parts // sizes.target.threads)
    for blocks in range(1, all_rows + 1):
        block = -(-all_rows // blocks)
        image = sizes.image(block)
        if block > 1 and (2 * 2 * image > BLOCK_SHARE * sizes.target.l2_bytes or -(-all_rows // block) < blocks):
            continue
        whole, rest = divmod(all_rows, block)
        products = whole * sizes.products(block) + (sizes.products(rest) if rest else 0)
        cost = own * (products * sizes.units + sizes.split_strip())
        rows = whole * sizes.split_rows(block) + (sizes.split_rows(rest) if rest else 0)
        groups = -(-own // group)
        cost = max(cost, groups * rows * 2) + groups * sizes.split_rows(block)
        floats = (group * strip_bytes // 2 + 2 * image) // 2 + TOGETHER
        floats = round_up(floats, TOGETHER)
        yield _split(sizes, block, chunks, parts, group, sizes.units, floats, rounds * cost)
        if block == 1:
            return


def _strips_pass(sizes: _Sizes) -> Iterator[Split]:
    """Yield the way in which rows stay."""
    parts = min(sizes.target.threads, sizes.strips)
    own = -(-sizes.strips // parts)
    room = ROWS_SHARE * sizes.target.l2_bytes
    all_rows = sizes.out[0]
    fitting = [b for b in range(1, all_rows + 1) if 2 * sizes.image(b) <= room]
    blocks = -(-all_rows // max(fitting, default=1))
    block = -(-all_rows // blocks)
    image = sizes.image(block)
    fitting_units = int(CHUNK_SHARE * sizes.target.l2_bytes / STEP_BYTES)
    pieces = -(-sizes.units // max(1, fitting_units))
    units = -(-sizes.units // pieces)
    pixels = round_up((block - 1) * (sizes.pitch // sizes.stride) + sizes.out[1], TOGETHER)
    sums = pixels * TOGETHER if units < sizes.units else 0
    floats = -(-image // 2 // TOGETHER) * TOGETHER + 2 * units * STEP_BYTES // 4 + sums
    products = sizes.products(block)
    strip = max(products * sizes.units, 2 * sizes.split_strip())
    cost = own * strip + sizes.split_rows(block) + sizes.split_strip() * units / sizes.units
    cost *= blocks * (BLOCKS_COST if blocks > 1 else 1)
    rounds = -(-sizes.images * parts // sizes.target.threads)
    yield _split(sizes, block, 1, parts, 0, units, floats, rounds * cost)
