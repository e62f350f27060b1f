"""Convolutions on vector units: the layouts and the blockings of their tile programs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.provider.cache_room import cache_room
from korch.provider.conv.depthwise import blockings
from korch.provider.conv.rows import lines_of_task
from korch.provider.conv.tiles import FETCH, pixels_cost, worth_it
from korch.provider.gemm.blocking import WIDE_VECTORS
from korch.provider.gemm.vectors import require_neighbours
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule import depthwise
from korch.schedule.contraction import Layouts, NotFusedError, refuse_outputs, refuse_types, root_of
from korch.schedule.depthwise import Depthwise, is_depthwise, weights_layout
from korch.schedule.split_windows import SplitWindowBlocking, SplitWindows
from korch.schedule.windows import ConvBlocking, Windows
from korch.system.alignment import ceil_div
from korch.target import Target
from korch.tile.ir.program import Registers, TileProgram
from korch.tile.lower.staging import Machine

MOST_VECTORS = 8
"""The most vectors of columns that are computed together."""

FEW_TERMS = 32
"""The most terms for which tiles are wide."""

LONG_LINE = 28
"""The least pixels of a line for which lines are always read in place."""

LEAST_COLUMNS = 64
"""The least columns of a task of a 1D convolution for which a partly filled last vector doesn't matter."""


WINDOWS = "windows"
"""The first word of these kernels' variants."""

VARIANTS = ("rows", "channels")
"""What is divided among the threads: the pixels of the result or its channels."""

IN_PLACE = "rows in place"
"""The variant in which the pixels of the result are divided and windows are read directly in the image."""


@dataclass(frozen=True, slots=True)
class OfferPlan:
    """An offer, and its kernel's blocking and layouts, in which the layout of weights in panels is given as plain."""

    offer: Offer
    layouts: Layouts
    blocking: ConvBlocking | SplitWindowBlocking | depthwise.DepthwiseBlocking

    def program(self, group: Group, target: Target) -> TileProgram:
        """Return the program of the kernel."""
        root = group.body.linear[0]
        match self.blocking:
            case depthwise.DepthwiseBlocking():
                return Depthwise(group, root, self.layouts, target.lanes).program(self.blocking)
            case SplitWindowBlocking():
                return SplitWindows(group, root, self.layouts).program(self.blocking)
            case ConvBlocking():
                return Windows(group, root, self.layouts, Machine.of(target)).program(self.blocking)
            case _:
                assert_never(self.blocking)

    def kernel(self, group: Group, target: Target) -> Kernel:
        """Print the kernel."""
        return kernel_of(self.program(group, target), group, self.offer, target)


def is_dense_image(group: Group) -> bool:
    """Return whether a group has one dense 2D convolution with constant weights."""
    body = group.body
    if len(body.linear) != 1 or body.linear[0].op != "conv":
        return False
    root = body.linear[0]
    is_dense = root.attributes_as(ConvAttributes).groups == 1
    return is_dense and body.types[root.output].rank == 4 and packed_weights(group, root) is not None


def plans_of(group: Group, target: Target) -> tuple[OfferPlan, ...] | Refusal:
    """Return the ways to compute a group with one convolution, or why there is none."""
    root = root_of(group, "conv")
    if isinstance(root, Refusal):
        return root
    refusal = refuse_types(group.body, root) or refuse_outputs(group.body, root)
    if refusal is not None:
        return refusal
    image = image_position(group, root.inputs[0])
    if isinstance(image, Refusal):
        return image
    plans, refusals = [], dict[Layout, Refusal | None]()
    for way in _ways(group, root, image, target):
        layouts = layouts_of(group, root, image, way.source, way.sink)
        if way.sink not in refusals:
            refusals[way.sink] = _refusal(group, root, layouts, way.blocking, target)
        if refusals[way.sink] is None:
            inputs = list(layouts[0])
            for position, layout in way.panels:
                inputs[position] = layout
            offer = Offer(tuple(inputs), layouts[1], f"{WINDOWS} {way.variant}")
            plans.append(OfferPlan(offer, layouts, way.blocking))
    reasons = [refusal for refusal in refusals.values() if refusal is not None]
    return tuple(plans) or (reasons or [Refusal("no layout fits both the inputs and the outputs")])[-1]


