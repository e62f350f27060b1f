"""Chooses the blocking of a dense convolution on matrix units.

There are three ways: the components of all strips of channels, or of a thread's own strips, are kept in the
cache while the rows of the image are streamed; or rows are kept while a thread's own strips are streamed.
The cost model assumes that splitting numbers is free while it overlaps with products; the rest is counted.
"""

import math
from collections.abc import Iterator

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.candidate.layout import Layout, replaced
from korch.provider.cache_room import cache_room
from korch.provider.conv.vectors import (
    OfferPlan,
    image_layouts,
    image_position,
    is_dense_image,
    layouts_of,
    packed_weights,
)
from korch.provider.gemm.vectors import require_rows
from korch.provider.matrix_units import COMPONENT_BYTES, TOGETHER
from korch.provider.provider import SPLIT
from korch.schedule.contraction import NotFusedError
from korch.schedule.split_products import MOST_COMPONENTS, operand_components, pairs_of
from korch.schedule.split_windows import SplitWindowBlocking, SplitWindows
from korch.system.alignment import ceil_div, round_up
from korch.target import Target

LEAST_FULL = 0.7
"""The least used part of a step's tiles for which matrix units are tried."""

LEAST_CHANNELS = 256
"""The least channels, of both image and result, for which matrix units are tried for float32 1x1 windows."""

TILE = TOGETHER // 2
"""Pixels of a tile; a step has as many pairs of terms, and channels come in pairs of tiles."""

STEP_COST = 1.0
"""The cost of the products of a step, with 32 pixels and 32 channels of float32: the unit of time in this module."""

TAIL_COST = 0.6
"""The cost of a step with 16 pixels or fewer."""

SPLIT_COST = 0.03
"""The cost of splitting 32 float32 numbers."""

BLOCKS_COST = 1.08
"""The factor by which several blocks of kept rows cost more: a pause after each, and reading the weights again."""


def split_plans(group: Group, target: Target) -> tuple[OfferPlan, ...]:
    """Return the ways to compute a group with one dense convolution of images on matrix units."""
    if not is_dense_image(group) or not _suits_matrix_units(group):
        return ()
    root = group.body.linear[0]
    pairs = pairs_of(*operand_components(group.body, root))
    if not target.sums_components(pairs):
        return ()
    image, weights = image_position(group, root.inputs[0]), packed_weights(group, root)
    if isinstance(image, Refusal) or weights is None or weights == image:
        return ()
    plans = []
    for source, sink in image_layouts(group.input_types[image], group.body.types[root.output], target):
        layouts = layouts_of(group, root, image, source, sink)
        if source.is_plain:
            continue
        try:
            windows = SplitWindows(group, root, layouts)
            blocking = split_of(windows, target)
            require_rows(windows.program(blocking), target.lanes)
        except NotFusedError:
            continue
        inputs = replaced(layouts[0], weights, Layout((0, 2, 3, 1), ((0, TOGETHER),)))
        plans.append(OfferPlan(Offer(inputs, layouts[1], SPLIT, pairs=pairs), layouts, blocking))
    return tuple(plans)


def _suits_matrix_units(group: Group) -> bool:
    """Return whether matrix units may pay: tiles are mostly full, and there is enough work per split number.

    For a 1x1 window with few channels, splitting the image costs about as much as matrix units gain. Numbers with
    fewer components gain more.
    """
    root = group.body.linear[0]
    pairs = pairs_of(*operand_components(group.body, root))
    _, channels, height, width = group.body.types[root.output].shape
    _, terms, *window = group.body.types[root.inputs[1]].shape
    full = math.prod(n / round_up(n, TOGETHER) for n in (channels, terms))
    few = window == [1, 1] and min(channels, terms) < LEAST_CHANNELS * pairs // ALL_PAIRS
    return full >= LEAST_FULL and height * width > TOGETHER and not few


