"""Products of rows by matrices, one of which an index selects for each row -> tile programs.

Rows are sorted by the number of their matrix, divided into blocks, and copied in this order. A task multiplies the
existing rows of a block by some columns of the block's matrix; without rows it does nothing. So work is done only for
selected matrices, and each is read once per block. Results are stored in the original order of the rows.
"""

from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.blocks import Blocked, cut, fill, flat, spaced, store
from korch.schedule.contraction import Layouts, NotFusedError, Packed, in_panels, matmul_axes
from korch.schedule.split_products import given_split, operand_components, tile_of_components
from korch.system.alignment import round_up
from korch.tile.ir.index import Expr, add, scale, var
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.ir.sort import Sort
from korch.tile.lower.staging import Machine

BLOCK, ROWS, GROUP, COUNT = "block", "rows", "e", "n"
"""The loop variables of a task: its block, a variable that is always 0, its matrix and its number of rows."""


@dataclass(frozen=True, slots=True)
class GatheredBlocking:
    """How a gathered product is divided."""

    rows: int  # the most rows of a block
    columns: int  # columns of a task
    terms: int  # terms of an iteration of the task's loop
    strip: int  # columns of the matrices that are adjacent in memory
    registers: Registers  # how tiles are multiplied
    is_split: bool  # whether operands are split into components and multiplied on matrix units


