"""Products of data that is rounded to bytes, by weights stored in few bits -> tile programs with exact integer sums.

A first stage rounds each block of terms of a row to multiples of its largest magnitude / 127. A task then multiplies
its rows by a strip of columns, a block of terms at a time: the sums of products of bytes are exact, and are multiplied
by the scales of the row's block and of the column's.
"""

from dataclasses import dataclass

from korch.primitive.ops.stored import GROUP, LEAST, MOST, StoredAttributes
from korch.primitive.types import DType
from korch.schedule.blocks import cut, fill, flat, spaced, store
from korch.schedule.contraction import in_panels
from korch.schedule.products import multiplied
from korch.schedule.stored import BLOCK_ROWS, Stored
from korch.system.alignment import ceil_div, round_up
from korch.tile.ir.index import Expr, add, scale, var
from korch.tile.ir.program import (
    Accumulate,
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
    Store,
    TileProgram,
)
from korch.tile.lower.emit import Emitter


@dataclass(frozen=True, slots=True)
class _Data:
    """The rounded data: where an integer is, and where the scale and the sum of a row's block are."""

    row: int  # the step between rows of integers
    blocks: int  # the blocks of a row

    def integer(self, row: Expr, term: Expr) -> At:
        return At("qa", add(scale(row, self.row), term))

    def of_block(self, buffer: str, row: Expr, block: Expr) -> At:
        return At(buffer, add(scale(row, self.blocks), block))


def product_of(at: StoredAttributes, lanes: int) -> Product:
    """Return how rounded data is multiplied by whole or parts of bytes, by vector units with some number of lanes."""
    return multiplied(Product.S8U8, lanes) if at.each == 1 else Product.S8U8