class _Sizes:
    """Sizes and costs that depend on the convolution only, not on the blocking."""

    def __init__(self, windows: SplitWindows, target: Target) -> None:
        self.target, self.images = target, windows.images
        down, across = windows.down, windows.across
        self.rows, self.columns = down.side.out, across.side.out
        self.run, self.pitch = across.pitch // across.stride, across.pitch
        self.extra = max(0, across.reach - across.pitch)
        self.planes = down.stride * across.stride
        self.classes, self.beyond = down.stride, (down.side.window - 1) * down.dilation // down.stride
        self.width = min(across.pitch, across.side.size)
        self.steps = ceil_div(windows.channels, TOGETHER)
        self.units = down.side.window * across.side.window * self.steps
        self.strips = ceil_div(windows.results, TOGETHER)
        self.components = windows.components
        self.step_bytes = COMPONENT_BYTES * self.components[1] * TOGETHER * TOGETHER
        self.step_cost = STEP_COST * pairs_of(*self.components) / ALL_PAIRS

    def image(self, rows: int) -> int:
        """Return the elements of the split image that a block reads, including its last tile's reads beyond the end."""
        pixels = (rows + self.beyond) * self.run + ceil_div(self.extra, self.pitch // self.run)
        return (self.components[0] * self.steps * self.planes * pixels + TOGETHER) * TOGETHER

    def products(self, rows: int) -> float:
        """Return the time of one step of terms for all pixels of a block and one strip of channels."""
        whole, rest = divmod((rows - 1) * self.run + self.columns, TOGETHER)
        tail = 0.0 if rest == 0 else TAIL_COST if rest <= TILE else 1.0
        return self.step_cost * (whole + tail)

    def split_rows(self, rows: int) -> float:
        """Return the time of splitting the rows that a block reads."""
        return self._split_cost(0) * (rows + self.beyond) * self.classes * self.width * self.steps

    def split_strip(self) -> float:
        """Return the time of splitting the weights of a strip."""
        return self._split_cost(1) * self.units * TOGETHER

    def _split_cost(self, position: int) -> float:
        return SPLIT_COST * (1 + self.components[position]) / (1 + MOST_COMPONENTS)


def split_of(windows: SplitWindows, target: Target) -> SplitWindowBlocking:
    """Choose the blocking of a dense convolution."""
    sizes = _Sizes(windows, target)
    return min(_choices(sizes), key=lambda choice: choice[0])[1]


def _choices(sizes: _Sizes) -> Iterator[tuple[float, SplitWindowBlocking]]:
    teams = max(1, sizes.target.threads // math.gcd(sizes.images, sizes.target.threads))
    yield from _rows_pass(sizes, min(teams, sizes.rows), 1)
    if teams > 1 and sizes.strips > 1:
        yield from _rows_pass(sizes, 1, min(teams, sizes.strips))
    yield _strips_pass(sizes)


def _rows_pass(sizes: _Sizes, chunks: int, parts: int) -> Iterator[tuple[float, SplitWindowBlocking]]:
    """Yield the ways that keep strips in the cache, with estimated times in units of `STEP_COST`."""
    own = ceil_div(sizes.strips, parts)
    fitting = max(1, int(cache_room("operand", sizes.target) / (sizes.units * sizes.step_bytes)))
    group = ceil_div(own, ceil_div(own, fitting))
    all_rows = ceil_div(sizes.rows, chunks)
    rounds = ceil_div(sizes.images * chunks * parts, sizes.target.threads)
    for blocks in range(1, all_rows + 1):
        block = ceil_div(all_rows, blocks)
        is_large = 2 * 2 * sizes.image(block) > cache_room("streamed", sizes.target)
        if block > 1 and (is_large or ceil_div(all_rows, block) < blocks):
            continue
        whole, rest = divmod(all_rows, block)
        products = whole * sizes.products(block) + (sizes.products(rest) if rest else 0)
        cost = own * (products * sizes.units + sizes.split_strip())
        rows = whole * sizes.split_rows(block) + (sizes.split_rows(rest) if rest else 0)
        groups = ceil_div(own, group)
        cost = max(cost, groups * rows * 2) + groups * sizes.split_rows(block)
        yield rounds * cost, SplitWindowBlocking(all_rows, group * TOGETHER, block, sizes.units, True)
        if block == 1:
            return


def _strips_pass(sizes: _Sizes) -> tuple[float, SplitWindowBlocking]:
    """Return the way that keeps rows in the cache, with its estimated time."""
    parts = min(sizes.target.threads, sizes.strips)
    own = ceil_div(sizes.strips, parts)
    room = cache_room("kept rows", sizes.target)
    fitting = [b for b in range(1, sizes.rows + 1) if 2 * sizes.image(b) <= room]
    blocks = ceil_div(sizes.rows, max(fitting, default=1))
    block = ceil_div(sizes.rows, blocks)
    fitting_units = int(cache_room("chunk", sizes.target) / sizes.step_bytes)
    units = ceil_div(sizes.units, ceil_div(sizes.units, max(1, fitting_units)))
    strip = max(sizes.products(block) * sizes.units, 2 * sizes.split_strip())
    cost = own * strip + sizes.split_rows(block) + sizes.split_strip() * units / sizes.units
    cost *= blocks * (BLOCKS_COST if blocks > 1 else 1)
    rounds = ceil_div(sizes.images * parts, sizes.target.threads)
    return rounds * cost, SplitWindowBlocking(block, own * TOGETHER, block, units, False)
