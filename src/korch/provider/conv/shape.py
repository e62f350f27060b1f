"""A chain of convolutions and a target -> the sizes of everything in its kernel."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace

from korch.alignment import ceil_div
from korch.candidate.candidate import Group
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import pair
from korch.provider.conv.match import ConvChain, Link
from korch.provider.matrix_units import STEP_BYTES, TOGETHER
from korch.target import Target

CACHE_SHARE = 0.25
"""The part of the level-2 cache that the rows between convolutions may fill, or the image's."""

DEPTHWISE_PIXELS = 8
"""Pixels of a row that a convolution channel by channel computes together."""

TILE_COST = 2.0
"""What a tile of results costs beside its multiplications, in vectors multiplied."""

MOST_VECTORS = 5
"""Vectors of channels that are computed together at most."""

WORTH_IT = 0.92
"""The part of the usual tile's time that another tile may take at most."""

LATENCY = 8
"""Multiplications that must be independent of each other to keep the units busy."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A step of a kernel, in the terms of `native/korch_conv.h`.

    Attributes:
        kind: COPY, DENSE or DEPTHWISE.
        channels: read and written.
        size: rows and columns read.
        out: rows and columns written.
        window: rows and columns of the window; strides, dilations and zeros before of each.
        vectors: of channels computed together.
        pixels: of a row computed together.
        is_split: whether it computes only the channels of its task's part.
        pixel: channels that are neighbours in its ring.
        ring: rows, pixels of a row with its zeros, zeros on the left, and the first float.
        on_tiles: whether matrix units multiply, as a part of a chain.
        link: the convolution; None for a copy.
    """

    kind: str
    channels: tuple[int, int]
    size: tuple[int, int]
    out: tuple[int, int]
    window: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int] = (0, 0)
    vectors: int = 1
    pixels: int = 1
    is_split: bool = False
    pixel: int = 1
    ring: tuple[int, int, int, int] = (0, 0, 0, 0)
    on_tiles: bool = False
    link: Link | None = None

    def floats(self, rows: int) -> int:
        """Return how many numbers there are in some of the rows that it reads."""
        return rows * self.size[1] * self.channels[0]

    def reach(self, rows: int) -> int:
        """Return how many rows it reads to write `rows`, pads included."""
        return (rows - 1) * self.strides[0] + (self.window[0] - 1) * self.dilations[0] + 1

    @property
    def pieces(self) -> int:
        """How many floats its split weights take."""
        strips, steps = (ceil_div(n, TOGETHER) for n in self.channels[::-1])
        return strips * steps * STEP_BYTES // 4 if self.on_tiles else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a kernel: its layers, rows of a block, parts, and workspace of a thread.

    `pieces` is where in it those of the weights begin that matrix units multiply by.
    """

    layers: tuple[Layer, ...]
    block: int
    chunks: int
    parts: int
    unit: int
    pieces: int
    floats: int


def can_split(match: ConvChain) -> bool:
    """Return whether tasks may have channels of the result of their own and do nothing twice."""
    return all(link.is_depthwise for link in match.links[1:])


def shape_of(group: Group, match: ConvChain, target: Target, by_channels: bool, pixel: int = 0) -> Shape:
    """Choose the sizes.

    Args:
        group: the chain's group.
        match: the chain.
        target: its caches, registers and threads.
        by_channels: whether threads share the channels of the result, or its rows.
        pixel: channels that are neighbours in the image; 0 for a vector's.
    """
    layers = _layers(group, match, target, pixel or target.lanes)
    images, channels, rows, _ = group.output_types[0].shape
    teams = target.threads // math.gcd(images, target.threads)
    own = [layer for i, layer in enumerate(layers) if _is_own(layers, i)]
    unit = max(layer.vectors for layer in own) * target.lanes
    parts = min(teams, ceil_div(channels, unit)) if by_channels else 1
    chunks = 1 if by_channels else min(teams, rows)
    layers = [
        replace(layer, is_split=parts > 1 and unit % layer.pixel == 0 and _is_own(layers, i))
        for i, layer in enumerate(layers)
    ]
    most = ceil_div(ceil_div(channels, unit), parts) * unit
    per_chunk = ceil_div(rows, chunks)
    limit = CACHE_SHARE * target.l2_bytes / 4
    is_swept = _is_swept_again(layers[0], per_chunk, rows, target)

    def floats_of(rows: int) -> int:
        rings = _with_rings(layers, rows, most, target.lanes)[1]
        return max(rings, layers[0].floats(_image_rows(layers, rows)) if is_swept else 0)

    # More rows never take less memory.
    block = max(1, bisect.bisect_right(range(1, per_chunk + 1), limit, key=floats_of))
    block = ceil_div(per_chunk, ceil_div(per_chunk, block))
    placed, pieces = _with_rings(layers, block, most, target.lanes)
    floats = pieces + sum(layer.pieces for layer in layers)
    return Shape(tuple(placed), block, chunks, parts, unit, pieces, floats)


def _is_kept(layer: Layer, target: Target) -> bool:
    """Whether a layer's weights stay in the cache from one block to the next."""
    return 8 * math.prod((*layer.channels, *layer.window)) <= target.l2_bytes