class Gathered(Blocked):
    """The programs of a group around one `matmul_gathered` primitive."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, machine: Machine) -> None:
        types = [group.body.types[value] for value in root.inputs]
        (self.rows, self.terms), (self.matrices, _, self.columns) = types[0].shape, types[1].shape
        shapes = ((self.rows, self.terms), (self.terms, self.columns), (self.rows, self.columns))
        super().__init__(group, root, layouts, matmul_axes(*shapes), Product.F32)
        self.machine = machine
        self.keys = self._keys(root.inputs[2])
        self.components = operand_components(group.body, replace(root, inputs=root.inputs[:2]))

    def _keys(self, value: int) -> str:
        """Return the name of the input that has the index of each row."""
        body = self.group.body
        while value not in self.fusion.place:
            maker = body.primitives[body.producers[value][0]]
            if maker.op != "reshape":
                raise NotFusedError("the index is computed in the group")
            value = maker.inputs[0]
        return self.fusion.place[value]

    def program(self, blocking: GatheredBlocking) -> TileProgram:
        """Return the program of one blocking."""
        sort = Sort(self.keys, self.rows, self.matrices, blocking.rows, "order", "group", "count")
        part = _GatheredTask(self, blocking, sort)
        tables = (Buffer(name, Level.WORKSPACE, DType.I32, size) for name, size in sort.written.items())
        copy = Buffer("ca", Level.WORKSPACE, DType.F32, sort.blocks * blocking.rows * spaced(self.terms))
        buffers = (*self.memory(self._packed(blocking)), *tables, copy, *part.buffers)
        return TileProgram(buffers, (Stage((), (), sort), self._copied(sort), part.stage()))

    def _copied(self, sort: Sort) -> Stage:
        """Return the stage that copies the rows of the first operand in the order of their matrices."""
        place, row, k = Axis("place", sort.blocks * sort.block), Axis("row", self.rows), Axis("k", self.terms)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (place, row, k)}
        emitter = self.fusion.emitter(ranges)
        name = self.argument(emitter, 0, self.values([var("row"), var("x1"), var("k")], {**ranges, "x1": (0, 0)}))
        sink = Store("ca", add(scale(var("place"), spaced(self.terms)), var("k")), name)
        copy = Pass((k,), "k", tuple(emitter.ops), (sink,))
        return Stage((place,), (Loop(row, (), (copy,), At(sort.order, var("place"))),))

    def _packed(self, blocking: GatheredBlocking) -> Packed:
        """Return how the matrices are stored: one beside the other, in strips of columns."""
        columns = self.matrices * round_up(self.columns, blocking.strip)
        if blocking.is_split:
            return given_split(self.terms, columns, self.components[1])
        return in_panels(self.terms, columns, blocking.strip)


class _GatheredTask:
    """The tasks that multiply the rows of a block by some columns of the block's matrix."""

    def __init__(self, of: Gathered, blocking: GatheredBlocking, sort: Sort) -> None:
        self.of, self.blocking, self.sort = of, blocking, sort
        self.block = Axis(BLOCK, sort.blocks)
        self.columns = cut(of.columns, blocking.columns, ("gn", "j"))
        self.turns = cut(of.terms, blocking.terms, ("g", "p"))
        self.i = Axis("i", blocking.rows, ragged=(ROWS, var(COUNT)) if blocking.rows > 1 else None)
        self.width = round_up(self.columns[1].extent, blocking.strip)
        self.total = At("t", add(scale(var("i"), self.width), var("j")))
        of_left = (self.i, self.turns[1])
        self.component, self.components = tile_of_components("sa", of_left, of.components[0], is_second=False)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The tiles."""
        tile = Buffer("t", Level.TILE, DType.F32, self.blocking.rows * self.width)
        return (tile, *((self.components,) if self.blocking.is_split else ()))

    def stage(self) -> Stage:
        """Return the stage."""
        (gn, j), (g, p) = self.columns, self.turns
        contract = Contract(
            (self.i, j, replace(p, is_reduced=True)),
            self.total,
            self._left(),
            self._right(),
            Product.SPLIT if self.blocking.is_split else Product.F32,
            registers=self.blocking.registers,
        )
        turn: tuple[Step, ...] = (*((self._split(),) if self.blocking.is_split else ()), contract)
        zero = fill((self.i, j), self.total, 0.0)
        made = (*turn[:-1], zero, contract) if g.extent == 1 else (zero, Loop(g, ("t",), turn))
        steps: tuple[Step, ...] = (*made, self._stored())
        loops = (
            (Axis(GROUP, self.of.matrices), At(self.sort.group, var(BLOCK))),
            (Axis(COUNT, self.blocking.rows + 1), At(self.sort.count, var(BLOCK))),
            (Axis(ROWS, 1), None),
        )
        for axis, only in reversed(loops):
            steps = (Loop(axis, (), steps, only),)
        return Stage((gn, self.block), steps)

    def _left(self) -> At:
        """Return where the first operand is read: in the copy, or in its components."""
        if self.blocking.is_split:
            return self.component
        return At("ca", add(scale(self._place(), spaced(self.of.terms)), flat(*self.turns)))

    def _right(self) -> At:
        """Return where the second operand is."""
        own = round_up(self.of.columns, self.blocking.strip)
        row = scale(flat(*self.turns), self.of.matrices * own)
        return At(self.of.name_of(1), add(row, scale(var(GROUP), own), flat(*self.columns)))

    def _place(self) -> Expr:
        return add(scale(var(BLOCK), self.blocking.rows), var("i"))

    def _split(self) -> Pass:
        """Return the pass that computes the components of the first operand."""
        place = add(scale(self._place(), spaced(self.of.terms)), flat(*self.turns))
        return Pass((self.i, self.turns[1]), "p", (Load("x0", DType.F32, "ca", place),), (store(self.component, "x0"),))

    def _stored(self) -> Loop:
        """Return the loop that computes the outputs of each row of a block."""
        of, (gn, j) = self.of, self.columns
        place, row = Axis("place", self.blocking.rows), Axis("row", of.rows)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (gn, j, self.block, place, row)}
        values = of.values([var("row"), flat(gn, j), var("x2")], {**ranges, "x2": (0, 0)})
        total = At("t", add(scale(var("place"), self.width), var("j")))
        after = of.after(total, (j,), values, ranges)
        order = At(self.sort.order, add(scale(var(BLOCK), self.blocking.rows), var("place")))
        return Loop(place, (), (Loop(row, (), (after,), order),))
