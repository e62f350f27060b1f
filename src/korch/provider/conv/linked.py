"""Chains of convolutions on vector units: the layouts and the blocking of their tile programs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from korch.alignment import ceil_div
from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.primitive.op import Category
from korch.provider.conv.rows import lines_of_task
from korch.provider.conv.shape import pixels_of, vectors_of
from korch.provider.conv.vectors import WINDOWS, Plan, image_layouts, layouts_of
from korch.provider.gemm.vectors import require_neighbours
from korch.provider.image import image_position
from korch.provider.provider import Kernel
from korch.schedule.chains import Blocking, Chain, Link
from korch.schedule.contraction import NotFusedError, refuse_types
from korch.schedule.depthwise import weights_layout
from korch.target import Target
from korch.tile.program import Registers
from korch.tile.staging import Machine

CACHE_SHARE = 0.75
"""The part of the level-2 cache that the rows between convolutions may fill."""

MANY_ROWS = 16
"""Rows for each thread from which on it doesn't matter that some have one more."""

PLACES = 8
"""Places of a row of a depthwise convolution that are in registers at most."""


def chain_plans(group: Group, target: Target) -> tuple[Plan, ...] | Refusal:
    """Return the ways to compute a group with several convolutions, or why there is none."""
    image = _refused_or_image(group, target)
    if isinstance(image, Refusal):
        return image
    root, machine = group.body.linear[-1], Machine(target.lanes, target.threads)
    is_added = len(group.body.consumers[group.body.inputs[image][1]]) > 1  # then its layout matters there, too
    plans: list[Plan] = []
    refusal = Refusal("no layout fits both the inputs and the outputs")
    blockings: tuple[tuple[str, Blocking], ...] = ()  # they are the same for all layouts
    for source, sink in image_layouts(group.input_types[image], group.body.types[root.output], target):
        layouts = layouts_of(group, root, image, source, sink)
        try:
            chain = Chain(group, layouts, machine)
            blockings = blockings or tuple(_blockings(chain, target))
            if not plans or is_added:
                _require_neighbours(chain, blockings[0][1], target, only_last=True)
        except NotFusedError as error:
            refusal = Refusal(str(error))
            continue
        for variant, blocking in blockings:
            inputs = _packed(group, chain, layouts[0], blocking, target)
            plans.append(Plan(Offer(inputs, layouts[1], f"{WINDOWS} {variant}"), layouts, blocking))
    return tuple(plans) or refusal


def chain_kernel(group: Group, plan: Plan, target: Target) -> Kernel | Refusal:
    """Print the kernel of a plan, or return why what stands around the convolutions can't be computed with them.

    Offers ask that of the last convolution only, and of one layout unless the image is read again after the first, as
    it takes long for something that hardly occurs.
    """
    if isinstance(plan.blocking, Blocking):
        try:
            chain = Chain(group, plan.layouts, Machine(target.lanes, target.threads))
            _require_neighbours(chain, plan.blocking, target, only_last=False)
        except NotFusedError as error:
            return Refusal(str(error))
    return plan.kernel(group, target)


def _require_neighbours(chain: Chain, blocking: Blocking, target: Target, only_last: bool) -> None:
    for after in chain.finish(blocking, only_last):
        require_neighbours(after, target.lanes)


def _refused_or_image(group: Group, target: Target) -> int | Refusal:
    """Return the position of the image that a chain reads, or why the group is none."""
    body = group.body
    if not body.linear or any(p.op != "conv" for p in body.linear):
        return Refusal("it is not a convolution")
    for primitive in body.primitives:
        if primitive.row.category in (Category.REDUCE, Category.OPAQUE):
            return Refusal(f"{primitive.op} is not fused into a convolution")
    if any(type_.size == 0 for type_ in (*group.input_types, *group.output_types)):
        return Refusal("a tensor is empty")
    if target.lanes < 4:
        return Refusal("the target has no vector registers")
    constants = {body.inputs[position][1] for position in group.constant_inputs}
    if any(root.inputs[1] not in constants or len(body.consumers[root.inputs[1]]) > 1 for root in body.linear):
        return Refusal("the weights are not constant")
    return refuse_types(body, *body.linear) or image_position(group, body.linear[0].inputs[0])


def _packed(
    group: Group, chain: Chain, layouts: tuple[Layout, ...], blocking: Blocking, target: Target
) -> tuple[Layout, ...]:
    """Return the layouts of the inputs, those of weights in panels."""
    found = list(layouts)
    for link, registers in zip(chain.links, blocking.registers, strict=True):
        dense = Layout((0, 2, 3, 1), ((0, registers.vectors * target.lanes),))
        own = weights_layout(target.lanes, 4, is_of_bytes=False) if link.is_depthwise else dense
        found[group.position[link.root.inputs[1]]] = own
    return tuple(found)


def _blockings(chain: Chain, target: Target) -> Iterator[tuple[str, Blocking]]:
    """Yield the ways in which threads share a chain, with their names: by rows, or by channels where rows are few."""
    last, lanes = chain.links[-1], target.lanes
    teams = target.threads // math.gcd(last.images, target.threads)
    yield (
        "rows",
        _blocking(
            chain, lines_of_task(last.rows.out, last.rows.out, last.images, target.threads), last.results, target
        ),
    )
    is_even = last.rows.out >= MANY_ROWS * target.threads
    if chain.can_split and teams > 1 and not is_even and last.results % (teams * lanes) == 0:
        yield "channels", _blocking(chain, last.rows.out, last.results // teams, target)


def _blocking(chain: Chain, rows: int, channels: int, target: Target) -> Blocking:
    """Return the blocking of tasks of some rows and channels: as many rows at a time as stay in the cache."""
    last = chain.links[-1].results
    own = [channels if channels < last else link.results for link in chain.links]

    def tile_bytes(block: int) -> int:
        links = zip(chain.tiles(block, rows), chain.links, own, strict=False)
        return 4 * sum(tile.height * link.columns.out * n for tile, link, n in links)

    fitting = bisect.bisect_right(range(1, rows + 1), CACHE_SHARE * target.l2_bytes, key=tile_bytes)
    turns = ceil_div(rows, max(1, fitting))
    links = zip(chain.links, own, strict=True)
    registers = (_registers(link, n, target, link is chain.links[0]) for link, n in links)
    return Blocking(rows, ceil_div(rows, turns), channels, tuple(registers))


def _registers(link: Link, channels: int, target: Target, is_first: bool) -> Registers:
    """Return the places and vectors of channels that a link computes together; parts of channels are whole panels.

    Fetching what is read next pays only where this is an image.
    """
    width = link.columns.out
    if link.is_depthwise:
        return Registers(ceil_div(width, ceil_div(width, PLACES)), 1, fetches_out=is_first)
    sums = target.registers - 4
    vectors = vectors_of(channels, width, sums, target)
    while channels < link.results and channels % (vectors * target.lanes):
        vectors -= 1
    return Registers(pixels_of(width, sums // vectors, vectors)[0], vectors)
