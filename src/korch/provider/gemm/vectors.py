"""Chooses the blocking of the tile programs of matrix products on vector units."""

from dataclasses import replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.provider.gemm.blocking import PAGE_FLOATS, have_conflicts
from korch.provider.gemm.blocking import VectorBlocking as Sizes
from korch.schedule.blocks import require_adjacent
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of, extent
from korch.schedule.products import ProductBlocking, Products
from korch.target import Target
from korch.tile.analysis.registers import largest_of_bytes
from korch.tile.ir.program import QUAD, Load, Loop, Pass, Registers, Select, TileProgram
from korch.tile.lower.staging import Machine

LEAST_TERMS = 32
"""The least terms for prefetching: computing such a tile takes as long as fetching the lines that it is stored to."""


def schedule_of(
    group: Group, root: Primitive, layouts: Layouts, target: Target, is_packed: bool
) -> tuple[Products, ProductBlocking]:
    """Return the schedule of a product and its blocking, which has the panel width of a packed second operand.

    `layouts`: the layouts of inputs and outputs, with a plain one in place of a packed operand's. `is_packed`: whether
    the second operand is a constant that is packed when the kernel is built.
    """
    contraction = contraction_of(group, root, last=False)
    schedule = Products(group, root, layouts, contraction, Machine.of(target))
    batch, m, n, terms = (
        extent(axes) for axes in (contraction.batch, contraction.rows, contraction.columns, contraction.terms)
    )
    if schedule.product.is_of_bytes:
        return schedule, _blocking_of_bytes((batch, m, n, terms), target, is_packed)
    second = None if is_packed else schedule.second_steps()
    is_row = second is not None and (second[1] == 1 or n == 1)  # with one column, adjacency does not matter
    row_step = second[0] if second is not None and is_row else 0
    sizes = Sizes.of(batch, m, n, terms, target, row_step)
    strip = sizes.vectors * target.lanes
    is_read = is_packed or (row_step != 0 and stays_in_cache(row_step, m, sizes.rows))
    # If the lines of all rows share a set, those of the second operand need some of its ways, too: 6 rows of 1,024 to
    # 8,192 terms in 8 ways take 1.08 to 1.15 times the time without a copy.
    others = sizes.vectors if terms % PAGE_FLOATS == 0 and n > strip else 0
    copies = have_conflicts(min(m, sizes.rows) + others, terms, target)
    registers = Registers(sizes.rows, sizes.vectors, is_read, _fetches(batch, m, n, terms, target))
    columns = 1 if n == 1 else strip
    if is_read:
        columns = n if sizes.parts == 1 else -(-n // (strip * sizes.parts)) * strip
    panels = strip if is_packed else 0
    return schedule, ProductBlocking(sizes.block, columns, terms, (copies, not is_read), registers, panels)


def _blocking_of_bytes(sizes: tuple[int, int, int, int], target: Target, is_packed: bool) -> ProductBlocking:
    """Return the blocking of a product of bytes: four bytes take the space of one float."""
    batch, m, n, terms = sizes
    blocks = Sizes.of(batch, m, n, -(-terms // QUAD), target)
    registers = largest_of_bytes(target.lanes, target.has_dot)
    if blocks.vectors == registers.vectors:
        registers = replace(registers, rows=min(registers.rows, blocks.rows))
    registers = replace(registers, fetches_b=is_packed and terms * n > target.l1_bytes)
    strip = registers.vectors * target.lanes
    columns = n if blocks.parts == 1 else -(-n // (strip * blocks.parts)) * strip
    return ProductBlocking(blocks.block, columns, terms, (False, True), registers, strip if is_packed else 0)


def require_rows(program: TileProgram, lanes: int) -> None:
    """Require that the pass after a program's product reads and writes adjacent elements.

    Raises:
        NotFusedError: it does not.
    """
    after = program.stages[-1].steps[-1]
    while isinstance(after, Loop):
        after = after.body[-1]
    if not isinstance(after, Pass):
        raise AssertionError("a product ends with a pass")
    require_neighbours(after, lanes)


def require_neighbours(after: Pass, lanes: int) -> None:
    """Require that the pass after a product reads and writes adjacent elements along its last axis.

    Raises:
        NotFusedError: it does not.
    """
    if after.axes[-1].extent == 1:
        return
    if any(isinstance(op, Select) or (isinstance(op, Load) and op.guards) for op in after.ops):
        raise NotFusedError("a pad or a concatenation is not fused into the kernel")
    require_adjacent(after, lanes)


def _fetches(batch: int, m: int, n: int, terms: int, target: Target) -> bool:
    """Return whether to prefetch the cache lines that results are stored to while the results are computed.

    This pays if the results don't fit into a core's private cache, each row is on pages of its own, so that
    the hardware does not prefetch it, and there are enough terms.
    """
    return 4 * batch * m * n > target.l2_bytes and n >= PAGE_FLOATS and terms >= LEAST_TERMS


def stays_in_cache(row_step: int, m: int, rows: int) -> bool:
    """Return whether a strip of columns can be read in place, once for each block of `rows` rows.

    Cache lines a multiple of a page apart map to the same set of the level-1 cache and evict each
    other, so such a strip is packed first, unless few blocks read it.
    """
    return row_step % PAGE_FLOATS != 0 or m <= 2 * rows
