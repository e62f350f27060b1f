"""Convolutions of bytes, with exact sums of 32 bits -> offers and kernels from tile programs.

Images lie channels-last. A window of one element reads its rows in place; others are copied to a tile
of each task, where the terms of a row lie side by side. Weights are packed when the kernel is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last, layout_choices
from korch.primitive.graph import Primitive
from korch.primitive.types import ValueType
from korch.provider.gemm.vectors import require_rows
from korch.provider.provider import Kernel, Threading
from korch.schedule.contraction import (
    Contraction,
    Layouts,
    NotFusedError,
    contraction_of,
    extent,
    is_of_bytes,
    refuse_types,
    root_of,
)
from korch.schedule.products import Blocking, Products
from korch.target import Target
from korch.tile.cpp import print_cpp
from korch.tile.cpp_steps import BYTE_REGISTERS, FEW_BYTE_REGISTERS
from korch.tile.program import QUAD, Registers, TileProgram
from korch.tile.staging import Machine

MOST_TILE_BYTES = 192 << 10
"""The bytes of the rows that a task copies: they stay in the second cache beside the weights of some columns."""

ROWS = (16, 128)
"""The fewest and the most rows of a task; weights are prepared once for all of them."""


def multiplies_bytes(group: Group) -> bool:
    """Return whether a group is one convolution of bytes."""
    linear = group.body.linear
    return len(linear) == 1 and linear[0].op == "conv" and is_of_bytes(group.body, linear[0])


def offers_of_bytes(group: Group, target: Target) -> Sequence[Offer] | Refusal:
    """Return the offers for a group with a convolution of bytes."""
    root = _root(group)
    if isinstance(root, Refusal):
        return root
    offers, refusal = [], Refusal("no layout fits both the inputs and the outputs")
    for inputs, outputs in _layouts(group, root, target):
        try:
            _ = _program(group, root, (inputs, outputs), target)
        except NotFusedError as error:
            refusal = Refusal(str(error))
            continue
        packed = list(inputs)
        packed[group.position[root.inputs[1]]] = _weights(group, root, target)
        offers.append(Offer(tuple(packed), outputs))
    return tuple(dict.fromkeys(offers)) or refusal


def kernel_of_bytes(group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
    """Return the kernel for one of these offers."""
    root = _root(group)
    if isinstance(root, Refusal):
        return root
    program = _program(group, root, (offer.inputs, offer.outputs), target)
    comment = f"{group.text}layouts {' '.join(map(str, (*offer.inputs, '->', *offer.outputs)))}"
    printed = print_cpp(program, comment, target.lanes, target.threads)
    threading = Threading.TEAM if printed.is_parallel else Threading.CALLER
    return Kernel(printed.symbol, printed.source, workspace_bytes=printed.workspace_bytes, threading=threading)


def _root(group: Group) -> Primitive | Refusal:
    root = root_of(group, "conv")
    if isinstance(root, Refusal):
        return root
    position = group.position.get(root.inputs[1])
    if position is None or position not in group.constant_inputs:
        return Refusal("the weights are not constant")
    return refuse_types(group.body, root, with_bytes=True) or root


def _registers(target: Target) -> Registers:
    return BYTE_REGISTERS.get(target.lanes, FEW_BYTE_REGISTERS)


def _weights(group: Group, root: Primitive, target: Target) -> Layout:
    """Return the layout of weights in panels of columns, four terms side by side."""
    rank = group.body.types[root.inputs[1]].rank
    return Layout((0, *range(2, rank), 1), ((0, _registers(target).vectors * target.lanes), (1, QUAD)))


def _layouts(group: Group, root: Primitive, target: Target) -> Iterator[Layouts]:
    """Yield channels-last layouts of all images, and with a plain image of few channels."""

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
    """Return the program; the layout of the packed weights does not count."""
    if target.lanes < 4:
        raise NotFusedError("the target has no vector registers")
    contraction = contraction_of(group, root, last=True)
    registers = _registers(target)
    strip = registers.vectors * target.lanes
    if contraction.batch and extent(contraction.columns) % strip:
        raise NotFusedError("the channels of a group do not fill vector registers")
    schedule = Products(group, root, layouts, contraction, Machine(target.lanes, target.threads))
    program = schedule.program(_blocking(contraction, schedule, registers, strip, target))
    require_rows(program, target.lanes)
    return program


def _blocking(
    contraction: Contraction, schedule: Products, registers: Registers, strip: int, target: Target
) -> Blocking:
    """Return blocks of rows, of as many for each thread; of columns where there are few rows."""
    m, n, terms = extent(contraction.rows), extent(contraction.columns), extent(schedule.terms)
    fewest, most = ROWS
    fitting = max(fewest, min(most, MOST_TILE_BYTES // terms))
    teams = target.threads if m >= fewest * target.threads else 1
    blocks = -(-m // (fitting * teams)) * teams
    rows = min(m, -(-m // (blocks * registers.rows)) * registers.rows)
    parts = target.threads if blocks < target.threads and not contraction.batch else 1
    columns = n if parts == 1 else min(n, -(-n // (strip * parts)) * strip)
    return Blocking(rows, columns, terms, (False, True), registers, strip)
