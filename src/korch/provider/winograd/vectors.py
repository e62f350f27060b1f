"""A convolution in Winograd's space on vector units: the sizes of its tile program, from the caches."""

from __future__ import annotations

from dataclasses import replace

from korch.schedule.winograd import Winograd, WinogradBlocking
from korch.target import Target
from korch.tile.cpp.steps import BYTE_REGISTERS

CACHE_SHARE = 0.9
"""The part of the level-2 cache that a group of transformed tiles may fill."""


def blocking_of(
    points: int, tiles: int, channels: tuple[int, int], target: Target, is_shared: bool, element_bytes: int = 4
) -> WinogradBlocking:
    """Choose the sizes.

    Args:
        points: elements of a transformed tile.
        tiles: in all.
        channels: of the image and of the result.
        target: its caches, registers and threads.
        is_shared: whether all tiles are transformed first, and each thread has its own channels.
        element_bytes: of a transformed tile.
    """
    blocks = channels[1] // target.lanes
    vectors = next(n for n in (2, 3, 1) if blocks % n == 0)
    most_rows = (target.registers - 4) // vectors
    group = tiles
    if not is_shared:
        most = max(most_rows // 2, int(CACHE_SHARE * target.l2_bytes / (element_bytes * points * channels[0])))
        per_thread = -(-tiles // target.threads)
        group = -(-per_thread // -(-per_thread // most))
    # With a turn over the terms the weights are loaded once more, which costs as much as a row.
    candidates = range(max(1, most_rows // 2), most_rows + 1)
    rows = min(candidates, key=lambda r: (group + -(-group // r), -r))
    return WinogradBlocking(vectors, min(rows, group), group, is_shared)


def blocking_for(schedule: Winograd, target: Target, is_shared: bool) -> WinogradBlocking:
    """Return the sizes for a convolution."""
    channels = schedule.channels, schedule.outputs
    size_bytes = schedule.dtype.size_bytes
    found = blocking_of(schedule.points, schedule.tiles, channels, target, is_shared, size_bytes)
    if schedule.dtype.is_float:
        return found
    return replace(found, rows=min(BYTE_REGISTERS[target.lanes].rows, found.rows))