class StoredBytes(Stored):
    """The programs of a group around one `matmul_stored` primitive with rounded data."""

    @property
    def bytes(self) -> Product:
        """How the rounded data is multiplied."""
        return product_of(self.at, self.machine.lanes)

    def byte_program(self, registers: Registers) -> TileProgram:
        """Return the program whose tasks have strips of as many columns as the vectors of some registers.

        Raises:
            NotFusedError: the operations around the product can't be fused with it.
        """
        lanes, at = self.machine.lanes, self.at
        strip, blocks = registers.vectors * lanes, self.all_terms // at.block
        data = _Data(spaced(self.all_terms, GROUP), blocks)
        gm, i = cut(self.rows, min(self.rows, BLOCK_ROWS), ("gm", "i"))
        gn, j = cut(self.columns, strip, ("gn", "j"))
        turn = Axis("g", blocks)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (gm, i, gn, j, turn)}
        row, column = flat(gm, i), flat(gn, j)
        total, sums = (At(name, add(scale(var("i"), strip), var("j"))) for name in "tu")
        contract = self._contract((i, j), sums, data, row, column, registers)
        body = (fill((i, j), sums, 0, DType.I32), contract, self._added((i, j), (total, sums), data, row, column))
        places = self.values([row, column, var("x2")], {**ranges, "x2": (0, 0)})
        after = self.after(total, (i, j), places, ranges)
        main = Stage((gn, gm), (fill((i, j), total, 0.0), Loop(turn, ("t",), body), after))
        rounding, tiles = self._rounding(data)
        integers = in_panels(self.all_terms // at.each, round_up(self.columns, strip), strip, self.bytes.group)
        buffers = [
            *self.memory(integers),
            Buffer("qa", Level.WORKSPACE, self.bytes.types[0], self.rows * data.row),
            Buffer("sa", Level.WORKSPACE, DType.F32, self.rows * blocks),
            Buffer("za", Level.WORKSPACE, DType.F32, self.rows * blocks),
            *tiles,
            Buffer("t", Level.TILE, DType.F32, i.extent * strip),
            Buffer("u", Level.TILE, DType.I32, i.extent * strip),
        ]
        return TileProgram(tuple(buffers), (rounding, main))

    def _rounding(self, data: _Data) -> tuple[Stage, list[Buffer]]:
        """Return the stage that rounds the data, and its tiles: integers, scales and the sums of integers."""
        size = self.at.block
        rows = Axis("c", self.rows)
        each = data.blocks if self.rows >= self.machine.threads else ceil_div(data.blocks, self.machine.threads)
        gb, b = cut(data.blocks, each, ("gb", "b"))
        k, summed = Axis("k", size), Axis("k", size, True)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (rows, gb, b, k)}
        block, place = flat(gb, b), add(scale(var("b"), size), var("k"))
        term = add(scale(block, size), var("k"))
        emitter = self.fusion.emitter(ranges)
        guards = emitter.inside(term, 0, self.terms)
        values = self.values([var("c"), var("x1"), term], {**ranges, "x1": (0, 0)})
        name = self.argument(emitter, 0, values, guards)
        copy = Pass((b, k), "k", tuple(emitter.ops), (Store("x", place, name),))

        emitter = self.fusion.emitter(ranges)
        size_of = emitter.apply(DType.F32, "abs", emitter.load(DType.F32, "x", place))
        most = Pass((b, summed), "k", tuple(emitter.ops), (Accumulate("m", var("b"), size_of, "max"),))

        emitter = self.fusion.emitter(ranges)
        largest = emitter.load(DType.F32, "m", var("b"))
        divisor = emitter.apply(DType.F32, "max", largest, emitter.literal(DType.F32, LEAST))
        inverse = emitter.apply(DType.F32, "div", emitter.literal(DType.F32, float(MOST)), divisor)
        factor = emitter.apply(DType.F32, "mul", largest, emitter.literal(DType.F32, 1 / MOST))
        unknown = emitter.apply(DType.F32, "sub", largest, largest)  # NaN if the block has an infinity
        at = data.of_block("sa", var("c"), block)
        sinks = (Store("v", var("b"), inverse), store(at, emitter.apply(DType.F32, "add", factor, unknown)))
        scales = Pass((b,), "b", tuple(emitter.ops), sinks)

        emitter = self.fusion.emitter(ranges)
        pair = emitter.load(DType.F32, "x", place), emitter.load(DType.F32, "v", var("b"))
        whole = emitter.apply(DType.F32, "round", emitter.apply(DType.F32, "mul", *pair))
        integer = data.integer(var("c"), term)
        stores = (Store("x", place, whole), store(integer, emitter.apply(self.bytes.types[0], "cast", whole)))
        integers = Pass((b, k), "k", tuple(emitter.ops), stores)

        own = data.of_block("za", var("c"), block)
        sums = Pass(
            (b, summed), "k", (Load("x0", DType.F32, "x", place),), (Accumulate(own.buffer, own.index, "x0", "sum"),)
        )
        tiles = [Buffer(name, Level.TILE, DType.F32, n) for name, n in (("x", each * size), ("m", each), ("v", each))]
        return Stage((rows, gb), (copy, most, scales, integers, sums)), tiles

    def _contract(
        self, axes: tuple[Axis, Axis], sums: At, data: _Data, row: Expr, column: Expr, registers: Registers
    ) -> Contract:
        """Return the contraction of the bytes of a block of terms."""
        strip, each, block = registers.vectors * self.machine.lanes, self.at.each, self.at.block
        columns = round_up(self.columns, strip)
        q, h, r = Axis("q", block // (GROUP * each), True), Axis("h", each, True), Axis("r", GROUP, True)
        first = scale(var("g"), block)
        term = add(first, scale(var("q"), GROUP * each), scale(var("h"), GROUP), var("r"))
        byte = add(scale(var("g"), block // each), scale(var("q"), GROUP), var("r"))
        terms, part = ((q, h, r), "h") if each > 1 else ((Axis("r", block, True),), "")
        if each == 1:
            term = byte = add(first, var("r"))
        b = At(self.name_of(1), add(scale(byte, columns), column))
        a = data.integer(row, term)
        return Contract((*axes, *terms), sums, a, b, self.bytes, registers=registers, part=part)

    def _added(self, axes: tuple[Axis, Axis], at: tuple[At, At], data: _Data, row: Expr, column: Expr) -> Pass:
        """Return the pass that adds the scaled sums of a block to the total."""
        total, sums = at
        ranges = {axis.name: (0, axis.extent - 1) for axis in axes}
        emitter = self.fusion.emitter(ranges)
        places = data.of_block("za", row, var("g")), data.of_block("sa", row, var("g")), total
        whole = emitter.load(DType.I32, sums.buffer, sums.index)
        integers, scales, before = (emitter.load(DType.F32, at.buffer, at.index) for at in places)
        found = emitter.apply(DType.F32, "cast", whole)
        if zero := self._zero(emitter, column):
            found = emitter.apply(DType.F32, "sub", found, emitter.apply(DType.F32, "mul", integers, zero))
        factor = emitter.apply(DType.F32, "mul", scales, self.factor(emitter, scale(var("g"), self.at.block), column))
        result = emitter.apply(DType.F32, "add", before, emitter.apply(DType.F32, "mul", found, factor))
        return Pass(axes, "j", tuple(emitter.ops), (store(total, result),))

    def _zero(self, emitter: Emitter, column: Expr) -> str:
        """Return the name of the zero point of a block as a float; "" if it is 0."""
        if len(self.root.inputs) == 4:
            own = emitter.value(self.root.inputs[3], (var("g"), column))
            return emitter.apply(DType.F32, "cast", own)
        return emitter.literal(DType.F32, float(self.at.zero)) if self.at.zero else ""
