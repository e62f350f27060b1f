"""Products and convolutions -> tile programs for GPUs.

There are three forms. *Blocked*: a task computes a block of rows and columns; a loop over blocks of terms
reads a block of each operand into a tile. *In parts*, for few blocks: the terms are divided into parts,
each computed by tasks of its own; a second stage adds up the parts, by elements or by blocks. *Direct*: a task
computes one element, or a few side by side, of a short sum. Operations before the product are computed where its
operands are read, operations after it on the block of sums.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType, row_major_strides
from korch.schedule.blocks import Blocked, cut, fill, flat, store
from korch.schedule.contraction import Axes, Contraction, Layouts, NotFusedError, extent
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, scale, substitute, var
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Load,
    Loop,
    Pass,
    Product,
    Stage,
    TileOp,
    TileProgram,
)
from korch.tile.lower.emit import Emitter, physical_offset

SUMS = "t"
"""The tile of sums."""

VECTOR = 4
"""The elements of the shortest vector by which blocks are loaded well."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows, columns and terms of a block, and the parts into which the terms are cut."""

    rows: int
    columns: int
    terms: int
    parts: int = 1
    adds_blocks: bool = False  # whether the parts are added up by blocks, in tasks of the same axes, not by elements
    whole: int = 0  # the blocks of rows, the first ones, whose terms are not cut; with `adds_blocks` only


