"""Products by weights stored in few bits -> tile programs that widen the weights after loading them.

Columns are adjacent in memory, in strips. For few rows, the weights of a block of terms are widened in registers once
for all rows, multiplied and added up, and the sums of the block are scaled. For more rows, a task widens and scales
some terms of its columns once, into a tile, and multiplies all rows by this tile.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.ops.stored import StoredAttributes
from korch.primitive.types import DType
from korch.schedule.blocks import Blocked, cut, direct, fill, flat, spaced, store
from korch.schedule.contraction import Layouts, NotFusedError, extent, matmul_axes
from korch.tile.ir.index import Expr, add, constant, quotient, scale, var
from korch.tile.ir.program import (
    Accumulate,
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
from korch.tile.llvm.reduce import SHORT_REDUCTION
from korch.tile.lower.emit import Emitter
from korch.tile.lower.loops import arrange, grid_for
from korch.tile.lower.staging import Machine

FEW_ROWS = 8
"""Up to this many rows, if their sums fit, weights are widened in registers."""

FEW_ROWS_VECTORS = 4
"""Vectors of columns in a strip for few rows: their sums are in registers at the same time."""

TILE_TERMS = 256
"""The most terms that a task widens at once: with two vectors of columns they fill half of the first cache."""

BLOCK_ROWS = 96
"""The most rows of a task, for which weights are widened once."""


@dataclass(frozen=True, slots=True)
class StoredBlocking:
    """How a product by stored weights is divided."""

    rows: int  # rows of a task
    strip: int  # columns of a task, which are adjacent in memory
    terms: int  # terms of an iteration of its loop
    registers: Registers | None  # how tiles are multiplied; None for few rows, which need no tile of weights


def blocking_of(root: StoredAttributes, rows: int, terms: int, lanes: int, registers: Registers) -> StoredBlocking:
    """Return how a product of some rows and terms is divided."""
    blocks = -(-terms // root.block)
    sums, room = rows * root.each, registers.rows * registers.vectors
    if rows <= FEW_ROWS and sums <= room:
        vectors = FEW_ROWS_VECTORS if FEW_ROWS_VECTORS * sums <= room else registers.vectors
        return StoredBlocking(rows, vectors * lanes, _part(root, SHORT_REDUCTION * root.each), None)
    whole = max((d for d in range(1, blocks + 1) if blocks % d == 0 and d * root.block <= TILE_TERMS), default=0)
    chunk = whole * root.block or _part(root, TILE_TERMS)
    return StoredBlocking(min(rows, BLOCK_ROWS), registers.vectors * lanes, chunk, registers)


def _part(root: StoredAttributes, most: int) -> int:
    """Return the largest number of terms up to `most` that divides a block into whole bytes; else the block."""
    return max(
        (n for n in range(root.each, min(root.block, most) + 1, root.each) if root.block % n == 0), default=root.block
    )


def strips(strip: int) -> Layout:
    """Return the layout of a matrix in strips of columns."""
    return Layout((1, 0), ((1, strip),))


class Stored(Blocked):
    """The programs of a group around one `matmul_stored` primitive."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, machine: Machine) -> None:
        types = group.body.types
        if not isinstance(root.attributes, StoredAttributes):
            raise AssertionError(f"{root.op} is no product by stored weights")
        self.at, self.machine = root.attributes, machine
        a, out = types[root.inputs[0]].shape, types[root.output].shape
        self.terms, self.columns = a[-1], out[-1]
        second = (*(1,) * (len(a) - 2), self.terms, self.columns)
        found = matmul_axes(a, second, out)
        if found.leading:
            found = matmul_axes(a, second, tuple(map(int, out)))
        super().__init__(group, root, layouts, found, Product.F32)
        self.rows = extent(found.rows)
        if self.at.block % self.at.each:
            raise NotFusedError("a byte has terms of two blocks")

    @property
    def all_terms(self) -> int:
        """The number of terms, rounded up to whole blocks."""
        return -(-self.terms // self.at.block) * self.at.block

    def program(self, blocking: StoredBlocking) -> TileProgram:
        """Return the program of one blocking."""
        own = _Own(self, blocking)
        stages: list[Stage] = []
        if self.all_terms != self.terms or (blocking.registers and own.left() is None):
            stages.append(self.copied())
        body = own.few(not stages) if blocking.registers is None else own.many(bool(stages))
        places = self.values([own.row, own.column, var("x2")], {**own.ranges, "x2": (0, 0)})
        after = self.after(own.total, own.axes, places, own.ranges)
        stages.append(Stage(own.grid, (fill(own.axes, own.total, 0.0), Loop(own.turn, ("t",), body), after)))
        buffers = [*self.memory(), *own.buffers]
        if len(stages) > 1:
            buffers.append(Buffer("ca", Level.WORKSPACE, DType.F32, self.rows * self.copy_row))
        return TileProgram(tuple(buffers), tuple(stages))

    def integers(self, emitter: Emitter, byte: tuple[Expr, Expr], term: Expr) -> Iterator[str]:
        """Yield the name of each integer of a byte as a float, minus the zero point of a term."""
        zero, bits = self.zero(emitter, term, byte[1]), self.at.bits
        word = emitter.apply(DType.I32, "cast", emitter.value(self.root.inputs[1], byte))
        for h in range(self.at.each):
            part = word
            if h:
                part = emitter.apply(DType.I32, "shift_right", part, emitter.literal(DType.I32, h * bits))
            if h < self.at.each - 1:
                part = emitter.apply(DType.I32, "bitwise_and", part, emitter.literal(DType.I32, (1 << bits) - 1))
            # Subtract as integers: integer units work while float units multiply and convert.
            part = emitter.apply(DType.I32, "sub", part, zero) if zero else part
            yield emitter.apply(DType.F32, "cast", part)

    def zero(self, emitter: Emitter, term: Expr, column: Expr) -> str:
        """Return the name of the zero point of a term; "" if it is 0."""
        if len(self.root.inputs) == 4:
            index = (self._block(emitter, term), column)
            return emitter.apply(DType.I32, "cast", emitter.value(self.root.inputs[3], index))
        return emitter.literal(DType.I32, self.at.zero) if self.at.zero else ""

    def factor(self, emitter: Emitter, term: Expr, column: Expr) -> str:
        """Return the name of the scale of a term, as float32."""
        found = self.stored_factor(emitter, term, column)
        is_half = self.group.body.types[self.root.inputs[2]].dtype is DType.F16
        return emitter.apply(DType.F32, "cast", found) if is_half else found

    def stored_factor(self, emitter: Emitter, term: Expr, column: Expr) -> str:
        """Return the name of the scale of a term, in the type in which it is stored."""
        return emitter.value(self.root.inputs[2], (self._block(emitter, term), column))

    def _block(self, emitter: Emitter, term: Expr) -> Expr:
        """Return the number of the block of a term."""
        return quotient(term, self.at.block, emitter.ranges)

    @property
    def copy_row(self) -> int:
        """The row stride of the copy of the first operand."""
        return spaced(self.all_terms)

    def copied(self) -> Stage:
        """Return the stage that copies the first operand; terms beyond the last are 0."""
        axes = (Axis("c", self.rows), Axis("k", self.all_terms))
        ranges = {axis.name: (0, axis.extent - 1) for axis in axes}
        emitter = self.fusion.emitter(ranges)
        guards = emitter.inside(var("k"), 0, self.terms)
        name = self.argument(emitter, 0, self.values([var("c"), var("x1"), var("k")], {**ranges, "x1": (0, 0)}), guards)
        place = add(scale(var("c"), self.copy_row), var("k"))
        copy = Pass(axes, "k", tuple(emitter.ops), (Store("ca", place, name),))
        sizes = {b.name: b.size for b in self.memory()} | {"ca": self.rows * self.copy_row}
        return grid_for(arrange(copy, self.machine.lanes, sizes, {}), self.machine.threads, self.machine.lanes)


class _Own:
    """The axes of a task, and the steps of an iteration of its loop."""

    def __init__(self, of: Stored, blocking: StoredBlocking) -> None:
        self.of, self.blocking = of, blocking
        gm, i = cut(of.rows, blocking.rows, ("gm", "i"))
        gn, j = cut(of.columns, blocking.strip, ("gn", "j"))
        self.grid, self.axes, self.turn = (gn, gm), (i, j), Axis("g", of.all_terms // blocking.terms)
        self.row, self.column, self.first = flat(gm, i), flat(gn, j), scale(var("g"), blocking.terms)
        self.total = At("t", add(scale(var("i"), blocking.strip), var("j")))
        self.ranges = {axis.name: (0, axis.extent - 1) for axis in (gm, i, gn, j, self.turn)}
        size = blocking.rows * blocking.strip
        self.buffers = [Buffer("t", Level.TILE, DType.F32, size)]

    def left(self) -> At | None:
        """Return where the first operand is in memory if it is read in place; else None."""
        p = Axis("p", self.blocking.terms)
        emitter = self.of.fusion.emitter({**self.ranges, "p": (0, p.extent - 1)})
        values = self.of.values([self.row, self.column, add(self.first, var("p"))], emitter.ranges)
        self.of.argument(emitter, 0, values)
        return direct(emitter.ops, (self.axes[0], p), can_widen=False)

    def few(self, is_direct: bool) -> tuple[Step, ...]:
        """Return the steps for few rows: the sums of a block, and their addition to those of earlier blocks."""
        _, j = self.axes
        rows = self.blocking.terms // self.of.at.each
        emitter = self.of.fusion.emitter({**self.ranges, "r": (0, rows - 1)})
        weights = tuple(self.weights(emitter, var("r")))
        terms = [add(self.first, scale(var("r"), self.of.at.each), constant(h)) for h in range(len(weights))]
        self.buffers += [Buffer(f"u{h}", Level.TILE, DType.F32, self.buffers[0].elements) for h in range(len(weights))]
        sinks = []
        for i, (h, weight) in itertools.product(range(self.blocking.rows), enumerate(weights)):
            if is_direct:
                places = self.of.values([constant(i), self.column, terms[h]], emitter.ranges)
                x = self.of.argument(emitter, 0, places)
            else:
                x = emitter.load(DType.F32, "ca", add(constant(i * self.of.copy_row), terms[h]))
            place = add(constant(i * self.blocking.strip), var("j"))
            sinks.append(Accumulate(f"u{h}", place, emitter.apply(DType.F32, "mul", x, weight), "sum"))
        sums = Pass((j, Axis("r", rows, True)), "j", tuple(emitter.ops), tuple(sinks))
        return sums, self.added(len(weights))

    def added(self, count: int) -> Pass:
        """Return the pass that adds the scaled sums of a block to the total."""
        emitter = self.of.fusion.emitter(self.ranges)
        whole, *sums = (emitter.load(DType.F32, f"u{h}", self.total.index) for h in range(count))
        total = emitter.load(DType.F32, "t", self.total.index)
        for part in sums:
            whole = emitter.apply(DType.F32, "add", whole, part)
        scaled = emitter.apply(DType.F32, "mul", whole, self.of.factor(emitter, self.first, self.column))
        result = emitter.apply(DType.F32, "add", total, scaled)
        return Pass(self.axes, "j", tuple(emitter.ops), (store(self.total, result),))

    def many(self, is_copied: bool) -> tuple[Step, ...]:
        """Return the steps for more rows: widen some terms of the columns, and contract all rows with them."""
        of, (i, j), strip = self.of, self.axes, self.blocking.strip
        inner = min(of.at.block, self.blocking.terms)
        outer = Axis("q", self.blocking.terms // inner)
        rows = Axis("r", inner // of.at.each)
        ranges = {**self.ranges, "q": (0, outer.extent - 1), "r": (0, rows.extent - 1)}
        emitter = of.fusion.emitter(ranges)
        place = add(scale(var("q"), rows.extent), var("r")) if outer.extent > 1 else var("r")
        first = add(self.first, scale(var("q"), inner)) if outer.extent > 1 else self.first
        sinks = []
        for h, weight in enumerate(self.weights(emitter, place, first)):
            scaled = emitter.apply(DType.F32, "mul", weight, of.factor(emitter, first, self.column))
            term = add(scale(place, of.at.each), Expr(h, ()))
            sinks.append(Store("pb", add(scale(term, strip), var("j")), scaled))
        axes = (outer, rows, j) if outer.extent > 1 else (rows, j)
        widening = Pass(axes, "j", tuple(emitter.ops), tuple(sinks))
        self.buffers.append(Buffer("pb", Level.TILE, DType.F32, self.blocking.terms * strip, (Panels(strip, strip),)))
        p = Axis("p", self.blocking.terms, True)
        a = self.left()
        if is_copied or a is None:
            a = At("ca", add(scale(self.row, of.copy_row), self.first, var("p")))
        b = At("pb", add(scale(var("p"), strip), var("j")))
        return widening, Contract((i, j, p), self.total, a, b, Product.F32, registers=self.blocking.registers)

    def weights(self, emitter: Emitter, row: Expr, first: Expr | None = None) -> Iterator[str]:
        """Return the names of the integers of a row of bytes of this iteration, minus the zero point."""
        of = self.of
        at = add(scale(var("g"), self.blocking.terms // of.at.each), row)
        return of.integers(emitter, (at, self.column), self.first if first is None else first)
