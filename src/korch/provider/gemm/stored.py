"""Offers and kernels for a product by weights that are stored as integers of few bits (`matmul_stored`)."""

import sys
from dataclasses import replace

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.ops.stored import STORED, StoredAttributes
from korch.primitive.types import DType
from korch.provider.cache_room import cache_room
from korch.provider.gemm.vectors import require_rows
from korch.provider.matrix_units import COMPONENT_BYTES, TOGETHER
from korch.provider.provider import SPLIT, Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.contraction import FLOATS, Layouts, NotFusedError, extent, root_of
from korch.schedule.split_products import components_of, pairs_of
from korch.schedule.split_stored import SplitStored, SplitStoredBlocking
from korch.schedule.stored import FEW_ROWS, Stored, blocking_of, strips
from korch.schedule.stored_bytes import StoredBytes, product_of
from korch.system.alignment import ceil_div, round_up
from korch.target import Target
from korch.tile.analysis.registers import largest_of_bytes, usual_registers
from korch.tile.ir.program import TileProgram
from korch.tile.llvm.component_tiles import MOST_FACTOR_ROWS
from korch.tile.lower.staging import Machine

LEAST_ROWS = 8
"""The least rows for which matrix units may pay: with fewer, converting the integers takes most of the time."""


def offer_stored(group: Group, target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer the product on vector units, and perhaps on matrix units, with the weights in strips of columns."""
    root = root_of(group, STORED)
    if isinstance(root, Refusal):
        return root
    stored = set(root.inputs[1:])
    around = [type_ for value, type_ in enumerate(group.body.types) if value not in stored]
    if group.body.types[root.inputs[0]].dtype is not DType.F32 or any(t.dtype not in FLOATS for t in around):
        return Refusal("the elements are not floats of at most 32 bits")
    places = [group.position.get(value) for value in root.inputs[1:]]
    if any(place is None or place not in group.constant_inputs for place in places):
        return Refusal("the weights are no constants")
    if target.lanes < 4:
        return Refusal("the target has no vector registers")
    outputs = tuple(Layout.plain(type_.rank) for type_ in group.output_types)
    offers, refusals = [], []
    pairs = pairs_of(*_components(group, root))
    programs = (_vectors, _units) if target.sums_components(pairs) else (_vectors,)
    for program_of in (_bytes,) if _attributes(root).is_rounded else programs:
        try:
            inputs, _ = program_of(group, root, target)
        except NotFusedError as error:
            refusals.append(Refusal(str(error)))
        else:
            offers.append(Offer(inputs, outputs))
            if program_of is _units:
                offers[-1] = replace(offers[-1], variant=SPLIT, pairs=pairs)
    return tuple(offers) or refusals[0]


def build_stored(group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
    """Print the kernel of an offer."""
    root = root_of(group, STORED)
    if isinstance(root, Refusal):
        return root
    program_of = _bytes if _attributes(root).is_rounded else _units if offer.variant == SPLIT else _vectors
    # With few rows, large results are written past the caches, so that only the weights are read from memory.
    stream_bytes = target.l2_bytes if _sizes(group, root)[0] <= FEW_ROWS else sys.maxsize
    return kernel_of(program_of(group, root, target)[1], group, offer, target, stream_bytes=stream_bytes)


def _components(group: Group, root: Primitive) -> tuple[int, int]:
    """Return the number of bfloat16 components of an element of a row, and of an integer."""
    return components_of(group.body, root.inputs[0]), 1


def _sizes(group: Group, root: Primitive) -> tuple[int, int, int]:
    """Return the rows, columns and terms of a product."""
    *lead, terms = group.body.types[root.inputs[0]].shape
    return extent(tuple(("", n) for n in lead)), group.body.types[root.output].shape[-1], terms


def _vectors(group: Group, root: Primitive, target: Target) -> tuple[tuple[Layout, ...], TileProgram]:
    """Return the layouts of the inputs, and the program for vector units."""
    rows, _, terms = _sizes(group, root)
    registers = usual_registers(target.lanes)
    blocking = blocking_of(_attributes(root), rows, terms, target.lanes, registers)
    layouts = _layouts(group, root, blocking.strip)
    program = Stored(group, root, layouts, Machine.of(target)).program(blocking)
    require_rows(program, target.lanes)
    return layouts[0], program


def _bytes(group: Group, root: Primitive, target: Target) -> tuple[tuple[Layout, ...], TileProgram]:
    """Return the layouts of the inputs, and the program for data that is rounded to bytes."""
    registers = largest_of_bytes(target.lanes, target.has_dot)
    strip = registers.vectors * target.lanes
    inputs, outputs = _layouts(group, root, strip)
    grouped = Layout((1, 0), ((1, strip), (0, product_of(_attributes(root), target.lanes).group)))
    inputs = tuple(grouped if i == group.position[root.inputs[1]] else layout for i, layout in enumerate(inputs))
    program = StoredBytes(group, root, (inputs, outputs), Machine.of(target)).byte_program(registers)
    require_rows(program, target.lanes)
    return inputs, program


def _units(group: Group, root: Primitive, target: Target) -> tuple[tuple[Layout, ...], TileProgram]:
    """Return the layouts of the inputs, and the program for matrix units.

    The columns are divided among the threads, so that no two threads read the same weights. The components of a task's
    rows are kept in the cache, for as many terms at a time as fit.
    """
    rows, columns, terms = _sizes(group, root)
    if rows < LEAST_ROWS:
        raise NotFusedError("matrix units would multiply mostly zeros")
    layouts = _layouts(group, root, TOGETHER)
    schedule = SplitStored(group, root, layouts, Machine.of(target))
    term_bytes = COMPONENT_BYTES * _components(group, root)[0]
    room = int(cache_room("operand", target))
    block, own = _attributes(root).block, min(round_up(rows, TOGETHER), MOST_FACTOR_ROWS)
    turns = next(
        (n for n in range(1, terms // block + 1) if terms % (n * block) == 0 and terms // n * own * term_bytes <= room),
        max(1, terms // block),
    )
    parts = min(target.threads, ceil_div(columns, TOGETHER))
    blocking = SplitStoredBlocking(
        min(rows, own), min(columns, round_up(ceil_div(columns, parts), TOGETHER)), terms // turns
    )
    program = schedule.split_program(blocking)
    require_rows(program, target.lanes)
    return layouts[0], program


def _layouts(group: Group, root: Primitive, strip: int) -> Layouts:
    """Return the layouts of inputs and outputs: weights are stored in strips of columns, all else is plain."""
    stored = {group.position[value] for value in root.inputs[1:]}
    inputs = tuple(
        strips(strip) if i in stored else Layout.plain(type_.rank) for i, type_ in enumerate(group.input_types)
    )
    return inputs, tuple(Layout.plain(type_.rank) for type_ in group.output_types)


def _attributes(root: Primitive) -> StoredAttributes:
    return root.attributes_as(StoredAttributes)
