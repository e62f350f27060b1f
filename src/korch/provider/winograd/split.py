"""A convolution in Winograd's space and a target with matrix units -> the blocking of its tile program.

Either all weights go by for each group of a thread's tiles, or each thread has its own points. Costs are estimated in
the time of a step: the products of 32 tiles by 32 channels of the image and 32 of the result, at a point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from korch.alignment import ceil_div, round_up
from korch.provider.matrix_units import STEP_BYTES, TOGETHER, components_layout
from korch.schedule.split_winograd import SplitWinograd, SplitWinogradBlocking
from korch.target import Target

WEIGHTS = components_layout((3, 0, 1, 2), columns=3, terms=2, is_split=True)
"""The layout of transformed weights."""

LEAST_CHANNELS = 64
"""On either side: with fewer, transforms take longer than products."""

LEAST_TILES = TOGETHER // 2 + 1
"""Fewer leave the units half empty, and each weight is read for less than it costs."""

TAIL_COST = 0.6
"""What a step costs for 16 tiles or fewer."""

READ_COST = 0.8
"""What it costs to read the weights of a step, or as many bytes of points that do not lie in the level-2 cache."""

SHARED_COST = 0.65
"""The same for points of which another thread may have computed the numbers."""

STAGES_COST = 50
"""What it costs to run three stages instead of one."""

CACHE_SHARE = 0.5
"""The part of the level-2 cache in which points lie."""

TASK_VECTORS = 4
"""Most vectors of channels that are transformed back together."""

LEAST_BALANCE = 0.9
"""The part of their time in which threads should have something to do."""


def suits_matrix_units(schedule: SplitWinograd, target: Target) -> bool:
    """Return whether matrix units may pay: where their tiles are mostly full."""
    is_wide = min(schedule.channels, schedule.outputs) >= LEAST_CHANNELS and schedule.outputs % TOGETHER == 0
    return target.isa == "amx" and schedule.dtype.is_float and is_wide and schedule.tiles >= LEAST_TILES


def split_blocking(schedule: SplitWinograd, target: Target) -> SplitWinogradBlocking:
    """Choose the sizes."""
    return min(_choices(schedule, target), key=lambda choice: choice[0])[1]


def _choices(schedule: SplitWinograd, target: Target) -> Iterator[tuple[float, SplitWinogradBlocking]]:
    """Yield blockings, with estimates of their time."""
    threads, tiles = target.threads, schedule.tiles
    channels = schedule.channels, schedule.outputs
    vectors = math.gcd(channels[1] // schedule.lanes, TASK_VECTORS)
    steps = schedule.points * math.prod(ceil_div(n, TOGETHER) for n in channels)
    own, tile_bytes = ceil_div(tiles, threads), 4 * schedule.points * max(channels)
    for groups in range(1, ceil_div(own, TOGETHER) + 1):
        group = ceil_div(own, groups)
        moved = 2 * max(0.0, group * tile_bytes - CACHE_SHARE * target.l2_bytes) / STEP_BYTES
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
    """Return the time of a step for some tiles."""
    whole, rest = divmod(tiles, TOGETHER)
    return whole + (0 if rest == 0 else TAIL_COST if rest <= TOGETHER // 2 else 1)


def _shares(schedule: SplitWinograd, threads: int) -> tuple[int, int]:
    """Return how many points a task multiplies, and by how many tasks: as few tasks as keep all threads busy."""

    def is_even(tasks: int) -> bool:
        return tasks >= LEAST_BALANCE * round_up(tasks, threads)

    points, strips = schedule.points, ceil_div(schedule.outputs, TOGETHER)
    runs = (run for run in range(points, 1, -1) if points % run == 0 and is_even(points // run))
    run = next(runs, 1)
    return run, 1 if run > 1 else next((parts for parts in range(1, strips) if is_even(points * parts)), strips)
