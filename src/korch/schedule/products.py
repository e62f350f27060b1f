"""Products and convolutions -> blocked tile programs, with the operations before and after them.

A task computes a block of rows and columns. A loop over blocks of terms packs a block of each operand
into a tile (in panels for the second) and adds their product to the accumulator. An operand with constant
strides may be read in memory instead, and the first may be copied by an earlier stage. The operations after
the product are a pass over the block. For bytes, whole groups of four terms are adjacent in memory.
"""

import math
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.ranges.live import count_of
from korch.schedule.blocks import (
    TASKS_PER_THREAD,
    Blocked,
    Operand,
    arranged,
    cut,
    direct,
    evenly,
    fill,
    flat,
    spaced,
    store,
    zero_of,
)
from korch.schedule.contraction import Axes, Contraction, Layouts, NotFusedError, Packed, extent, in_panels
from korch.system.alignment import ceil_div, round_up
from korch.target import EDGE
from korch.tile.ir.index import ZERO, Expr, Ranges, add, scale, var
from korch.tile.ir.program import (
    PAIR,
    QUAD,
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Loop,
    Panels,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.lower.emit import Emitter
from korch.tile.lower.loops import arrange, grid_for
from korch.tile.lower.staging import Machine

WIDENED = {
    Product.U8S8: Product.S16S8,
    Product.S8S8: Product.S16S8,
    Product.U8U8: Product.S16U8,
    Product.S8U8: Product.S16U8,
}
"""For each product of bytes, the product whose first operand is widened to 16 bits when it is copied."""

MANY_BLOCKS = 8
"""With at least this many blocks of rows per thread, it hardly matters that the last block has fewer rows."""

ROW_STEP = 6
"""The rows of such a task are a multiple of this: contractions hold 6 or 12 rows in registers."""

PAIR_LANES = (8,)
"""Numbers of lanes of the vector units that can multiply bytes of any value only as 16-bit numbers."""


@dataclass(frozen=True, slots=True)
class ProductBlocking:
    """How a product is cut into tasks, and what is packed."""

    rows: int  # rows of a task
    columns: int  # columns of a task
    terms: int  # terms of an iteration of its loop; there is no loop if these are all terms
    # whether the operands are packed into tiles. The first is copied to the workspace instead if several tasks read a
    # row.
    packs: tuple[bool, bool] = (True, True)
    # how the contraction is computed in registers; the printer chooses if this is None
    registers: Registers | None = None
    panels: int = 0  # the columns of a panel if the second operand is packed in advance; 0 if it is not
    rows_pass: bool = False  # on matrix units, whether rows are streamed while columns stay in the cache


@dataclass(frozen=True, slots=True)
class Cut:
    """The block axes and inner axes of rows, columns and terms, their ranges, and the contraction's variables."""

    rows: tuple[Axis, Axis]
    columns: tuple[Axis, Axis]
    terms: tuple[Axis, Axis]
    ranges: Ranges
    values: dict[str, Expr]


class Products(Blocked):
    """What all programs of a group have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction)
        self.machine = machine
        self.product = multiplied(self.product, machine.lanes)
        self.dtype = self.product.types[0]
        self.terms = _whole_groups(contraction.terms, self.product.group)
        self.unit = self.product.group  # terms of a row are read in whole units

    def program(self, blocking: ProductBlocking) -> TileProgram:
        """Return the program of one blocking."""
        cuts = self._cut(blocking)
        (gm, i), (gn, j), (g, p) = cuts.rows, cuts.columns, cuts.terms
        total = At("t", add(scale(var("j"), 1), scale(var("i"), self._whole(j.extent))))
        zero = fill((Axis("i", i.size), Axis("j", j.size)), total, zero_of(self.sum_type), self.sum_type)
        operands = [self._operand(position, blocking, cuts) for position in (0, 1)]
        terms = Axis(p.name, p.size, True, p.ragged)
        a, b = (operand.at for operand in operands)
        contract = Contract((i, j, terms), total, a, b, self.product, registers=blocking.registers)
        made = operands[::-1] if blocking.rows_pass else operands
        packings: tuple[Step, ...] = tuple(step for operand in made for step in operand.passes)
        is_whole = g.extent == 1
        turns = (*packings, zero, contract) if is_whole else (zero, Loop(g, ("t",), (*packings, contract)))
        is_packed = operands[1].packing and not operands[1].components
        is_by_rows = blocking.rows_pass or (is_packed and self._are_shared_evenly(gm, i))
        around = (*self.batch, *self.leading)
        grid = (*around, gm, gn) if is_by_rows else (gn, *around, gm)
        after = self.after(total, (i, j), cuts.values, cuts.ranges)
        stages = (*(o.stage for o in operands if o.stage is not None), Stage(grid, (*turns, after)))
        tile = Buffer("t", Level.TILE, self.sum_type, i.extent * self._whole(j.extent))
        own = (buffer for operand in operands for buffer in operand.buffers)
        memory = self.memory(self._packed(blocking) if blocking.panels else None)
        return TileProgram((*memory, tile, *own), stages)

    def _are_shared_evenly(self, gm: Axis, i: Axis) -> bool:
        """Return whether all threads get about the same number of rows if they share blocks of rows.

        64 rows in blocks of 48 and 16, times 64 x 4096, take 1.4 times as long on two threads: one of them has 48 rows.
        """
        around = (*self.batch, *self.leading, gm)
        threads, blocks = self.machine.threads, math.prod(axis.extent for axis in around)
        return blocks >= MANY_BLOCKS * threads or (blocks % threads == 0 and i.ragged is None)

    def _cut(self, blocking: ProductBlocking) -> Cut:
        m, n, k = (extent(axes) for axes in self._sides)
        rows = cut(m, self._rows_of_task(blocking), ("gm", "i"))
        columns = cut(n, blocking.columns, ("gn", "j"))
        terms = cut(k, min(blocking.terms, k), ("g", "p"))
        axes = (*self.batch, *self.leading, *rows, *columns, *terms)
        ranges = {axis.name: (0, axis.extent - 1) for axis in axes}
        return Cut(rows, columns, terms, ranges, self.values([flat(*side) for side in (rows, columns, terms)], ranges))

    def _rows_of_task(self, blocking: ProductBlocking) -> int:
        """Return the rows of a task: fewer if a size may need a part of them, so that threads get equally many tasks.

        If tasks differ in their rows only, threads share the rows evenly anyway.
        """
        m, n, _ = (extent(axes) for axes in self._sides)
        threads, is_split = self.machine.threads, self.product is Product.SPLIT
        others = math.prod(axis.extent for axis in (*self.batch, *self.leading)) * ceil_div(n, blocking.columns)
        if is_split and others % threads == 0:
            return blocking.rows
        if others == 1:  # each thread needs a task at the largest size only
            others = TASKS_PER_THREAD * threads // max(2, threads)
        return evenly(m, blocking.rows, others, threads, EDGE if is_split else ROW_STEP)

    @property
    def _looks_up_rows(self) -> bool:
        """Whether the needed rows are not adjacent: a pass that packs them looks up their positions in a table."""
        count = count_of(extent(self.contraction.rows))
        return count is not None and count.rows is not None

    @property
    def _sides(self) -> tuple[Axes, Axes, Axes]:
        return self.contraction.rows, self.contraction.columns, self.terms

    def second_steps(self) -> tuple[int, int] | None:
        """Return the strides of the rows and columns of the second operand in memory; None if they vary."""
        m, n, k = (extent(axes) for axes in self._sides)
        cuts = self._cut(ProductBlocking(m, n, k))
        axes = (cuts.terms[1], cuts.columns[1])
        emitter = self.fusion.emitter(cuts.ranges)
        _ = self.argument(emitter, 1, cuts.values)
        at = direct(emitter.ops, axes, can_widen=True)
        row, column = (at.index.coefficient(axis.name) for axis in axes) if at is not None else (None, None)
        return None if row is None or column is None else (row, column)

    def _whole(self, columns: int) -> int:
        return round_up(columns, self.machine.lanes)

    def _operand(self, position: int, blocking: ProductBlocking, cuts: Cut) -> Operand:
        """Return where an operand is read: in memory, in a copy of it or in a tile."""
        (_, i), (gn, j), (g, p) = cuts.rows, cuts.columns, cuts.terms
        axes = (p, j) if position else (i, p)
        if position and blocking.panels:
            first = scale(self._batch(), extent(self.contraction.columns))
            place = add(scale(flat(*cuts.terms), self._padded(blocking)), first, flat(*cuts.columns))
            return Operand(At(self.name_of(1), place))
        emitter = self.fusion.emitter(cuts.ranges)
        value = self._widened(emitter, position, cuts.values)
        is_looked_up = position == 0 and self._looks_up_rows
        is_packed = blocking.packs[position] or is_looked_up
        in_memory = None if is_packed else direct(emitter.ops, axes, can_widen=position == 1)
        if in_memory is not None and self._can_read(in_memory, position, axes):
            return Operand(in_memory)
        if position == 0 and gn.extent > 1 and g.extent == 1 and not is_looked_up:
            return self._copied(cuts)
        if self.product.is_of_bytes:
            return self._right_bytes(blocking, cuts) if position else self._left_bytes(cuts)
        name, row = ("pb", self._whole(j.extent)) if position else ("pa", self._row(p.extent))
        packed = At(name, add(scale(var(axes[0].name), row), var(axes[1].name)))
        layout = self._panels_of(j.extent, blocking) if position else ()
        packing = Pass(axes, axes[1].name, tuple(emitter.ops), (store(packed, value),))
        if not layout or layout[0].columns == layout[0].width:
            packing = arranged(packing, cuts.ranges, self.machine.lanes)
        buffer = Buffer(name, Level.TILE, self.dtype, axes[0].extent * row, layout)
        return Operand(packed, buffer, None, packing)

    def _panels_of(self, columns: int, blocking: ProductBlocking) -> tuple[Panels, ...]:
        """Return the layout of some columns of the second operand in a tile: panels, if columns fill whole vectors."""
        registers, lanes = blocking.registers, self.machine.lanes
        is_strip = registers is not None and registers.vectors * lanes == columns
        return (Panels(columns, columns if is_strip else lanes),) if columns % lanes == 0 else ()

    def _can_read(self, at: At, position: int, axes: tuple[Axis, Axis]) -> bool:
        """Return whether a contraction can read an operand in place; for bytes, terms must be whole adjacent groups."""
        if not self.product.is_of_bytes:
            return True
        terms = axes[1]
        is_adjacent = terms.extent == 1 or at.index.coefficient(terms.name) == 1
        is_narrow = self.product.group == QUAD
        return position == 0 and is_narrow and is_adjacent and terms.extent % self.unit == 0

    def _widened(self, emitter: Emitter, position: int, values: dict[str, Expr]) -> str:
        """Return the name of an operand's element, widened if it is a byte that is widened when it is copied."""
        name = self.argument(emitter, position, values)
        is_widened = position == 0 and self.product.is_of_bytes and self.product.group == PAIR
        return emitter.apply(self.dtype, "cast", name) if is_widened else name

    def _left_bytes(self, cuts: Cut) -> Operand:
        """Return the rows of a task in a tile, with contiguous terms."""
        (_, i), (_, p) = cuts.rows, cuts.terms
        own = {name: f"c_{name}" for name, _ in self.terms}
        axes = tuple(Axis(own[name], n) for name, n in self.contraction.terms) or (Axis("c", 1),)
        emitter = self.fusion.emitter({**cuts.ranges, **{axis.name: (0, axis.extent - 1) for axis in axes}})
        value = self._widened(emitter, 0, {**cuts.values, **{name: var(own[name]) for name in own}})
        term = _counted(tuple((own[name], n) for name, n in self.terms))
        packed = At("pa", add(scale(var(i.name), self._row(p.extent)), term))
        packing = Pass((i, *axes), axes[-1].name, tuple(emitter.ops), (store(packed, value),))
        buffer = Buffer("pa", Level.TILE, self.dtype, i.extent * self._row(p.extent))
        return Operand(At("pa", add(scale(var(i.name), self._row(p.extent)), var(p.name))), buffer, None, packing)

    def _right_bytes(self, blocking: ProductBlocking, cuts: Cut) -> Operand:
        """Return the columns of a task in panels in a tile; terms beyond the last are 0."""
        (_, j), (_, p) = cuts.columns, cuts.terms
        registers = blocking.registers
        if registers is None or len(self.terms) > 1:
            raise NotFusedError("the second operand is no matrix that is packed")
        strip = registers.vectors * self.machine.lanes
        group = self.product.group
        columns, rows = round_up(j.extent, strip), round_up(p.extent, self.unit)
        width = columns if j.ragged is None else j.extent
        emitter = self.fusion.emitter({**cuts.ranges, "q": (0, rows - 1), j.name: (0, width - 1)})
        values = cuts.values | {name: var("q") for name, _ in self.terms}
        guards = emitter.inside(var("q"), 0, p.extent) + emitter.inside(var(j.name), 0, j.extent)
        value = self.argument(emitter, 1, values, guards)
        packed = At("pb", add(scale(var("q"), columns), var(j.name)))
        axes = (Axis("q", rows), replace(j, size=width))
        packing = Pass(axes, j.name, tuple(emitter.ops), (store(packed, value),))
        dtype = self.product.types[1]
        buffer = Buffer("pb", Level.TILE, dtype, rows * columns, (Panels(columns, strip, group),))
        return Operand(At("pb", add(scale(var(p.name), columns), var(j.name))), buffer, None, packing)

    def _copied(self, cuts: Cut) -> Operand:
        """Return the first operand in a copy, whose rows don't all share a set of the L1 cache."""
        contraction = self.contraction
        around = (*contraction.batch, *contraction.leading)
        sides = (around, contraction.rows, contraction.terms)
        rows, row = extent(contraction.rows), self._row(extent(self.terms))
        own = {name: f"c_{name}" for side in sides for name, _ in side}
        axes = tuple(Axis(own[name], n) for side in sides for name, n in side) or (Axis("c", 1),)
        matrix = _counted(tuple((axis.name, axis.extent) for axis in (*self.batch, *self.leading)))
        whole = scale(add(scale(matrix, rows), flat(*cuts.rows)), row)
        emitter = self.fusion.emitter({axis.name: (0, axis.extent - 1) for axis in axes})
        value = self._widened(emitter, 0, {name: var(own[name]) for name in own})
        places = (around, contraction.rows, self.terms)
        counted = (_counted(tuple((own[name], n) for name, n in side)) for side in places)
        number, i, p = counted
        place = add(scale(add(scale(number, rows), i), row), p)
        copy = Pass(axes, axes[-1].name, tuple(emitter.ops), (Store("ca", place, value),))
        buffer = Buffer("ca", Level.WORKSPACE, self.dtype, extent(around) * rows * row)
        sizes = {b.name: b.size for b in (*self.memory(), buffer)}
        stage = grid_for(arrange(copy, self.machine.lanes, sizes, {}), self.machine.threads, self.machine.lanes)
        return Operand(At("ca", add(whole, flat(*cuts.terms))), buffer, stage)

    def _row(self, terms: int) -> int:
        """Return the row stride of a copy: whole groups, and not such that all rows share a set of the L1 cache."""
        return spaced(terms, self.unit)

    def _batch(self) -> Expr:
        """Return the number of a batch, counted with the last axis fastest."""
        return _counted(tuple((axis.name, axis.extent) for axis in self.batch))

    def _padded(self, blocking: ProductBlocking) -> int:
        columns = extent(self.contraction.batch) * extent(self.contraction.columns)
        return round_up(columns, blocking.panels)

    def _packed(self, blocking: ProductBlocking) -> Packed:
        """Return the layout of a second operand that is packed in advance: panels."""
        rows = round_up(extent(self.terms), self.unit)
        return in_panels(rows, self._padded(blocking), blocking.panels, self.product.group)


def multiplied(product: Product, lanes: int) -> Product:
    """Return how vector units with some number of lanes multiply."""
    return WIDENED.get(product, product) if lanes in PAIR_LANES else product


def terms_together(lanes: int) -> int:
    """Return how many terms of bytes are adjacent in a panel, for vector units with some number of lanes."""
    return multiplied(Product.U8S8, lanes).group


def _whole_groups(terms: Axes, group: int) -> Axes:
    """Return the axes of terms; if there are several, the last one is rounded up to whole groups."""
    if len(terms) < 2:
        return terms
    *outer, (name, n) = terms
    return (*outer, (name, round_up(n, group)))


def _counted(axes: Axes) -> Expr:
    """Return the number of a point of some axes, counted with the last axis fastest."""
    number = ZERO
    for name, n in axes:
        number = add(scale(number, n), var(name))
    return number
