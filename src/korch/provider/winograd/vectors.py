"""Chooses the blocking of a Winograd convolution on vector units from the sizes of caches and registers."""

from dataclasses import replace

from korch.provider.cache_room import cache_room
from korch.schedule.blocks import evenly
from korch.schedule.winograd import Winograd, WinogradBlocking
from korch.target import Target
from korch.tile.analysis.registers import BYTE_REGISTERS


def blocking_of(
    points: int, tiles: int, channels: tuple[int, int], target: Target, is_shared: bool, element_bytes: int = 4
) -> WinogradBlocking:
    """Choose the sizes.

    Args:
        points: the elements of a transformed tile.
        tiles: the number of all tiles.
        channels: the channels of the image and of the result.
        target: the machine, with its caches, registers and threads.
        is_shared: whether all tiles are transformed first, and channels are divided among the threads.
        element_bytes: the bytes of an element of a transformed tile.
    """
    blocks = channels[1] // target.lanes
    vectors = next(n for n in (2, 3, 1) if blocks % n == 0)
    most_rows = (target.registers - 4) // vectors
    group = tiles
    if not is_shared:
        most = max(most_rows // 2, int(cache_room("tiles", target) / (element_bytes * points * channels[0])))
        per_thread = -(-tiles // target.threads)
        group = -(-per_thread // -(-per_thread // most))
        group = evenly(tiles, group, 1, target.threads, max(1, most_rows // 2))
    # Each block of rows loads the weights once more, which costs as much as a row.
    candidates = range(max(1, most_rows // 2), most_rows + 1)
    rows = min(candidates, key=lambda r: (group + -(-group // r), -r))
    return WinogradBlocking(vectors, min(rows, group), group, is_shared)


def blocking_for(schedule: Winograd, target: Target, is_shared: bool) -> WinogradBlocking:
    """Return the blocking for a convolution."""
    channels = schedule.channels, schedule.outputs
    size_bytes = schedule.dtype.size_bytes
    found = blocking_of(schedule.points, schedule.tiles, channels, target, is_shared, size_bytes)
    if schedule.dtype.is_float:
        return found
    return replace(found, rows=min(BYTE_REGISTERS[target.lanes].rows, found.rows))
