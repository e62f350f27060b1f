"""Offers and kernels for convolutions of bytes, with exact 32-bit sums, from tile programs.

Images are stored channels-last. For a 1x1 window, rows may be read in place. For other windows, each task
copies rows into a tile in which the terms of a row are adjacent; if vector units multiply 16-bit numbers,
all rows are copied. Weights are packed when the kernel is built.
In a depthwise convolution, the lanes of a vector are channels (`schedule/depthwise.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last, layout_choices, replaced
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.provider.conv.rows import lines_of_task
from korch.provider.conv.units import can_use_units, program_on_units, weights_in_steps
from korch.provider.gemm.vectors import require_rows
from korch.provider.matrix_units import BYTE_PAIRS
from korch.provider.provider import TILES, Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule import depthwise
from korch.schedule.contraction import (
    Contraction,
    Layouts,
    NotFusedError,
    contraction_of,
    extent,
    is_of_bytes,
    refuse_outputs,
    refuse_types,
    root_of,
)
from korch.schedule.depthwise import Depthwise, is_depthwise, weights_layout
from korch.schedule.few_channels import FewChannels
from korch.schedule.products import ProductBlocking, Products, terms_together
from korch.system.alignment import ceil_div, round_up
from korch.target import Target
from korch.tile.analysis.registers import largest_of_bytes
from korch.tile.ir.program import Registers, TileProgram
from korch.tile.lower.staging import Machine

MOST_TILE_BYTES = 192 << 10
"""The most bytes of rows that a task copies: they fit into the level-2 cache with the weights of some columns."""

FEW_ROWS = 8
"""With fewer rows per thread, the channels of a depthwise convolution are divided among threads, not the rows."""

PLACES = 7
"""The pixels of a row of a depthwise convolution that are in registers at a time: it divides common widths."""

ROWS = (16, 128)
"""The fewest and the most rows of a task."""

MORE_BLOCKS = 4
"""This many numbers of tasks per thread are tried, so that all threads have equally many rows."""

COLUMNS_COST = 0.3
"""The time to load the columns of a term, in rows."""


def multiplies_bytes(group: Group) -> bool:
    """Return whether a group is one convolution of bytes."""
    linear = group.body.linear
    return len(linear) == 1 and linear[0].op == "conv" and is_of_bytes(group.body, linear[0])


class ByteConvolutions:
    """Makes offers and kernels; a program is built once and cached for both."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, Target, Layouts, bool], TileProgram | Refusal] = {}

    def offers(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Return the offers for a group with a convolution of bytes."""
        root = _root(group)
        if isinstance(root, Refusal):
            return root
        offers, refusal = [], Refusal("no layout fits both the inputs and the outputs")
        for inputs, outputs in _layouts(group, root, target):
            in_tiles = can_use_units(group, root, target)
            program = self._program(group, root, (inputs, outputs), target, in_tiles)
            if in_tiles and isinstance(program, Refusal):
                in_tiles, program = False, self._program(group, root, (inputs, outputs), target, False)
            if isinstance(program, Refusal):
                refusal = program
                continue
            weights = weights_in_steps(group, root) if in_tiles else _weights(group, root, target)
            own = replaced(inputs, group.position[root.inputs[1]], weights)
            offers.append(Offer(own, outputs, TILES, pairs=BYTE_PAIRS) if in_tiles else Offer(own, outputs))
        return tuple(dict.fromkeys(offers)) or refusal

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return the kernel for one of the offers."""
        root = _root(group)
        if isinstance(root, Refusal):
            return root
        plain = Layout.plain(group.body.types[root.inputs[1]].rank)
        layouts = replaced(offer.inputs, group.position[root.inputs[1]], plain), offer.outputs
        program = self._program(group, root, layouts, target, offer.variant == TILES)
        return program if isinstance(program, Refusal) else kernel_of(program, group, offer, target)

    def _program(
        self, group: Group, root: Primitive, layouts: Layouts, target: Target, in_tiles: bool
    ) -> TileProgram | Refusal:
        """Return the program for the given layouts, in which the weights' layout is plain."""
        key = (group.key, target, layouts, in_tiles)
        if key not in self._programs:
            program = program_on_units if in_tiles else _program
            try:
                self._programs[key] = program(group, root, layouts, target)
            except NotFusedError as error:
                self._programs[key] = Refusal(str(error))
        return self._programs[key]


def _root(group: Group) -> Primitive | Refusal:
    root = root_of(group, "conv")
    if isinstance(root, Refusal):
        return root
    position = group.position.get(root.inputs[1])
    if position is None or position not in group.constant_inputs:
        return Refusal("the weights are not constant")
    return refuse_types(group.body, root, with_bytes=True) or refuse_outputs(group.body, root) or root


def _registers(target: Target) -> Registers:
    return largest_of_bytes(target.lanes, target.has_dot)


def _is_depthwise(group: Group, root: Primitive) -> bool:
    image, weights = (group.body.types[value].shape for value in root.inputs)
    return is_depthwise(image, weights, root.attributes_as(ConvAttributes))


def _weights(group: Group, root: Primitive, target: Target) -> Layout:
    """Return the layout of weights in panels of columns, with groups of adjacent terms."""
    if _is_depthwise(group, root):
        return weights_layout(target.lanes, 4, is_of_bytes=True)
    shape = group.body.types[root.inputs[1]].shape
    order = (0, *range(2, len(shape)), 1)
    innermost = next((axis for axis in reversed(order[1:]) if shape[axis] > 1), 1)  # an axis of one channel is skipped
    if _has_few_channels(group, root, target):
        innermost = 1  # channels are padded to whole pairs, even one
    columns, terms = _registers(target).vectors * target.lanes, terms_together(target.lanes)
    return Layout(order, ((0, columns), (innermost, terms)))


def _layouts(group: Group, root: Primitive, target: Target) -> Iterator[Layouts]:
    """Yield channels-last layouts of all images; if the image has few channels, also all inputs plain."""

    def last(type_: ValueType) -> Layout:
        found = channels_last(type_.rank).normalized(type_.shape) if type_.rank >= 3 else Layout.plain(type_.rank)
        return found if found in layout_choices(type_, target.lanes) else Layout.plain(type_.rank)

    types = group.input_types
    inputs = tuple(
        Layout.plain(type_.rank) if i in group.constant_inputs else last(type_) for i, type_ in enumerate(types)
    )
    outputs = tuple(map(last, group.output_types))
    yield inputs, outputs
    if group.body.types[root.inputs[0]].shape[1] < target.lanes:
        yield tuple(Layout.plain(type_.rank) for type_ in types), outputs


def _program(group: Group, root: Primitive, layouts: Layouts, target: Target) -> TileProgram:
    if target.lanes < 4:
        raise NotFusedError("the target has no vector registers")
    if _is_depthwise(group, root):
        return _depthwise_program(Depthwise(group, root, layouts, target.lanes), target)
    if _has_few_channels(group, root, target):
        return _few_channels_program(FewChannels(group, root, layouts, target.lanes, _registers(target)), target)
    contraction = contraction_of(group, root, last=True)
    registers = _registers(target)
    strip = registers.vectors * target.lanes
    if contraction.batch and extent(contraction.columns) % strip:
        raise NotFusedError("the channels of a group do not fill vector registers")
    schedule = Products(group, root, layouts, contraction, Machine.of(target))
    program = schedule.program(_blocking(contraction, schedule, registers, strip, target))
    require_rows(program, target.lanes)
    return program


def _has_few_channels(group: Group, root: Primitive, target: Target) -> bool:
    """Return whether the windows have so few channels that copying each window takes longer than the products."""
    weights, attributes = group.body.types[root.inputs[1]].shape, root.attributes_as(ConvAttributes)
    is_window = len(weights) == 4 and math.prod(weights[2:]) > 1 and attributes.dilations[-1] == attributes.groups == 1
    return is_window and weights[1] < target.lanes


def _few_channels_program(schedule: FewChannels, target: Target) -> TileProgram:
    """Return the program in which each task copies as many rows as fit into the level-1 cache."""
    row_bytes = schedule.row * schedule.product.types[0].size_bytes
    room = target.l1_bytes // row_bytes - schedule.down.reach(1)
    fitting = room // schedule.down.stride + 1
    rows = lines_of_task(schedule.down.out, fitting, schedule.images, target.threads)
    program = schedule.program(rows)
    require_rows(program, target.lanes)
    return program


def _depthwise_program(schedule: Depthwise, target: Target) -> TileProgram:
    """Return the program in which threads divide the rows, or the channels if there are few rows."""
    side, last = schedule.sides
    has_few = side.out * schedule.images < FEW_ROWS * target.threads
    is_split = has_few and schedule.channels >= target.lanes * target.threads
    teams = target.threads if is_split else 1
    channels = -(-schedule.channels // (target.lanes * teams)) * target.lanes if is_split else schedule.channels
    row_bytes = last.reach(last.out) * channels * side.stride
    tasks = teams if is_split else schedule.images
    rows = lines_of_task(side.out, MOST_TILE_BYTES // row_bytes, tasks, target.threads)
    program = schedule.program(depthwise.DepthwiseBlocking(rows, min(channels, schedule.channels), PLACES))
    require_rows(program, target.lanes)
    return program


def _blocking(
    contraction: Contraction, schedule: Products, registers: Registers, strip: int, target: Target
) -> ProductBlocking:
    """Return a blocking with equally many rows for each thread; with few rows, columns are divided, too."""
    m, n, terms = extent(contraction.rows), extent(contraction.columns), extent(schedule.terms)
    fewest, most = ROWS
    fitting = max(fewest, min(most, MOST_TILE_BYTES // (terms * schedule.dtype.size_bytes)))
    teams = target.threads if m >= fewest * target.threads else 1
    blocks = ceil_div(m, fitting * teams) * teams

    def choice(rows: int, count: int) -> tuple[float, int, int]:
        """Return the rows of the thread with most of them, each with the time to load columns; then both sizes."""
        block = round_up(ceil_div(m, count), rows)
        longest = ceil_div(ceil_div(m, block), teams) * block
        return longest * (1 + COLUMNS_COST / rows), block, rows

    heights = range(registers.rows, registers.rows // 2, -1) if m > registers.rows else (m,)
    counts = range(blocks, blocks + MORE_BLOCKS * teams, teams)
    _, block, rows = min(choice(height, count) for height in heights for count in counts)
    parts = target.threads if blocks < target.threads and not contraction.batch else 1
    columns = n if parts == 1 else min(n, -(-n // (strip * parts)) * strip)
    registers = replace(registers, rows=rows, fetches_b=terms * n > target.l1_bytes)
    return ProductBlocking(min(m, block), columns, terms, (False, True), registers, strip)