class BlockLoops:
    """The loops of a blocked contraction.

    Attributes:
        part: the axis of parts.
        rows: the axis of blocks of rows, and that of a block's rows.
        columns: the same for columns.
        terms: the same for terms; a block that reaches beyond the last term is guarded.
        axes: the axes of the grid of tasks.
        sums: the element of the tile of sums at a row and a column.
    """

    def __init__(self, batch: tuple[Axis, ...], sizes: Sequence[int], blocks: Blocks) -> None:
        m, n, k = sizes
        turns = -(-k // (blocks.terms * blocks.parts))
        self.part = Axis("s", blocks.parts)
        self.rows, self.columns = cut(m, blocks.rows, ("gm", "i")), cut(n, blocks.columns, ("gn", "j"))
        self.terms = Axis("g", turns), Axis("p", blocks.terms)
        self.axes = (*((self.part,) if blocks.parts > 1 else ()), *batch, self.rows[0], self.columns[0])
        self.sums = At(SUMS, add(scale(var("i"), blocks.columns), var("j")))
        self.k, self.padded = k, turns * blocks.terms * blocks.parts

    @property
    def ranges(self) -> Ranges:
        """The range of each loop."""
        return {axis.name: (0, axis.extent - 1) for axis in (*self.axes, *self.rows, *self.columns, *self.terms)}

    @property
    def term(self) -> Expr:
        """The number of a term."""
        block = var("g")
        if self.part.extent > 1:
            block = add(scale(var("s"), self.terms[0].extent), block)
        return add(scale(block, self.terms[1].extent), var("p"))

    @property
    def guards(self) -> tuple[Inside, ...]:
        """The condition that a term exists; none if no block reaches beyond the last term."""
        return (Inside(self.term, 0, self.k),) if self.padded > self.k else ()

    def stage(
        self, product: Product, dtype: DType, operands: Sequence[tuple[Sequence[TileOp], str]], after: Pass
    ) -> tuple[Stage, tuple[Buffer, ...]]:
        """Return the stage and its tiles.

        `operands`: for each operand, the operations that compute an element, and the element's name.
        """
        (_, i), (_, j), (g, p) = self.rows, self.columns, self.terms
        zero = fill((i, j), self.sums, 0.0)
        tiles = [Buffer(SUMS, Level.TILE, DType.F32, i.extent * j.extent)]
        body, places = [], []
        for name, axes, (ops, value) in zip(("pa", "pb"), ((i, p), (p, j)), operands, strict=True):
            place = At(name, add(scale(var(axes[0].name), axes[1].extent), var(axes[1].name)))
            body.append(Pass(axes, axes[1].name, tuple(ops), (store(place, value),)))
            tiles.append(Buffer(name, Level.TILE, dtype, axes[0].extent * axes[1].extent))
            places.append(place)
        contract = Contract((i, j, replace(p, is_reduced=True)), self.sums, places[0], places[1], product)
        return Stage(self.axes, (zero, Loop(g, (SUMS,), (*body, contract)), after)), tuple(tiles)


class DeviceProduct(Blocked):
    """Programs of a group with one product or convolution.

    Raises:
        NotFusedError: from any method, if the operations around the product can't be fused with it.
    """

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction) -> None:
        super().__init__(group, root, layouts, contraction)
        self.outer = (*contraction.batch, *contraction.rows, *contraction.columns)

    @property
    def reads_single_elements(self) -> bool:
        """Whether the first operand is read one element at a time, because vectors of it are never aligned."""
        found, value = self.contraction, self.root.inputs[0]
        if value not in self.fusion.place:
            return False
        layout, shape = self.fusion.layouts[self.fusion.place[value]], self.group.body.types[value].shape
        offset = physical_offset(layout, shape, found.a, found.ranges)
        return not any(_is_aligned(offset, axes) for axes in (found.rows, found.terms))

    def blocked(self, blocks: Blocks, product: Product) -> TileProgram:
        """Return the program in which each task computes a block."""
        begin, rows = blocks.whole * blocks.rows, extent(self.contraction.rows)
        stages, buffers = self._blocked(blocks, product, begin, rows)
        if begin > 0:
            first, _ = self._blocked(replace(blocks, parts=1), product, 0, begin)
            stages = (*first, *stages)
        return TileProgram((*self.memory(), *buffers), stages)

    def _blocked(
        self, blocks: Blocks, product: Product, begin: int, end: int
    ) -> tuple[tuple[Stage, ...], tuple[Buffer, ...]]:
        """Return the stages that compute some rows of the result, and the buffers that they need."""
        found = self.contraction
        columns, terms = extent(found.columns), extent(found.terms)
        grid = BlockLoops(self.batch, (end - begin, columns, terms), blocks)
        row, column = flat(*grid.rows), flat(*grid.columns)
        values = self.values((add(row, constant(begin)), column, grid.term), grid.ranges)
        operands = []
        for position in (0, 1):
            emitter = self.fusion.emitter(grid.ranges)
            name = self.argument(emitter, position, values, grid.guards)
            operands.append((emitter.ops, name))
        axes = grid.rows[1], grid.columns[1]
        if blocks.parts == 1:
            stage, tiles = grid.stage(product, self.dtype, operands, self.after(grid.sums, axes, values, grid.ranges))
            return (stage,), tiles
        sizes = (blocks.parts, *(axis.extent for axis in self.batch), end - begin, columns)
        numbers = (var("s"), *(var(axis.name) for axis in self.batch), row, column)
        place = add(*(scale(number, step) for number, step in zip(numbers, row_major_strides(sizes), strict=True)))
        load = Load("x0", DType.F32, SUMS, grid.sums.index)
        after = Pass(axes, axes[1].name, (load,), (store(At("parts", place), "x0"),))
        stage, tiles = grid.stage(product, self.dtype, operands, after)
        more = Buffer("parts", Level.WORKSPACE, DType.F32, math.prod(sizes))
        if not blocks.adds_blocks:
            total = Buffer("u", Level.TILE, DType.F32, 1)
            return (stage, self._sum(blocks.parts)), (more, total, *tiles)
        loads = (Load("x0", DType.F32, "parts", place), Load("x1", DType.F32, SUMS, grid.sums.index))
        ops = (*loads, Apply("x2", DType.F32, "add", ("x1", "x0")))
        more_parts = Loop(grid.part, (SUMS,), (Pass(axes, axes[1].name, ops, (store(grid.sums, "x2"),)),))
        steps = (fill(axes, grid.sums, 0.0), more_parts, self.after(grid.sums, axes, values, grid.ranges))
        return (stage, Stage(grid.axes[1:], steps)), (more, *tiles)

    def direct(self) -> TileProgram:
        """Return the program in which each task computes one element."""
        found, ranges = self.contraction, self.contraction.ranges
        emitter = self.fusion.emitter(ranges)
        names = [
            self.fusion.argument(emitter, value, index)
            for value, index in zip(self.root.inputs, (found.a, found.b), strict=True)
        ]
        ops = emitter.ops
        if self.dtype is not DType.F32:
            ops += [Apply(f"w{i}", DType.F32, "cast", (name,)) for i, name in enumerate(names)]
            names = ["w0", "w1"]
        ops.append(Apply("product", DType.F32, "mul", tuple(names)))
        axes = tuple(Axis(name, n, is_reduced=True) for name, n in found.terms)
        sum_ = Pass(axes, axes[-1].name if axes else "", tuple(ops), (Accumulate(SUMS, ZERO, "product", "sum"),))
        if not axes:
            sum_ = replace(sum_, sinks=(store(At(SUMS, ZERO), "product"),))
        tile = Buffer(SUMS, Level.TILE, DType.F32, 1)
        return TileProgram((*self.memory(), tile), (self._elements(At(SUMS, ZERO), sum_),))

    def side_by_side(self, count: int) -> TileProgram:
        """Return the program in which each task computes some elements that are adjacent along the images' first axis.

        Their sums are unrolled, so that they share what they read.

        Raises:
            NotFusedError: images have no axis with more than one output.
        """
        found, place = self.contraction, next((name for name, _ in self.contraction.rows if name.startswith("p")), None)
        if place is None:
            raise NotFusedError("there is one output per image")
        size = dict(found.rows)[place]
        ranges = {**found.ranges, place: (0, -(-size // count) - 1)}
        emitter, results, passes = self.fusion.emitter(ranges), list[Buffer](), list[Pass]()
        sinks = []
        for number in range(count):
            own = {place: add(scale(var(place), count), constant(number))}
            total = self._unrolled(emitter, own)
            at = At(f"r{number}", ZERO)
            sinks.append(store(at, total))
            results.append(Buffer(at.buffer, Level.TILE, DType.F32, 1))
            is_inside = Inside(own[place], 0, size)
            where = (is_inside,) if size % count else ()
            passes.append(replace(self.after(at, (), own, ranges), where=where))
        axes = self._in_memory_order(passes[0], {**dict(self.outer), place: ranges[place][1] + 1})
        sums = Pass((), "", tuple(emitter.ops), tuple(sinks))
        return TileProgram((*self.memory(), *results), (Stage(axes, (sums, *passes)),))

    def _unrolled(self, emitter: Emitter, own: Mapping[str, Expr]) -> str:
        """Emit a whole sum in float32, with some of the contraction's variables replaced; return its name."""
        found, total = self.contraction, ""
        for point in itertools.product(*(range(n) for _, n in found.terms)):
            values = {**own, **{name: constant(i) for (name, _), i in zip(found.terms, point, strict=True)}}
            names = []
            for value, index in zip(self.root.inputs, (found.a, found.b), strict=True):
                name = self.fusion.argument(
                    emitter, value, tuple(substitute(expr, values, emitter.ranges) for expr in index)
                )
                names.append(name if self.dtype is DType.F32 else emitter.apply(DType.F32, "cast", name))
            product = emitter.apply(DType.F32, "mul", *names)
            total = emitter.apply(DType.F32, "add", total, product) if total else product
        return total

    def _sum(self, parts: int) -> Stage:
        load = Load("x0", DType.F32, "parts", self._part_place())
        sum_ = Pass((Axis("s", parts, is_reduced=True),), "s", (load,), (Accumulate("u", ZERO, "x0", "sum"),))
        return self._elements(At("u", ZERO), sum_)

    def _part_place(self) -> Expr:
        """Return the index of an element's sum over one part."""
        axes = (("s", 0), *self.outer)
        steps = row_major_strides(tuple(n for _, n in axes))
        return add(*(scale(var(name), step) for (name, _), step in zip(axes, steps, strict=True)))

    def _elements(self, total: At, sum_: Pass) -> Stage:
        """Return the stage with one task per element, in the memory order of the first output."""
        after = self.after(total, (), {}, self.contraction.ranges)
        return Stage(self._in_memory_order(after, dict(self.outer)), (sum_, after))

    def _in_memory_order(self, after: Pass, sizes: Mapping[str, int]) -> tuple[Axis, ...]:
        """Return axes of some sizes in the memory order of the first output."""
        steps = {name: after.sinks[0].index.coefficient(name) for name in sizes}
        return tuple(Axis(name, sizes[name]) for name in sorted(sizes, key=lambda name: -(steps[name] or 0)))


def _is_aligned(offset: Expr, axes: Axes) -> bool:
    """Return whether vectors along the last of some axes are adjacent in memory, and begin at multiples of a vector."""
    run, inside = 1, set[str]()
    for name, n in reversed(axes):
        if offset.coefficient(name) != run:
            break
        run *= n
        inside.add(name)
    others = [offset.coefficient(name) for name in offset.variables - inside]
    return (
        run % VECTOR == 0 and offset.constant % VECTOR == 0 and all(n is not None and n % VECTOR == 0 for n in others)
    )