def _refusal(
    group: Group,
    root: Primitive,
    layouts: Layouts,
    blocking: ConvBlocking | depthwise.DepthwiseBlocking,
    target: Target,
) -> Refusal | None:
    """Return why no program can be made for the layout of the result; the image's layout does not matter."""
    try:
        if isinstance(blocking, depthwise.DepthwiseBlocking):
            after = Depthwise(group, root, layouts, target.lanes).finish(blocking)
        else:
            after = Windows(group, root, layouts, Machine.of(target)).finish(blocking)
        require_neighbours(after, target.lanes)
    except NotFusedError as error:
        return Refusal(str(error))
    return None


@dataclass(frozen=True, slots=True)
class _Way:
    """The layouts of image and result, the blocking, and the position and layout of weights packed in panels."""

    source: Layout
    sink: Layout
    variant: str
    blocking: ConvBlocking | depthwise.DepthwiseBlocking
    panels: tuple[tuple[int, Layout], ...] = ()


def _ways(group: Group, root: Primitive, image: int, target: Target) -> Iterator[_Way]:
    plain = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    windows = Windows(group, root, (plain[0], plain[1]), Machine.of(target))
    x, y = group.input_types[image], group.body.types[root.output]
    weights, shape = packed_weights(group, root), group.body.types[root.inputs[1]].shape
    can_pack = weights is not None and weights != image and all(type_.shape == y.shape for type_ in group.output_types)
    by_lanes = can_pack and x.rank >= 4 and is_depthwise(x.shape, shape, root.attributes_as(ConvAttributes))
    fills = x.shape[1] >= target.lanes if by_lanes else windows.results >= target.lanes and is_dense_image(group)
    for variant in () if fills else VARIANTS:
        blocking = _channels_first(windows, target, variant)
        if blocking is not None:
            yield _Way(Layout.plain(x.rank), Layout.plain(y.rank), variant, blocking)
    if weights is None or not can_pack:
        return
    for source, sink in image_layouts(x, y, target):
        if by_lanes:
            schedule = Depthwise(group, root, (plain[0], plain[1]), target.lanes)
            yield from _by_lanes(schedule, source, sink, weights, target)
            continue
        for variant in _variants(windows, target):
            blocking = _pixels_first(windows, source, target, variant)
            if blocking is not None:
                layout = _panels(x.rank, blocking)
                yield _Way(source, sink, variant, blocking, ((weights, layout),))


def _by_lanes(schedule: Depthwise, source: Layout, sink: Layout, weights: int, target: Target) -> Iterator[_Way]:
    """Yield the ways to compute a depthwise convolution whose vector lanes are channels, for a pair of layouts."""
    layout = weights_layout(target.lanes, len(schedule.sides) + 2, is_of_bytes=False)
    if source.is_plain and not sink.is_plain:
        return
    for variant, blocking in blockings(schedule, source, target):
        yield _Way(source, sink, variant, blocking, ((weights, layout),))


def layouts_of(group: Group, root: Primitive, image: int, source: Layout, sink: Layout) -> Layouts:
    """Return the layouts of all inputs and outputs; weights packed in panels are given as plain."""
    shape = group.body.types[root.output].shape
    inputs = [sink if type_.shape == shape else Layout.plain(type_.rank) for type_ in group.input_types]
    inputs[image] = source
    sinks = (sink if type_.shape == shape else Layout.plain(type_.rank) for type_ in group.output_types)
    return tuple(inputs), tuple(sinks)