def _is_swept_again(layer: Layer, rows: int, all_rows: int, target: Target) -> bool:
    """Whether a block's rows of the image should stay in the cache for all channels of the result.

    Without blocks each strip of channels reads the whole image again, with them each block reads
    all weights again: so where those are larger than the image, there is one block.
    """
    if layer.kind != "DENSE":
        return False
    strips = ceil_div(layer.channels[1], layer.vectors * target.lanes)
    image = layer.floats(layer.size[0]) * rows // all_rows
    blocks = ceil_div(4 * image, int(CACHE_SHARE * target.l2_bytes))
    weights = math.prod((*layer.channels, *layer.window))
    pays = _is_kept(layer, target) or blocks * weights < (strips - 1) * image
    return strips > 1 and blocks > 1 and pays


def _image_rows(layers: list[Layer], rows: int) -> int:
    """Return how many rows of the image a block of rows of the result reads beyond the last's."""
    return min(layers[0].size[0], rows * math.prod(layer.strides[0] for layer in layers))


def _is_own(layers: list[Layer], i: int) -> bool:
    """Whether a layer need only compute the channels of a part: all after it are depthwise."""
    return all(layer.kind == "DEPTHWISE" for layer in layers[i + 1 :])


def _layers(group: Group, match: ConvChain, target: Target, pixel: int) -> list[Layer]:
    types = group.body.types
    image = group.input_types[match.image.position]
    found: list[Layer] = []
    for link in match.links:
        x, w = (types[value].shape for value in link.primitive.inputs)
        y = types[link.primitive.output].shape
        a = link.primitive.attributes_as(ConvAttributes)
        size, out = (x[2], x[3]), (y[2], y[3])
        sums = target.registers - 4
        vectors = 1 if link.is_depthwise else vectors_of(y[1], out[1], sums, target)
        on_tiles = w[2:] == (1, 1) and _can_be_tiles(link, x, y, target.lanes)
        vectors = 2 if on_tiles else vectors
        pixels, _ = pixels_of(out[1], sums // vectors, vectors)
        if link.is_depthwise:
            pixels = min(out[1], DEPTHWISE_PIXELS)
        layer = Layer(
            "DEPTHWISE" if link.is_depthwise else "DENSE",
            (x[1], y[1]),
            size,
            out,
            (w[2], w[3]),
            pair(a.strides),
            pair(a.dilations),
            pair(a.pads_begin),
            vectors,
            pixels,
            pixel=target.lanes,
            on_tiles=on_tiles,
            link=link,
        )
        if not found and (match.image.is_moved or (layer.kind == "DENSE" and _meets_edges(layer))):
            moved = (len(match.image.rows), len(match.image.columns))
            found.append(Layer("COPY", (image.shape[1],) * 2, (image.shape[2], image.shape[3]), moved, pixel=pixel))
        found.append(layer)
    return found


def _meets_edges(layer: Layer) -> bool:
    """Whether windows reach columns beside the image."""
    beyond = (layer.window[1] - 1) * layer.dilations[1] + 1
    return layer.pads[1] > 0 or (layer.out[1] - 1) * layer.strides[1] + beyond > layer.size[1]


def _can_be_tiles(link: Link, x: tuple[int, ...], y: tuple[int, ...], lanes: int) -> bool:
    """Return whether matrix units can multiply for a convolution in a chain: of one element."""
    a = link.primitive.attributes_as(ConvAttributes)
    is_pointwise = not link.is_depthwise and a.groups == 1 and x[2:] == y[2:]
    return is_pointwise and not any((*a.pads_begin, *a.pads_end)) and x[1] % lanes == 0


def vectors_of(channels: int, width: int, sums: int, target: Target) -> int:
    """Return how many vectors of channels to compute together: two, unless many would be empty."""
    all_vectors = ceil_div(channels, target.lanes)

    def total(vectors: int) -> float:
        return ceil_div(all_vectors, vectors) * pixels_of(width, sums // vectors, vectors)[1]

    usual = min(2, all_vectors)
    choices = range(usual, min(all_vectors, MOST_VECTORS) + 1)
    best = min(choices, key=lambda vectors: (total(vectors), vectors))
    return best if total(best) < WORTH_IT * total(usual) else usual


def pixels_of(width: int, most: int, vectors: int) -> tuple[int, float]:
    """Return how many pixels of a row to compute together for least time, and this for a row."""

    def cost(pixels: int) -> float:
        return max(pixels * vectors, LATENCY) + TILE_COST

    def total(pixels: int) -> float:
        rest = width % pixels
        return width // pixels * cost(pixels) + (cost(rest) if rest else 0)

    best = min(range(1, min(width, most) + 1), key=lambda p: (total(p), -p))
    return best, total(best)


def _with_rings(layers: list[Layer], block: int, most_channels: int, lanes: int) -> tuple[list[Layer], int]:
    """Return the layers with their ring buffers for blocks of some rows, and the floats of all."""
    placed = [layers[-1]]
    steps = max((ceil_div(layer.channels[0], TOGETHER) for layer in layers if layer.on_tiles), default=0)
    rows, floats = block, 2 * steps * STEP_BYTES // 4
    for layer, after in zip(layers[-2::-1], layers[:0:-1], strict=True):
        if after.on_tiles and layer.kind == "DEPTHWISE":
            placed.append(layer)
            continue
        rows = min(layer.out[0], after.reach(rows))
        beyond = (after.out[1] - 1) * after.strides[1] + (after.window[1] - 1) * after.dilations[1]
        margin = after.pads[1]
        line = max(margin + layer.out[1], beyond + 1)
        channels = min(layer.channels[1], most_channels) if layer.is_split else layer.channels[1]
        placed.append(replace(layer, ring=(rows, line, margin, floats)))
        size = ceil_div(channels, layer.pixel) * rows * line * layer.pixel
        floats += ceil_div(size, lanes) * lanes
    return placed[::-1], floats
