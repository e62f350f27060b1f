"""Chains of convolutions: the layouts and the blockings of their tile programs, on vector and on matrix units."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.primitive.op import Category
from korch.provider.cache_room import cache_room
from korch.provider.conv.rows import lines_of_task
from korch.provider.conv.tiles import pixels_cost, worth_it
from korch.provider.conv.vectors import WINDOWS, OfferPlan, image_layouts, image_position, layouts_of
from korch.provider.gemm.vectors import require_neighbours
from korch.provider.matrix_units import STEP_BYTES, TOGETHER, components_layout
from korch.provider.provider import SPLIT, Kernel
from korch.schedule.chains import Chain, ChainBlocking, Link
from korch.schedule.contraction import Layouts, NotFusedError, refuse_outputs, refuse_types
from korch.schedule.depthwise import weights_layout
from korch.system.alignment import ceil_div
from korch.target import Target
from korch.tile.ir.program import Registers
from korch.tile.lower.staging import Machine

MANY_ROWS = 32
"""With this many rows per thread, a thread's extra row, or rows that two threads both compute, hardly matter."""

PLACES = 8
"""The most pixels of a row of a depthwise convolution that are in registers."""

MOST_VECTORS = 5
"""The most vectors of channels that are computed together."""

LEAST_CHANNELS = 64
"""The least channels, read or written, for which matrix units are tried if they fill tiles; else twice as many."""


def chain_plans(group: Group, target: Target) -> tuple[OfferPlan, ...] | Refusal:
    """Return the ways to compute a group with several convolutions, or why there is none."""
    image = _refused_or_image(group, target)
    if isinstance(image, Refusal):
        return image
    root, machine = group.body.linear[-1], Machine.of(target)
    is_added = len(group.body.consumers[group.body.inputs[image][1]]) > 1  # a later read depends on its layout, too
    plans: list[OfferPlan] = []
    refusal = Refusal("no layout fits both the inputs and the outputs")
    blockings: tuple[tuple[str, ChainBlocking], ...] = ()  # the blockings are the same for all layouts
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
            plans.append(OfferPlan(Offer(inputs, layouts[1], f"{WINDOWS} {variant}"), layouts, blocking))
        if target.isa == "amx" and _suits_matrix_units(chain, target):
            plans += _split_plans(group, chain, layouts, blockings, target)
    return tuple(plans) or refusal


def _suits_matrix_units(chain: Chain, target: Target) -> bool:
    """Return whether matrix units may pay for a chain: the components of the weights must fit into the cache.

    With few channels, splitting numbers takes as long as multiplying on vector units.
    """
    channels = [(link.channels, link.results) for link in chain.links if link.can_be_split]
    components = STEP_BYTES * sum(ceil_div(m, TOGETHER) * ceil_div(n, TOGETHER) for m, n in channels)
    least = (LEAST_CHANNELS * (2 if any(n % TOGETHER for n in pair) else 1) for pair in channels)
    is_kept = 0 < components <= cache_room("components", target)
    return is_kept and all(max(pair) >= n for pair, n in zip(channels, least, strict=True))


def _split_plans(
    group: Group, chain: Chain, layouts: Layouts, blockings: tuple[tuple[str, ChainBlocking], ...], target: Target
) -> Iterator[OfferPlan]:
    """Yield the ways to compute a chain on matrix units, for the blockings whose operands they can read."""
    vector_flop = sum(group.body.work_flop(link.root) for link in chain.links if not link.can_be_split)
    for variant, way in blockings:
        if way.channels < chain.links[-1].results and way.channels % TOGETHER:
            continue
        block = _fitting(chain, way.rows, way.channels, cache_room("rows beside components", target))
        registers = zip(chain.links, way.registers, strict=True)
        blocking = replace(
            way, block=block, registers=tuple(None if link.can_be_split else own for link, own in registers)
        )
        inputs = _packed(group, chain, layouts[0], blocking, target)
        offer = Offer(inputs, layouts[1], f"{SPLIT} {variant}", 0, ALL_PAIRS, vector_flop)
        yield OfferPlan(offer, layouts, blocking)


def chain_kernel(group: Group, plan: OfferPlan, target: Target) -> Kernel | Refusal:
    """Print the kernel of a plan, or return why the steps between and after the convolutions can't be fused.

    `chain_plans` checks the steps after the last convolution only, and for one layout unless the image is read again
    later, because the check is slow and hardly ever fails.
    """
    if isinstance(plan.blocking, ChainBlocking):
        try:
            chain = Chain(group, plan.layouts, Machine.of(target))
            _require_neighbours(chain, plan.blocking, target, only_last=False)
            return plan.kernel(group, target)
        except NotFusedError as error:
            return Refusal(str(error))
    return plan.kernel(group, target)