def packed_weights(group: Group, root: Primitive) -> int | None:
    """Return the position of weights that are constant and may be packed, or None."""
    body, value = group.body, root.inputs[1]
    makers = [body.primitives[p] for p in body.producers[value]]
    if len(makers) == 1 and body.is_widening(makers[0]):
        value = makers[0].inputs[0]
    position = group.position.get(value)
    is_constant = position in group.constant_inputs and len(body.consumers[value]) == 1
    return position if is_constant else None


def _panels(rank: int, blocking: ConvBlocking) -> Layout:
    """Return the layout of weights in panels of output channels: positions in the window, then input channels."""
    return Layout((0, *range(2, rank), 1), ((0, blocking.panels),))


def image_position(group: Group, value: int) -> int | Refusal:
    """Return the position of the input from which `value` is computed by moves and widening casts only."""
    body = group.body
    while value not in group.position:
        found = [
            p
            for p in body.primitives
            if p.output == value and (p.op in ("pad", "slice", "take") or body.is_widening(p))
        ]
        if not found:
            return Refusal("the image is computed in the group")
        value = found[0].inputs[0]
    return group.position[value]


def image_layouts(x: ValueType, y: ValueType, target: Target) -> Iterator[tuple[Layout, Layout]]:
    """Yield the layouts of image and result in which pixels are the rows of the product: channels are adjacent."""
    for kind in (channels_blocked(x.rank, target.lanes), channels_last(x.rank)):
        if x.rank < 4:
            return
        source, sink = kind.normalized(x.shape), kind.normalized(y.shape)
        if sink not in layout_choices(y, target.lanes) or (
            sink.is_plain and min(y.shape[1], math.prod(y.shape[2:])) > 1
        ):
            continue
        if source in layout_choices(x, target.lanes):
            yield source, sink
        if x.shape[1] < target.lanes:
            yield Layout.plain(x.rank), sink


