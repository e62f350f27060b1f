"""Chooses the blocking of the tile programs of float depthwise convolutions on vector units."""

import math
from collections.abc import Iterator

from korch.candidate.layout import Layout
from korch.provider.cache_room import cache_room
from korch.provider.conv.rows import lines_of_task
from korch.schedule.depthwise import Depthwise, DepthwiseBlocking
from korch.target import Target

PLACES = 8
"""The most pixels of a row that are in registers: that many independent multiplications hide their latency."""


def blockings(depthwise: Depthwise, source: Layout, target: Target) -> Iterator[tuple[str, DepthwiseBlocking]]:
    """Yield the ways to divide a convolution among threads, with their names: by rows or by channels."""
    *outer, side, last = depthwise.sides
    lanes, threads, channels = target.lanes, target.threads, depthwise.channels
    places = -(-last.out // -(-last.out // PLACES))

    is_read = depthwise.root.inputs[0] in depthwise.group.position
    area = last.reach(last.out) * math.prod(s.reach(s.out) for s in outer)

    def rows(tasks: int, channels: int) -> int:
        """Return the rows of a task, given the number of tasks without cutting rows, so that a copy fits the cache."""
        fitting = int(cache_room("image", target)) // (4 * area * channels * side.stride)
        return lines_of_task(side.out, side.out if is_read else fitting, tasks, threads)

    one = lanes if source.blocks else channels
    yield "rows", DepthwiseBlocking(rows(depthwise.images, one), one, places, True, source.blocks != ())
    if threads > 1 and channels > lanes:
        parts = channels // lanes if source.blocks else threads
        own = -(-channels // (parts * lanes)) * lanes
        tasks = depthwise.images * -(-channels // own)
        yield "channels", DepthwiseBlocking(rows(tasks, own), own, places, False, source.blocks != ())
