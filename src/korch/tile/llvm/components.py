"""Prints products of operands that are split into bfloat16 components, of which each element has one, on vectors.

Each lane multiplies two terms and adds the products to its sum. The operand that is made last is split block by block
while products are computed (`korch.tile.analysis.components`); other operands are split before that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from korch.primitive.types import DType
from korch.system.alignment import round_up
from korch.target import EDGE
from korch.tile.analysis.components import WINDOW_AXES, pixels_of, split_of
from korch.tile.analysis.panels import in_rows, panels
from korch.tile.analysis.sums import sides_of
from korch.tile.ir.index import constant as number
from korch.tile.ir.index import scale, substitute, vector_step
from korch.tile.ir.program import PAIR, At, Axis, Contract, Level, Load, Registers, Split, TileProgram, refused
from korch.tile.llvm.block import BlockPrinter, Lines, OperandSide, SumBlock
from korch.tile.llvm.contract import ContractPrinter, Strip
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.functions import fused
from korch.tile.llvm.index import Env, address
from korch.tile.llvm.instructions import dot_of_vectors
from korch.tile.llvm.memory import Place
from korch.tile.llvm.splitter import LANES, PAIRS, STEP, TILE, OperandSplitter
from korch.tile.llvm.sums import SumsPrinter

SUMS = 16
"""The vectors of sums of a block: they and the operands fill at least half of the registers."""

UNROLLED_PAIRS = 4

PIXELS_AHEAD = 8
"""The prefetch distance in steps of channels of pixels, on matrix units."""

PRODUCT_AXES = 3
"""The number of axes of a product: rows, columns and terms."""


def refused_components(program: TileProgram, step: Contract, *, on_units: bool) -> str:
    """Return why a contraction of components is not printed; "" if it is."""
    splits = [split_of(program.buffer(at.buffer)) for at in (step.a, step.b)]
    if not all(splits):
        return "a product of numbers that are not split"
    if on_units:
        return ""
    if any(split is None or split.components > 1 for split in splits):
        return "products of several components on vectors"
    if step.factor is None and (step.where or len(step.axes) not in (PRODUCT_AXES, WINDOW_AXES)):
        return "products of components of linked convolutions on vectors"
    return ""


@dataclass
class SplitBlockPrinter(BlockPrinter):
    """Prints the blocks of a contraction of components."""

    # the loops over steps of terms: their count, and the distances in both operands
    turns: Sequence[tuple[SsaValue, int, int]] = ()
    # prints the factors of a block's columns, given an index of the first loop; None if there are none
    factors: Callable[[SsaValue, SumBlock], list[SsaValue]] | None = None

    def _outer(
        self, axes: Sequence[Axis], block: SumBlock, at: tuple[SsaValue, SsaValue, SsaValue], sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        """Print the loops over steps, and over the pairs of terms of a step."""
        return self._steps(self.turns, block, at[:PAIR], sums)

    def _steps(
        self,
        turns: Sequence[tuple[SsaValue, int, int]],
        block: SumBlock,
        at: Sequence[SsaValue],
        sums: Sequence[SsaValue],
    ) -> Sequence[SsaValue]:
        emit = self.emit

        def step(k: SsaValue, *own: SsaValue) -> Sequence[SsaValue]:
            if len(turns) == 1:
                self._prefetch(block, k)
            places = [emit.add(x, emit.times(k, n)) for x, n in zip(at, turns[0][1:], strict=True)]
            if self.factors is None or len(turns) < len(self.turns):
                return self._steps(turns[1:], block, places, own)
            zeros = [constant("float", 0.0, self.lanes)] * len(own)
            found, factors = self._steps(turns[1:], block, places, zeros), self.factors(k, block)
            return [fused(emit, x, factors[i % block.vectors], own[i]) for i, x in enumerate(found)]

        def pairs(p: SsaValue, *own: SsaValue) -> Sequence[SsaValue]:
            a_at, b_at = (emit.add(x, emit.times(p, n)) for x, n in zip(at, (PAIR, EDGE), strict=True))
            found: Sequence[SsaValue] = own
            for u in range(UNROLLED_PAIRS):
                found = self._added(block, (a_at, u * PAIR), (b_at, u * EDGE), found)
            return found

        if not turns:
            return emit.loop(emit.index(0), emit.index(PAIRS), UNROLLED_PAIRS, pairs, *sums)
        return emit.loop(emit.index(0), turns[0][0], 1, step, *sums)

    def _added(
        self, block: SumBlock, a: tuple[SsaValue, int], b: tuple[SsaValue, int], sums: Sequence[SsaValue]
    ) -> list[SsaValue]:
        """Print the multiply-adds of a pair of terms."""
        emit, found = self.emit, list(sums)
        second = emit.place("i16", block.second, b[0])
        offsets = [n // LANES * TILE + n % LANES * PAIR for n in range(0, block.vectors * self.lanes, self.lanes)]
        places = [emit.place("i16", second, emit.index(b[1] + offset)) for offset in offsets]
        columns = [self._pairs(self.b, place, self.lanes) for place in places]
        dot = dot_of_vectors(DType.BF16, DType.BF16, self.context.isa.features)
        assert dot is not None
        for r, (first, offset) in enumerate(block.first):
            at = emit.place("i16", emit.place("i16", first, a[0]), emit.index(offset + a[1]))
            x = self._pairs(self.a, at, 1)
            for v, column in enumerate(columns):
                k = r * block.vectors + v
                found[k] = dot.add(emit, found[k], x, column)
        return found

    def _pairs(self, side: OperandSide, at: SsaValue, lanes: int) -> SsaValue:
        """Print a load of pairs of terms; a single one is repeated in each lane."""
        emit = self.emit
        x = emit.splat(emit.load("i32", lanes, at, 4, emit.depth, self.era_of(side)), self.lanes)
        return emit.pure("bfloat", PAIR * self.lanes, f"bitcast {x.typed} to <{PAIR * self.lanes} x bfloat>", x)


class ComponentPrinter(ContractPrinter):
    """Prints one contraction of components."""

    ahead = 0
    """The prefetch distance of columns in terms, while they are split; 0 if nothing is prefetched."""

    def _blocks(self, env: Env) -> None:
        """Print the loops over blocks of the operand that is split meanwhile, and over those of the other one."""
        step, makers, moving = self.step, self.context.makers, self.context.passing
        self.passes_rows, self.passes_columns = (at.buffer in moving for at in (step.a, step.b))
        self.parts = [self._split_of(at).components for at in (step.a, step.b)]
        second = makers.get(step.b.buffer)
        is_apart = second is not None and len(second.sinks) == 1
        self.row_maker, self.column_maker = (
            OperandSplitter(self.context, self.grid, makers[at.buffer], env, is_image=is_image, is_apart=is_apart)
            if at.buffer in makers
            else None
            for at, is_image in ((step.a, len(step.axes) == WINDOW_AXES), (step.b, False))
        )
        for maker, most in ((self.row_maker, 2 * EDGE), (self.column_maker, 4 * EDGE)):
            if maker is not None:
                maker.ahead = min(self.ahead, most)
        self.a, self.b = (self._components(at, env) for at in (step.a, step.b))
        out = self._side(step.out, env)
        self._measure(env)
        if out.steps[self.columns.name] != 1:
            raise refused(f"buffer {out.buffer} has no columns side by side")
        finish = self.sums.finish and SumsPrinter(self.context, self.grid, step, self.sums.finish, env)
        rescale = self._side(step.rescale, env) if step.rescale is not None else None
        vectors = EDGE // self.lanes
        self.registers = Registers(min(SUMS // vectors, math.prod(axis.extent for axis in self.rows)), vectors)
        self.printer = SplitBlockPrinter(
            self.context,
            self.registers,
            (out, self.a, self.b),
            self.rows,
            (),
            TILE,
            self.emit.index(0),
            finish or None,
            self.sums.is_zeroed,
            rescale,
            self.turns,
            partial(self._factors, step.factor, env) if step.factor is not None else None,
        )
        self.end = self._end(self.columns, env)
        self.is_made = False
        if self.column_maker is not None and not self.passes_columns:
            self._strips(self.end, TILE, self.strip, None)
        self.is_made = True
        self._products(env)

    def _split_of(self, at: At) -> Split:
        split = split_of(self.context.program.buffer(at.buffer))
        assert split is not None
        return split

    def _components(self, at: At, env: Env) -> OperandSide:
        """Print the address of an operand's components."""
        buffer, base = self.context.program.buffer(at.buffer), self.context.bases[at.buffer]
        if buffer.level is Level.INPUT:
            layout = panels(buffer)
            assert layout is not None
            start = substitute(at.index, {axis.name: number(0) for axis in self.step.axes}, self.ranges)
            place = scale(in_rows(buffer, layout, start, self.ranges), self.parts[1])
            base = address(self.emit, "i16", base, place, env)
        return OperandSide(at.buffer, "i16", base, {}, True)

    def _measure(self, env: Env) -> None:
        """Print the number of terms; take the sizes of blocks and strips."""
        emit, second = self.emit, self.context.program.buffer(self.step.b.buffer)
        self.rows, self.columns, (*outer, terms) = sides_of(self.step)
        count, blocks = math.prod(axis.extent for axis in (*outer, terms)), math.prod(axis.extent for axis in outer)
        self.terms = emit.index(count) if outer else self._end(terms, env)
        self.size = round_up(count, EDGE) * EDGE
        steps = emit.index(terms.extent) if outer else self.terms
        self.turns = [(emit.divided(emit.add(steps, emit.index(EDGE - 1)), EDGE), STEP, STEP)]
        if self.step.factor is not None:
            if terms.extent % EDGE or terms.name in self.step.factor.index.variables:
                raise refused("a factor of products is not that of whole blocks of terms")
            distance = terms.extent * EDGE
            self.turns = [(emit.index(blocks), distance, distance), *self.turns]
            self.blocks = [axis.name for axis in outer]
        self.strip = 0 if self.passes_columns else self.size * self.parts[1]
        layout = panels(second)
        if layout is not None and second.level is Level.INPUT:
            self.strip = second.size // layout.columns * layout.width * self.parts[1]

    def _factors(self, at: At, env: Env, k: SsaValue, block: SumBlock) -> list[SsaValue]:
        """Print the loads of the factors of a block's columns for a block of terms."""
        emit, context, found = self.emit, self.context, []
        index = substitute(at.index, {}, self.ranges)
        if vector_step(index, self.columns.name, self.lanes) != 1:
            raise refused(f"the factors in buffer {at.buffer} are not adjacent")
        for v in range(block.vectors):
            column = emit.add(block.column, emit.index(v * self.lanes))
            own = {**env, **dict.fromkeys(self.blocks, k), self.columns.name: column}
            kind = context.kinds[at.buffer]
            place = address(emit, kind, context.bases[at.buffer], index, own)
            read = Place(place, context.dtypes[at.buffer], kind, emit.depth)
            found.append(context.memory.load(read, self.lanes, block.mask_of(v)))
        return found

    def _products(self, env: Env) -> None:
        """Print the loops over blocks of rows and strips of columns."""
        emit, total = self.emit, math.prod(axis.extent for axis in self.rows[1:])
        rows = emit.times(self._end(self.rows[0], env), total)

        def block(first: SsaValue) -> None:
            self.first, self.count = first, emit.least(emit.index(EDGE), emit.add(rows, emit.times(first, -1)))
            if self.row_maker is not None:
                at = emit.index(0) if self.passes_rows else emit.times(emit.divided(first, EDGE), self.size)
                self.row_maker.rows_block(emit.place("i16", self.a.at, at), first, self.count, self.terms)
            if self.passes_rows:
                self._strips(self.end, TILE, self.strip, None)

        emit.loop(emit.index(0), rows, EDGE, block)
        if not self.passes_rows:
            self.first, self.count = emit.index(0), rows
            self._strips(self.end, TILE, self.strip, None)

    def _strip(self, strip: Strip) -> None:
        """Print how a strip of columns is split, or its blocks of sums."""
        if self.column_maker is not None and (self.passes_columns or not self.is_made):
            self._split_columns(self.column_maker, strip)
        if self.is_made:
            self._sums_of_strip(strip)

    def _split_columns(self, maker: OperandSplitter, strip: Strip) -> None:
        maker.columns_block(strip.second, strip.column, self._masks(strip), (self.terms, self.emit.index(0)))

    def _masks(self, strip: Strip) -> list[SsaValue | None]:
        """Print which columns of a strip exist, for each vector that is split."""
        emit, mask, columns = self.emit, strip.mask, strip.vectors * self.lanes
        before = (columns - 1) // LANES
        if self.lanes < LANES and (mask is not None or columns % LANES):
            assert self.column_maker is not None
            left = emit.add(self.end, emit.times(emit.add(strip.column, emit.index(before * LANES)), -1))
            mask = self.column_maker.lanes_before(left)
        return [*[None] * before, mask]

    def _sums_of_strip(self, strip: Strip) -> None:
        super()._strip(strip)

    def _rows(self, strip: Strip, r: SsaValue, rows: int) -> None:
        emit, size = self.emit, self.rows[-1].extent
        row, base = emit.add(self.first, r), emit.place("i16", self.a.at, emit.times(emit.rest(r, EDGE), EDGE))
        if not self.passes_rows:
            base = emit.place("i16", base, emit.times(emit.divided(row, EDGE), self.size))

        def group(i: int) -> SsaValue:
            return emit.divided(emit.add(row, emit.index(i)), size)

        first = [(base, i * EDGE) for i in range(rows)]
        block = SumBlock(row, rows, strip.column, strip.vectors, first, strip.second, strip.mask, group)
        self.printer.run(replace(block, lines=self._lines(strip, r)))

    def _lines_of_b(self, strip: Strip, r: SsaValue) -> list[Lines]:
        """Print the lines of the next strip of a second operand that is given in components."""
        size = STEP * self.b.size_bytes
        if self.column_maker is not None:
            return []
        return self._lines_ahead(strip, r, (size, self.emit.index(size)), (strip.second, self.emit.index(0)))

    def _lines_of_a(self, strip: Strip, r: SsaValue) -> list[Lines]:
        return []


