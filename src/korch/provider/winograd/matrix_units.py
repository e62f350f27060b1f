"""Chooses the blocking of a Winograd convolution on matrix units.

Either each thread streams all weights for each group of its tiles, or the points (the elements of a transformed tile)
are divided among the threads. The unit of cost is the time of a step: the products of 32 tiles by 32 channels of the
image and 32 of the result, at one point.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from korch.provider.cache_room import cache_room
from korch.provider.matrix_units import STEP_BYTES, TOGETHER, components_layout
from korch.schedule.blocks import evenly
from korch.schedule.split_winograd import SplitWinograd, SplitWinogradBlocking
from korch.system.alignment import ceil_div, round_up
from korch.target import Target

WEIGHTS = components_layout((3, 0, 1, 2), columns=3, terms=2, is_split=True)
"""The layout of transformed weights."""

LEAST_CHANNELS = 64
"""The least channels of image and of result: with fewer, transforms take longer than products."""

LEAST_TILES = TOGETHER // 2 + 1
"""The least tiles: fewer leave the units half empty, and reading a weight costs more than its products gain."""

TAIL_COST = 0.6
"""The cost of a step with 16 tiles or fewer."""

READ_COST = 0.8
"""The cost of reading the weights of a step, or as many bytes of points that are not in the level-2 cache."""

SHARED_COST = 0.65
"""The cost of reading as many bytes of points that another thread may have computed."""

STAGES_COST = 50
"""The cost of running three stages instead of one."""

TASK_VECTORS = 4
"""The most vectors of channels that are transformed back together."""

LEAST_BALANCE = 0.9
"""The least part of the time in which threads should be busy."""


def suits_matrix_units(schedule: SplitWinograd, target: Target) -> bool:
    """Return whether matrix units may pay: whether their tiles are mostly full."""
    is_wide = min(schedule.channels, schedule.outputs) >= LEAST_CHANNELS and schedule.outputs % TOGETHER == 0
    return target.isa == "amx" and schedule.dtype.is_float and is_wide and schedule.tiles >= LEAST_TILES


def split_blocking(schedule: SplitWinograd, target: Target) -> SplitWinogradBlocking:
    """Return the blocking with the least estimated cost."""
    found = min(_choices(schedule, target), key=lambda choice: choice[0])[1]
    group = evenly(schedule.tiles, found.group, 1, target.threads, TOGETHER)
    return found if found.run else replace(found, group=group)


def _choices(schedule: SplitWinograd, target: Target) -> Iterator[tuple[float, SplitWinogradBlocking]]:
    """Yield blockings with their estimated costs."""
    threads, tiles = target.threads, schedule.tiles
    channels = schedule.channels, schedule.outputs
    vectors = math.gcd(channels[1] // schedule.lanes, TASK_VECTORS)
    steps = schedule.points * math.prod(ceil_div(n, TOGETHER) for n in channels)
    own, tile_bytes = ceil_div(tiles, threads), 4 * schedule.points * max(channels)
    for groups in range(1, ceil_div(own, TOGETHER) + 1):
        group = ceil_div(own, groups)
        moved = 2 * max(0.0, group * tile_bytes - cache_room("operand", target)) / STEP_BYTES
        yield (
            groups * (steps * (_products(group) + READ_COST) + READ_COST * moved),
            SplitWinogradBlocking(vectors, group),
        )
    if threads > 1:
        run, parts = _shares(schedule, threads)
        moved = 2 * 4 * schedule.points * sum(channels) * tiles / STEP_BYTES
        cost = (steps * (_products(tiles) + READ_COST) + SHARED_COST * moved) / threads + STAGES_COST
        yield cost, SplitWinogradBlocking(vectors, tiles, run, parts)


def _products(tiles: int) -> float:
    """Return the cost of a step for a number of tiles, which may exceed 32."""
    whole, rest = divmod(tiles, TOGETHER)
    return whole + (0 if rest == 0 else TAIL_COST if rest <= TOGETHER // 2 else 1)


def _shares(schedule: SplitWinograd, threads: int) -> tuple[int, int]:
    """Return how many points a task multiplies, and by how many tasks a point's channels are divided.

    There are as few tasks as keep all threads busy.
    """

    def is_even(tasks: int) -> bool:
        return tasks >= LEAST_BALANCE * round_up(tasks, threads)

    points, strips = schedule.points, ceil_div(schedule.outputs, TOGETHER)
    runs = (run for run in range(points, 1, -1) if points % run == 0 and is_even(points // run))
    run = next(runs, 1)
    return run, 1 if run > 1 else next((parts for parts in range(1, strips) if is_even(points * parts)), strips)
