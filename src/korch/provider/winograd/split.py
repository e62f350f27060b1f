"""A convolution in Winograd's space and a target with matrix units -> its kernel, with the sizes of its blocks.

Threads share a group of tiles, each with its own points. A group is as large as their caches allow,
for all weights are read and split once for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from korch.alignment import round_up
from korch.candidate.candidate import Group, Offer
from korch.candidate.layout import channels_last
from korch.primitive.graph import Primitive
from korch.primitive.ops.winograd import WinogradAttributes, tile_counts
from korch.primitive.types import DType
from korch.provider.matrix_units import SPLIT_BYTES, TOGETHER, constants_of
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.winograd.match import WinogradConv, match_group
from korch.target import Target
from korch.tile.cpp_text import literal, stored_type

CACHE_SHARE = 1.15
"""The part of the level-2 caches that a group may fill: to read and to split the weights once more
takes longer than to fetch some points that were driven out.
"""

FEW_WEIGHTS_SHARE, SMALL_GROUP_SHARE = 0.25, 0.7
"""If a thread's weights fill no more of its cache than the first, they may stay there, and a group
fills no more than the second.
"""

LEAST_CHANNELS = 64
"""On either side: with fewer, transforms take longer than products."""

LEAST_TILES = TOGETHER // 2 + 1
"""Fewer leave the units half empty, and each weight is split for less than it costs."""

LINE_FLOATS = 16
"""Size of a line of the level-1 cache."""


@dataclass(frozen=True, slots=True)
class Split:
    """Sizes in the terms of `native/korch_winograd_amx.h`.

    Attributes:
        group: most tiles that go together through transform, products and inverse.
        groups: of nearly equal size.
        step: floats between the points of a group.
        floats: workspace of a thread, besides the group's points.
    """

    group: int
    groups: int
    step: int
    floats: int

    @property
    def numbers(self) -> dict[str, int]:
        """The constants of the kernel."""
        return {"GROUP": self.group, "GROUPS": self.groups, "STEP": self.step, "FLOATS": self.floats}


def split_of(points: int, tiles: int, channels_in: int, channels_out: int, target: Target) -> Split:
    """Choose the sizes.

    Args:
        points: elements of a transformed tile.
        tiles: in all.
        channels_in: input channels.
        channels_out: output channels.
        target: its caches and threads.
    """
    wide, depth = max(channels_in, channels_out), round_up(channels_in, TOGETHER)
    # A thread's points of a tile, and twice the split operand of one of them.
    tile_bytes = 4 * points * wide / target.threads + 2 * SPLIT_BYTES * depth
    weight_bytes = 4 * points * channels_in * channels_out / target.threads
    are_few = weight_bytes <= FEW_WEIGHTS_SHARE * target.l2_bytes
    share = SMALL_GROUP_SHARE if are_few else CACHE_SHARE
    room = share * target.l2_bytes - 2 * SPLIT_BYTES * depth * TOGETHER
    groups = -(-tiles // max(TOGETHER, int(room / tile_bytes)))
    group = -(-tiles // groups)
    whole = round_up(group, TOGETHER)
    step = (whole * wide // LINE_FLOATS | 1) * LINE_FLOATS
    floats = 2 * SPLIT_BYTES * depth * (whole + TOGETHER) // 4 + points * channels_in
    return Split(group, groups, step, floats)


def can_split(group: Group, root: Primitive, target: Target) -> bool:
    """Return whether matrix units may pay: where their tiles are mostly full, and the kernel takes the group."""
    *_, terms, channels = group.body.types[root.inputs[1]].shape
    is_wide = min(terms, channels) >= LEAST_CHANNELS and channels % TOGETHER == 0
    if target.isa != "amx" or not is_wide or _tiles(group, root)[0] < LEAST_TILES:
        return False
    return isinstance(match_group(group), WinogradConv)


def split_kernel(group: Group, found: WinogradConv, offer: Offer, target: Target, comment: str) -> Kernel:
    """Print the kernel."""
    x, y = group.input_types[found.image], group.output_types[0]
    attributes = found.primitive.attributes_as(WinogradAttributes)
    down, across = tile_counts(y.shape, attributes.tile)
    tiles, points = _tiles(group, found.primitive)
    split, last = split_of(points, tiles, x.shape[1], y.shape[1], target), channels_last(4)
    numbers = {
        "TILE": attributes.tile,
        "W": target.lanes,
        "C": x.shape[1],
        "O": y.shape[1],
        "H": x.shape[2],
        "WIDTH": x.shape[3],
        "OUT_H": y.shape[2],
        "OUT_WIDTH": y.shape[3],
        "DOWN": down,
        "ACROSS": across,
        "TILES": tiles,
        "THREADS": target.threads,
        "IN_LAST": int(offer.inputs[found.image] == last.normalized(x.shape)),
        "OUT_LAST": int(offer.outputs[0] == last.normalized(y.shape)),
    }
    text = _print(group, found, numbers, split, comment)
    floats = points * split.step + target.threads * split.floats
    return named_kernel(text, workspace_bytes=4 * floats, threading=Threading.TEAM)


def _tiles(group: Group, root: Primitive) -> tuple[int, int]:
    """Return how many tiles there are, and the points of each."""
    shape, tile = group.body.types[root.output].shape, root.attributes_as(WinogradAttributes).tile
    return shape[0] * math.prod(tile_counts(shape, tile)), (tile + 2) ** 2


def _print(group: Group, found: WinogradConv, numbers: dict[str, int], split: Split, comment: str) -> str:
    rows, columns = found.sources
    workspace = len(group.inputs) + len(group.outputs)
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    steps = "".join(f"    {line}\n" for line in found.steps)
    return f"""{head}#include "korch_winograd_amx.h"

static const int32_t NAME_rows[] = {{{", ".join(map(str, rows))}}};
static const int32_t NAME_columns[] = {{{", ".join(map(str, columns))}}};

struct NAME_kernel {{
  typedef {stored_type(group.input_types[found.image].dtype)} Element;
{constants_of(numbers)}  static constexpr float FILL = {literal(DType.F32, found.fill)};
  static long row(long i) {{ return NAME_rows[i]; }}
  static long column(long i) {{ return NAME_columns[i]; }}
  static KORCH_INLINE void finish(void* const* buffers, korch::Vec<float, W> y, long at,
                                  long channel) {{
{steps}  }}
}};

struct NAME_sizes {{
{constants_of(split.numbers)}}};

extern "C" int NAME_run(void*, void* const* buffers) {{
  return korch_winograd::run_split<NAME_kernel, NAME_sizes>(
      buffers, static_cast<const NAME_kernel::Element*>(buffers[{found.image}]),
      static_cast<const float*>(buffers[{found.weights}]),
      static_cast<float*>(buffers[{workspace}]));
}}
"""
