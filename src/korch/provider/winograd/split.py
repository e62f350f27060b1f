"""A convolution in Winograd's space and a target with matrix units -> the sizes of its kernel.

Threads share a group of tiles, each with its own points. A group is as large as their caches allow,
for all weights are read and split once for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from korch.provider.matrix_units import SPLIT_BYTES, TOGETHER
from korch.target import Target

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
    wide, depth = max(channels_in, channels_out), _multiple(channels_in, TOGETHER)
    # A thread's points of a tile, and twice the split operand of one of them.
    tile_bytes = 4 * points * wide / target.threads + 2 * SPLIT_BYTES * depth
    weight_bytes = 4 * points * channels_in * channels_out / target.threads
    are_few = weight_bytes <= FEW_WEIGHTS_SHARE * target.l2_bytes
    share = SMALL_GROUP_SHARE if are_few else CACHE_SHARE
    room = share * target.l2_bytes - 2 * SPLIT_BYTES * depth * TOGETHER
    groups = -(-tiles // max(TOGETHER, int(room / tile_bytes)))
    group = -(-tiles // groups)
    whole = _multiple(group, TOGETHER)
    step = (whole * wide // LINE_FLOATS | 1) * LINE_FLOATS
    floats = 2 * SPLIT_BYTES * depth * (whole + TOGETHER) // 4 + points * channels_in
    return Split(group, groups, step, floats)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