def _registers(rows: int, vectors: int, target: Target) -> Registers:
    """Return the rows and vectors to compute together for the least estimated time."""
    most, is_small = target.registers - 4, target.registers < 32
    fetch = FETCH if is_small else 0.0
    least = min(2, vectors) if is_small else 1  # multiplications by a single vector take 1.45 times the time there

    def total(registers: Registers) -> float:
        parts = ((vectors // registers.vectors, registers.vectors), (vectors % registers.vectors, 1))
        return sum(count * pixels_cost(rows, registers.rows, width, fetch) for count, width in parts)

    choices = [
        Registers(min(rows, height), width)
        for width in range(least, min(MOST_VECTORS, vectors) + 1)
        for height in range(max(1, most // width // 2), most // width + 1)
    ]
    usual = Registers(min(rows, most // min(2, vectors)), min(2, vectors))
    best = min(choices, key=lambda registers: (total(registers), registers.vectors))
    return worth_it(best, usual, total)


def _wide_registers(rows: int, windows: Windows, target: Target) -> Registers | None:
    """Return wide tiles for pixels with few terms, else None. With wide tiles each pixel is loaded less often.

    64 and 128 channels of 16 and 32, of 256 x 256 and 128 x 128 pixels, take 0.73 to 0.89 of the time.
    """
    terms = windows.channels * math.prod(side.window for side in windows.sides)
    if target.registers < 32 or windows.results % (WIDE_VECTORS * target.lanes) or terms > FEW_TERMS:
        return None
    return Registers(min(rows, target.registers // WIDE_VECTORS - 2), WIDE_VECTORS)


def _lines(windows: Windows, target: Target, variant: str) -> tuple[int, ...]:
    """Return a task's extent along each spatial axis: lines of the last axis, as many as fit into the cache."""
    *_, last = windows.sides
    if len(windows.sides) == 1:
        return (last.out,)
    side, ones = windows.sides[-2], (1,) * (len(windows.sides) - 2)
    outer = math.prod((windows.images, windows.groups, *(s.out for s in windows.sides[:-2])))
    line = windows.channels * last.reach(last.out) * math.prod(s.window for s in windows.sides[:-2])
    limit = cache_room("image", target) / 4
    tasks = target.threads if variant == "channels" else outer
    rows = lines_of_task(side.out, side.out, tasks, target.threads)
    fitting = max((n for n in range(1, rows + 1) if line * side.reach(n) <= limit), default=1)
    fitted = lines_of_task(side.out, fitting, tasks, target.threads)
    weights = windows.channels * windows.results * math.prod(s.window for s in windows.sides)
    strips = ceil_div(windows.results, 2 * target.lanes)
    if 8 * weights > target.l2_bytes and ceil_div(rows, fitted) * weights >= (strips - 1) * line * rows:
        fitted = rows
    return (*ones, fitted, last.out)


def _variants(windows: Windows, target: Target) -> tuple[str, ...]:
    """Return the variants to offer when pixels are rows: what is divided among threads, and how images are read.

    Long lines are best read in place (0.56 to 0.96 of the time with a copy, for 16 shapes of 3 to 128 channels).
    Shorter lines must be copied for the weights to be read only once for several lines.
    """
    if not _can_clip(windows):
        return VARIANTS
    return (IN_PLACE, *VARIANTS[1:]) if windows.sides[-1].out >= LONG_LINE else (*VARIANTS, IN_PLACE)


def _pixels_first(windows: Windows, source: Layout, target: Target, variant: str) -> ConvBlocking | None:
    """Return the blocking of a convolution whose rows are pixels, or None if it has none."""
    places, in_place = _lines(windows, target, variant), variant == IN_PLACE
    if in_place and not _can_clip(windows):
        return None
    rows = places[-1] if in_place else math.prod(places)
    registers = _wide_registers(rows, windows, target)
    if registers is None:
        registers = _registers(rows, ceil_div(windows.results, target.lanes), target)
    is_read = all(side.window == side.stride == 1 and not side.pad for side in windows.sides)
    registers = replace(registers, fetches_out=True, fetches_a=is_read)
    strip = registers.vectors * target.lanes
    if windows.groups > 1 and windows.results % strip:
        return None
    channels = windows.results
    if variant == "channels":
        channels = ceil_div(ceil_div(channels, strip), target.threads) * strip
        if target.threads == 1 or channels >= windows.results:
            return None
    if in_place:
        beside = target.lanes if source.blocks else 1
    else:
        beside = target.lanes if source.blocks and is_read else windows.channels
    return ConvBlocking(places, channels, registers, strip, beside, in_place=in_place)


def _can_clip(windows: Windows) -> bool:
    """Return whether some windows extend beyond the image and may still be read in place."""
    is_moved = windows.root.inputs[0] not in windows.group.position
    pads = [side for side in windows.sides if side.pad or side.reach(side.out) - side.pad > side.size]
    return not is_moved and bool(pads) and all(side.window > 1 for side in pads)


def _channels_first(windows: Windows, target: Target, variant: str) -> ConvBlocking | None:
    """Return the blocking of a convolution whose rows are channels, or None if it has none."""
    places, channels, is_shared = _lines(windows, target, variant), windows.results, len(windows.sides) == 1
    if variant == "channels":
        channels = ceil_div(channels, target.threads)
        if target.threads == 1 or channels == windows.results:
            return None
    *_, last = windows.sides
    columns = places[-1]
    if len(places) > 1 and places[-2] > 1:
        pitch = last.out if last.stride > 1 else last.reach(last.out)
        columns = (places[-2] - 1) * pitch + last.out
    registers = _registers(channels, ceil_div(columns, target.lanes), target)
    strip = registers.vectors * target.lanes
    if len(places) == 1 and variant == "rows":
        outer = windows.images * windows.groups
        teams = target.threads // math.gcd(outer, target.threads)
        parts = max(teams, last.out // max(LEAST_COLUMNS, 4 * strip))
        places = (min(last.out, ceil_div(ceil_div(last.out, parts), strip) * strip),)
    return ConvBlocking(places, channels, registers, is_shared=is_shared)