def _require_neighbours(chain: Chain, blocking: ChainBlocking, target: Target, only_last: bool) -> None:
    for after in chain.finish(blocking, only_last):
        require_neighbours(after, target.lanes)


def _refused_or_image(group: Group, target: Target) -> int | Refusal:
    """Return the position of the input image of a chain, or why the group is not a supported chain."""
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
    refusal = refuse_types(body, *body.linear) or refuse_outputs(body, body.linear[-1])
    return refusal or image_position(group, body.linear[0].inputs[0])


def _packed(
    group: Group, chain: Chain, layouts: tuple[Layout, ...], blocking: ChainBlocking, target: Target
) -> tuple[Layout, ...]:
    """Return the layouts of the inputs, with weights packed in panels."""
    found, order = list(layouts), (0, 2, 3, 1)
    for link, registers in zip(chain.links, blocking.registers, strict=True):
        if registers is None:
            own = components_layout(order, columns=0, terms=1, is_split=True)
        elif link.is_depthwise:
            own = weights_layout(target.lanes, 4, is_of_bytes=False)
        else:
            own = Layout(order, ((0, registers.vectors * target.lanes),))
        found[group.position[link.root.inputs[1]]] = own
    return tuple(found)


def _blockings(chain: Chain, target: Target) -> Iterator[tuple[str, ChainBlocking]]:
    """Yield the ways to divide a chain among threads, with their names: by rows, or by channels if rows are few."""
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


def _blocking(chain: Chain, rows: int, channels: int, target: Target) -> ChainBlocking:
    """Return the blocking of tasks of `rows` rows and `channels` channels: a block of rows fits into the cache."""
    last = chain.links[-1].results
    own = [channels if channels < last else link.results for link in chain.links]
    links = zip(chain.links, own, strict=True)
    registers = (_registers(link, n, target, link is chain.links[0]) for link, n in links)
    block = _fitting(chain, rows, channels, cache_room("rows between", target))
    return ChainBlocking(rows, block, channels, tuple(registers))


def _fitting(chain: Chain, rows: int, channels: int, most_bytes: float) -> int:
    """Return the rows of a block such that the unsplit intermediate rows between convolutions fit in `most_bytes`."""
    is_part = channels < chain.links[-1].results

    def tile_bytes(block: int) -> int:
        kept = (
            tile.height * link.columns.out * (channels if is_part else link.results)
            for tile, link in zip(chain.tiles(block, rows), chain.links, strict=False)
        )
        return 4 * sum(kept)

    fitting = bisect.bisect_right(range(1, rows + 1), most_bytes, key=tile_bytes)
    return ceil_div(rows, ceil_div(rows, max(1, fitting)))


def _registers(link: Link, channels: int, target: Target, is_first: bool) -> Registers:
    """Return the pixels and vectors of channels that a link computes together; parts of channels are whole panels.

    Prefetching pays only for the first link, which reads the image.
    """
    width = link.columns.out
    if link.is_depthwise:
        return Registers(ceil_div(width, ceil_div(width, PLACES)), 1, fetches_out=is_first)
    sums = target.registers - 4
    vectors = vectors_of(channels, width, sums, target)
    while channels < link.results and channels % (vectors * target.lanes):
        vectors -= 1
    return Registers(pixels_of(width, sums // vectors, vectors)[0], vectors)


def vectors_of(channels: int, width: int, sums: int, target: Target) -> int:
    """Return how many vectors of channels to compute together: two, unless another number is much faster."""
    all_vectors = ceil_div(channels, target.lanes)

    def total(vectors: int) -> float:
        return ceil_div(all_vectors, vectors) * pixels_of(width, sums // vectors, vectors)[1]

    usual = min(2, all_vectors)
    choices = range(usual, min(all_vectors, MOST_VECTORS) + 1)
    best = min(choices, key=lambda vectors: (total(vectors), vectors))
    return worth_it(best, usual, total)


def pixels_of(width: int, most: int, vectors: int) -> tuple[int, float]:
    """Return how many pixels of a row to compute together for the least time, and the time of a whole row."""
    costs = ((pixels_cost(width, p, vectors), -p) for p in range(1, min(width, most) + 1))
    total, best = min(costs)
    return -best, total