class ComponentWindowPrinter(ComponentPrinter):
    """Prints one contraction over windows of an image that is split into components: pixels side by side."""

    in_classes = False
    """Whether the rows of the image are in classes."""

    def _measure(self, env: Env) -> None:
        """Take the sizes of the image and of strips."""
        emit, step = self.emit, self.step
        y, x, self.columns, *taps, channels = step.axes
        self.rows, self.taps = [y, x], taps
        self.pixels = own = pixels_of(self.context.program, step, in_classes=self.in_classes)
        self.channel_steps, self.channels = -(-channels.extent // EDGE), channels.extent
        self.size = self.channel_steps * STEP
        self.strip = 0 if self.passes_columns else self.size * math.prod(axis.extent for axis in taps) * self.parts[1]
        self.most = y.extent
        if self.passes_rows and step.registers is not None:
            self.most = min(self.most, step.registers.rows)
        self.plane = own.classes * own.of_class(self.most) * EDGE
        self.turns = [
            (emit.index(taps[0].extent), own.dilations[0] * own.pitch * EDGE, taps[1].extent * self.size),
            (emit.index(taps[1].extent), own.dilations[1] * EDGE, self.size),
            (emit.index(self.channel_steps), self.plane, STEP),
        ]

    def _products(self, env: Env) -> None:
        """Print the loops over blocks of rows of results and strips of columns."""
        emit, rows = self.emit, self._end(self.rows[0], env)

        def block(first: SsaValue) -> None:
            self.first, self.count = first, emit.least(emit.index(self.most), emit.add(rows, emit.times(first, -1)))
            self._split_block(self.a.at, first, self.count)
            self._strips(self.end, TILE, self.strip, None)

        emit.loop(emit.index(0), rows, self.most, block)

    def _split_block(self, to: SsaValue, first: SsaValue, count: SsaValue) -> None:
        """Print how the pixels are split that some rows of results read."""
        emit, own = self.emit, self.pixels
        met = self._met(count)
        some = partial(self._pixel, to, first, met)
        emit.loop(emit.index(0), emit.index(own.met(self.most) * own.pitch * self.channel_steps), 1, some)
        self._zeros(to, met)

    def _met(self, count: SsaValue) -> SsaValue:
        """Print how many rows of the image some rows of results read."""
        return self.emit.add(self.emit.times(count, self.pixels.strides[0]), self.emit.index(self.pixels.met(0)))

    def _zeros(self, to: SsaValue, met: SsaValue) -> None:
        """Print the stores of the zeros after the last row of each class, given the rows of the image."""
        emit, own, zero = self.emit, self.pixels, constant("i16", 0, EDGE)
        for c in range(own.classes if own.extra else 0):
            rows = emit.divided(emit.add(met, emit.index(own.classes - 1 - c)), own.classes)
            at = emit.place("i16", to, emit.index(c * own.of_class(self.most) * EDGE))
            at = emit.place("i16", at, emit.times(rows, own.pitch * EDGE))

            def plane(i: SsaValue, at: SsaValue = at) -> None:
                for v in range(own.extra):
                    place = emit.add(emit.times(i, self.plane), emit.index(v * EDGE))
                    emit.store(zero, emit.place("i16", at, place), 2 * EDGE)

            emit.loop(emit.index(0), emit.index(self.channel_steps * self.parts[0]), 1, plane)

    def _pixel(self, to: SsaValue, first: SsaValue, met: SsaValue, number: SsaValue) -> None:
        """Print how a step of channels of a pixel is split."""
        emit, own, maker = self.emit, self.pixels, self.row_maker
        assert maker is not None
        load = next((op for op in maker.pass_.ops if isinstance(op, Load)), None)
        if load is not None and (load.index.coefficient(maker.last.name) == 1 or maker.last.extent == 1):
            pixel, step = emit.divided(number, self.channel_steps), emit.rest(number, self.channel_steps)
        else:
            pixels = own.pitch * own.met(self.most)
            pixel, step = emit.rest(number, pixels), emit.divided(number, pixels)
        (u, v), row = maker.rows, emit.divided(pixel, own.pitch)
        at = emit.times(emit.rest(row, own.classes), own.of_class(self.most))
        at = emit.add(at, emit.times(emit.divided(row, own.classes), own.pitch))
        x = emit.rest(pixel, own.pitch)
        to = emit.place("i16", to, emit.times(emit.add(at, x), EDGE))
        to = emit.place("i16", to, emit.times(step, self.plane * self.parts[0]))
        place = {u.name: emit.add(emit.times(first, own.strides[0]), row), v.name: x}
        ahead = {**place, v.name: emit.add(x, emit.index(max(1, PIXELS_AHEAD // self.channel_steps)))}
        line = partial(maker.line, to, place, emit.times(step, EDGE), emit.index(self.channels), self.plane, ahead)
        emit.branch(constant("i1", 1) if met.number == own.met(self.most) else emit.before(row, met), line)

    def _split_columns(self, maker: OperandSplitter, strip: Strip) -> None:
        emit = self.emit

        def tap(i: SsaValue) -> None:
            at = emit.place("i16", strip.second, emit.times(i, self.size * self.parts[1]))
            ends = emit.index(self.channels), emit.times(i, self.channels)
            maker.columns_block(at, strip.column, self._masks(strip), ends)

        emit.loop(emit.index(0), emit.index(math.prod(axis.extent for axis in self.taps)), 1, tap)

    def _sums_of_strip(self, strip: Strip) -> None:
        """Print the loops over rows of results and over blocks of a row."""
        emit, own, width = self.emit, self.pixels, self.rows[1].extent
        at_once = -(-width // -(-width // (SUMS // self.registers.vectors)))
        across = own.strides[1] * EDGE
        down = own.strides[0] * own.pitch * EDGE

        def row(y: SsaValue) -> None:
            line, start = emit.place("i16", self.a.at, emit.times(y, down)), emit.add(self.first, y)

            def block(x: SsaValue, rows: int = at_once) -> None:
                base = emit.place("i16", line, emit.times(x, across))
                first = [(base, i * across) for i in range(rows)]
                number = emit.add(emit.times(start, width), x)
                self.printer.run(
                    SumBlock(
                        number, rows, strip.column, strip.vectors, first, strip.second, strip.mask, lambda i: start
                    )
                )

            whole = width // at_once * at_once
            emit.loop(emit.index(0), emit.index(whole), at_once, block)
            if width > whole:
                block(emit.index(whole), width - whole)

        emit.loop(emit.index(0), self.count, 1, row)
