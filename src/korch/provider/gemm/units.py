"""Chooses the blocking of the tile programs of matrix products on matrix units."""

import math
from collections.abc import Sequence

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.provider.cache_room import cache_room
from korch.provider.gemm.blocking import VectorBlocking as Sizes
from korch.provider.gemm.vectors import require_rows, stays_in_cache
from korch.provider.matrix_units import TOGETHER, components_layout
from korch.schedule.byte_units import TiledProducts, tile_registers, unit_of
from korch.schedule.contraction import Layouts, contraction_of, extent
from korch.schedule.products import ProductBlocking
from korch.schedule.split_products import SplitProducts
from korch.system.alignment import ceil_div, round_up
from korch.target import Target
from korch.tile.ir.program import QUAD, Registers, TileProgram
from korch.tile.lower.staging import Machine


def split_right(rank: int, is_split: bool) -> Layout:
    """Return the layout of a right operand in components: float32 elements if they are split, else bfloat16."""
    columns, terms = rank - 1, rank - 2
    return components_layout((*range(terms), columns, terms), columns, terms, is_split)


def is_split_right(layout: Layout) -> bool:
    """Return whether a right operand has the layout of `split_right`."""
    return layout == split_right(len(layout.order), layout.is_split)


def split_program_of(
    group: Group, root: Primitive, layouts: Layouts, target: Target, packed: Layout | None, position: int
) -> TileProgram:
    """Return the program of a product on matrix units.

    Args:
        group: the group.
        root: its product.
        layouts: the layouts of inputs and outputs, with a plain one in place of a packed operand's.
        target: the machine.
        packed: the layout of a second operand that is packed when the kernel is built, or None.
        position: the position of that operand in the inputs.

    Raises:
        NotFusedError: the product, or a primitive before or after it, can't be computed so.
    """
    contraction = contraction_of(group, root, last=False)
    has_components = packed is not None and is_split_right(packed)
    if packed is not None and not has_components:
        inputs = tuple(packed if i == position else layout for i, layout in enumerate(layouts[0]))
        layouts = (inputs, layouts[1])
    schedule = SplitProducts(group, root, layouts, contraction, Machine.of(target))
    axes = (contraction.batch, contraction.rows, contraction.columns, contraction.terms)
    batch, m, n, terms = (extent(some) for some in axes)
    sizes = Sizes.split((batch, m, n, terms), schedule.components, target, has_components)
    strips = -(-n // TOGETHER)
    columns = min(n, (sizes.group or -(-strips // sizes.parts)) * TOGETHER)
    steps = schedule.second_steps() if packed is None else None
    packs = steps is not None and not stays_in_cache(steps[0], m, sizes.rows)
    blocking = ProductBlocking(
        sizes.block,
        columns,
        sizes.chunk,
        (False, packs),
        registers=Registers(TOGETHER, TOGETHER // target.lanes, fetches_b=True) if has_components else None,
        panels=TOGETHER if has_components else 0,
        rows_pass=sizes.group > 0,
    )
    program = schedule.program(blocking)
    require_rows(program, target.lanes)
    return program


def columns_in_steps(rank: int, terms: int) -> Layout:
    """Return the layout of a right operand of bytes: strips of columns, whole steps of terms, four terms adjacent."""
    columns, row = rank - 1, rank - 2
    order = (*range(row), columns, row)
    return Layout(order, ((row, unit_of(terms) // QUAD), (columns, TOGETHER), (row, QUAD)))


def tiled_program_of(group: Group, root: Primitive, layouts: Layouts, target: Target, is_packed: bool) -> TileProgram:
    """Return the program of a product of bytes on matrix units; for a convolution, channels must be innermost.

    `layouts`: the layouts of inputs and outputs, with a plain one in place of a packed operand's. `is_packed`: whether
    the second operand is a constant that is packed when the kernel is built.

    Raises:
        NotFusedError: the product, or a primitive before or after it, can't be computed so.
    """
    contraction = contraction_of(group, root, last=True)
    schedule = TiledProducts(group, root, layouts, contraction, Machine.of(target))
    axes = (contraction.batch, contraction.rows, contraction.columns, schedule.terms)
    program = schedule.program(tiled_blocking([extent(some) for some in axes], target, is_packed))
    require_rows(program, target.lanes)
    return program


def tiled_blocking(sizes: Sequence[int], target: Target, is_packed: bool) -> ProductBlocking:
    """Return the blocking of a product of bytes on matrix units.

    If the columns have at least as many bytes as the rows, they are divided among the threads, so that no two threads
    read the same weights; otherwise the rows are. Within a task, the operand with fewer bytes is kept in the cache
    while the other one is streamed.

    `is_packed`: whether the second operand is packed in panels.
    """
    batch, m, n, terms = sizes
    teams = max(1, target.threads // math.gcd(batch, target.threads))
    by_columns = n >= m and ceil_div(n, TOGETHER) >= teams
    columns = min(n, round_up(ceil_div(n, teams), TOGETHER)) if by_columns else n
    rows = m if by_columns else ceil_div(m, teams)
    room = int(cache_room("operand", target))
    strips_pass = rows < columns or columns * terms > room
    if strips_pass:
        rows = ceil_div(rows, ceil_div(rows * terms, room))
    registers = tile_registers(target.lanes, strips_pass)
    return ProductBlocking(rows, columns, terms, (False, True), registers, TOGETHER if is_packed else 0)
