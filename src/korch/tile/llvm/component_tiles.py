"""Prints products of operands that are split into bfloat16 components, on matrix units (AMX).

A float32 has 24 significant bits, a bfloat16 has 8, so x = x0 + x1 + x2 exactly, each the nearest bfloat16 to the
remainder after the ones before. Of the nine products of components, the six largest are summed in float32. The others
are at most 2^-23 of |x y| together, usually less than the rounding error of one float32 product. As the units round a
sum only six times per 32 terms, the result is more accurate than a chain of float32 multiply-adds. Components, products
and sums below 2^-126 are zero. All products of operands with up to two components are summed.

The components of one operand stay in the cache while the other operand is streamed: 32 of its rows or columns at a
time are split and multiplied by all of the other one. Meanwhile, the vector units split the next rows or columns, or
prefetch them if they come as components, and finish the sums before. Numbers that are infinite, or round to infinity,
have no components: the sums are then not finite, and vector units compute them again, as they do if the system does not
allow the use of matrix units.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from korch.primitive.types import DType
from korch.target import EDGE
from korch.tile.analysis.registers import STRIP
from korch.tile.ir.program import PAIR
from korch.tile.llvm.block import SumBlock
from korch.tile.llvm.components import ComponentPrinter
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.functions import fused
from korch.tile.llvm.index import Env, both, condition, loop_inside
from korch.tile.llvm.instructions import TILE_BYTES, TILE_ROWS, configure_tiles, dot_of_tiles, print_tiles
from korch.tile.llvm.splitter import LANES, PAIRS, STEP, TILE, TOP
from korch.tile.llvm.tiles import NO, SUMS, YES, Pending, TileCore, TileTurn
from korch.tile.lower.buffers import LINE_BYTES

MOST_COMPONENTS = 3

MOST_FACTOR_ROWS = 4 * EDGE
"""The maximum rows of a contraction with a factor per block of terms: their sums stay in the cache."""

ZERO, NAN = constant("float", 0.0, LANES), constant("float", math.nan, LANES)


def pairs_of(a: int, b: int) -> list[tuple[int, int]]:
    """Return the components that are multiplied in a step, in order; consecutive pairs share one if possible."""
    found: list[tuple[int, int]] = []
    last = 0  # the last column of the row before; the order is reversed below
    for i in reversed(range(a)):
        first = last
        others = [j for j in range(min(b, MOST_COMPONENTS - i)) if j != first]
        found += [(i, j) for j in (first, *others)]
        last = found[-1][1]
    return found[::-1]


Tiles = Callable[[int, SsaValue, int], SsaValue]
"""Prints the address of a tile, given its number, the step, and the number of the component."""


class ComponentTilePrinter(TileCore, ComponentPrinter):
    """Prints one contraction of components on matrix units."""

    kind, ahead = "float", 4 * EDGE
    dot = dot_of_tiles(DType.BF16, DType.BF16)

    def run(self) -> None:
        """Print the contraction; of its guards, some limit its rows."""
        if not self.step.where:
            super().run()
            return
        guards = [guard for guard in self.step.where if self.step.axes[0].name not in guard.expr.variables]
        self.emit.branch(condition(self.emit, guards, self.env, self.ranges), lambda: self._blocks(self.env))

    def _products(self, env: Env) -> None:
        emit, zero = self.emit, self.emit.index(0)
        self.pairs, self.parts_of_terms, self.around = pairs_of(*self.parts), 1, env
        self.begin, self.count = self._span(env)
        self.down, self.across = (self._quotient(n, emit.index(EDGE)) for n in (self.count, self.end))
        self.found, self.steps = emit.array("float", 2 * SUMS), self.turns[-1][0]
        if self.step.factor is not None:
            self.parts_of_terms = self.turns[0][0].number or 1
            self.totals = emit.array("float", MOST_FACTOR_ROWS * STRIP)
        has_sums = both(emit, emit.before(zero, self.count), emit.before(zero, self.end))
        emit.branch(both(emit, has_sums, self._is_ready()), self._on_units, lambda: emit.branch(has_sums, self._again))

    def _span(self, env: Env) -> tuple[SsaValue, SsaValue]:
        """Print the first row within guards, and their number."""
        emit, width = self.emit, math.prod(axis.extent for axis in self.rows[1:])
        zero, (outer, inner, *_) = emit.index(0), self.step.axes
        if not self.step.where:
            return zero, emit.times(self._end(self.rows[0], env), width)
        guards = tuple(guard for guard in self.step.where if outer.name in guard.expr.variables)
        begin, end = loop_inside(emit, guards, outer.name, (zero, self._end(outer, env)), self.ranges, env)
        count = emit.most(zero, emit.add(end, emit.times(begin, -1)))
        return emit.times(begin, inner.extent), emit.times(count, inner.extent)

    def _on_units(self) -> None:
        emit, zero = self.emit, self.emit.index(0)
        configure_tiles(emit, TILE_BYTES, emit.index(TILE_ROWS), TILE_ROWS)
        pending = self._all_turns()
        print_tiles(emit, "llvm.x86.tilerelease")
        self._finish(pending, zero, pending[-1])

    def _all_turns(self) -> Sequence[SsaValue]:
        """Print the loops over blocks of the operand that is streamed, and over those of the other one."""
        emit, zero = self.emit, self.emit.index(0)
        self._make_first()
        outer = self.down if self.passes_rows else emit.times(self.across, self.parts_of_terms)
        self.outer = outer

        def inside(o: SsaValue, *own: SsaValue) -> Sequence[SsaValue]:
            return emit.loop(zero, self._inner(o), 1, lambda i, *last: self._turn(o, i, last), *own)

        return emit.loop(zero, outer, 1, inside, *[zero] * 5)

    def _inner(self, o: SsaValue) -> SsaValue:
        """Print the number of blocks by which a streamed one is multiplied, and what else begins with it."""
        return self.across if self.passes_rows else self.down

    def _make_first(self) -> None:
        """Print how all rows are split, or the first block of rows; and the first strip of columns."""
        emit, maker = self.emit, self.row_maker
        assert maker is not None

        def rows(r: SsaValue) -> None:
            first = emit.times(r, EDGE)
            to = emit.place("i16", self.a.at, emit.times(r, self.size * self.parts[0]))
            maker.rows_block(to, emit.add(self.begin, first), self._rows_from(first), self.terms)

        emit.loop(emit.index(0), emit.index(1) if self.passes_rows else self.down, 1, rows)
        self._make_strip()

    def _make_strip(self) -> None:
        """Print how the first strip of columns is split if they are streamed."""
        emit, zero = self.emit, self.emit.index(0)

        def step(k: SsaValue) -> None:
            at = emit.place("i16", self.b.at, emit.times(k, STEP * self.parts[1]))
            emit.loop(zero, emit.index(PAIRS), 1, partial(self._column_part, zero, at, k))

        if self.passes_columns:
            emit.loop(zero, self.steps, 1, step)

    def _rows_from(self, first: SsaValue) -> SsaValue:
        """Print the number of rows of a block."""
        return self.emit.least(self.emit.index(EDGE), self.emit.add(self.count, self.emit.times(first, -1)))

    def _masks_from(self, column: SsaValue) -> list[SsaValue | None]:
        """Print which columns of a strip exist, for each vector."""
        emit, maker = self.emit, self.column_maker
        assert maker is not None
        if self.end.number is not None and self.end.number % STRIP == 0:
            return [None] * PAIR
        left = emit.add(self.end, emit.times(column, -1))
        return [maker.lanes_before(emit.add(left, emit.index(-v * LANES))) for v in range(PAIR)]

    # Turns

    def _turn(self, o: SsaValue, i: SsaValue, pending: Pending) -> Sequence[SsaValue]:
        """Print the products of a block of rows and a strip; return what is pending then."""
        emit, part = self.emit, self.emit.rest(o, self.parts_of_terms)
        s, q = self._strip_of(o, i), self.parts[1]
        rows, stride, first, count = self._rows_of(o, i)
        b = emit.times(s, self.strip)
        if self.passes_columns:
            b = self._product(emit.times(self.steps, STEP * q), emit.rest(o, 2))
        b = emit.place("i16", self.b.at, b)

        def columns(t: int, step: SsaValue, k: int) -> SsaValue:
            return emit.place("i16", b, emit.add(emit.times(step, STEP * q), emit.index(k * STEP + t * TILE)))

        def beside(step: SsaValue, k: int) -> None:
            if k == 0:
                self._finish_some(step, self.steps, pending)
            self._prepare((o, i), step, k)

        place, adds = self._sums_place(i, part, pending)
        to = emit.place("float", self.found, place)
        self._run(TileTurn(rows, columns, (stride, TILE_BYTES), self.steps, YES, YES, to, adds), count, beside)
        return place, first, emit.times(s, STRIP), part, self._finished(part, count)

    def _strip_of(self, o: SsaValue, i: SsaValue) -> SsaValue:
        return i if self.passes_rows else self.emit.divided(o, self.parts_of_terms)

    def _sums_place(self, i: SsaValue, part: SsaValue, pending: Pending) -> tuple[SsaValue, SsaValue]:
        """Print where sums are stored, and whether products are added to sums that are there."""
        return self.emit.op("xor", pending[0], self.emit.index(SUMS)), NO

    def _finished(self, part: SsaValue, count: SsaValue) -> SsaValue:
        """Print how many rows of sums are complete after a part of the terms."""
        return count

    def _rows_of(self, o: SsaValue, i: SsaValue) -> tuple[Tiles, int, SsaValue, SsaValue]:
        """Return the tiles of a block of rows, the bytes between their rows, the first row, and how many there are."""
        emit, p, r = self.emit, self.parts[0], o if self.passes_rows else i
        first, part = emit.times(r, EDGE), emit.rest(o, self.parts_of_terms)
        at = emit.times(emit.rest(r, 2) if self.passes_rows else r, self.size * p)
        at = emit.place("i16", self.a.at, emit.add(at, self._product(emit.times(self.steps, STEP * p), part)))

        def tiles(t: int, step: SsaValue, k: int) -> SsaValue:
            return emit.place("i16", at, emit.add(emit.times(step, STEP * p), emit.index(k * STEP + t * TILE)))

        return tiles, TILE_BYTES, emit.add(self.begin, first), self._rows_from(first)

    def _run(self, turn: TileTurn, count: SsaValue, beside: Callable[[SsaValue, int], None]) -> None:
        """Print the products of a block with some rows."""
        most = self.count.number
        few = self.emit.before(count, self.emit.index(TILE_ROWS + 1))
        if most is not None and (most % EDGE == 0 or most % EDGE > TILE_ROWS):
            few = NO
        one = replace(turn, is_pair=NO)
        self.emit.branch(few, lambda: self._multiply(one, beside), lambda: self._multiply(turn, beside))

    def _finish_some(self, step: SsaValue, steps: SsaValue, pending: Pending) -> None:
        """Print what takes some of the sums before: in all steps together, all of them."""
        each = self._quotient(self.emit.index(EDGE), steps)
        begin = self._product(each, step)
        self._finish(pending, begin, self.emit.add(begin, each))

    def _some(self, slot: SsaValue, slots: SsaValue, count: int, has_next: SsaValue) -> tuple[SsaValue, SsaValue]:
        """Print which of some equal parts of work are done in one of several slots: the first one and the end."""
        emit = self.emit
        each = self._quotient(emit.index(count), slots)
        begin = self._product(each, slot)
        end = emit.least(emit.add(begin, each), emit.index(count))
        return begin, end if has_next == YES else emit.select(has_next, end, emit.index(0))

    def _prepare(self, at: tuple[SsaValue, SsaValue], step: SsaValue, k: int) -> None:
        """Print what vector units do for the next block: they split some of its numbers, or prefetch components."""
        emit, (o, i), pairs = self.emit, at, len(self.pairs)
        following = emit.add(o, emit.index(1))
        has_next = emit.before(following, self.outer)
        inner = self.across if self.passes_rows else self.down
        slot, slots = emit.add(emit.times(i, pairs), emit.index(k)), emit.times(inner, pairs)
        if self.passes_rows:
            self._prepare_rows(following, has_next, (i, step), k)
        elif self.passes_columns:
            block = self._product(emit.times(self.steps, STEP), emit.rest(following, 2))
            to = emit.place("i16", self.b.at, emit.times(emit.add(block, emit.times(step, STEP)), self.parts[1]))
            begin, end = self._some(slot, slots, PAIRS, has_next)
            emit.loop(begin, end, 1, partial(self._column_part, following, to, step))
        elif self.column_maker is None:
            self._fetch(following, has_next, step, (slot, slots))

    def _prepare_rows(self, following: SsaValue, has_next: SsaValue, at: tuple[SsaValue, SsaValue], k: int) -> None:
        """Print how some numbers of the next block of rows are split."""
        emit, (i, step), pairs = self.emit, at, len(self.pairs)
        to = emit.times(emit.rest(following, 2), self.size * self.parts[0])
        to = emit.place("i16", self.a.at, emit.add(to, emit.times(step, STEP * self.parts[0])))
        slot = emit.add(emit.times(i, pairs), emit.index(k))
        begin, end = self._some(slot, emit.times(self.across, pairs), PAIRS, has_next)
        emit.loop(begin, end, 1, partial(self._row_part, emit.times(following, EDGE), to, step))

    def _row_part(self, first: SsaValue, to: SsaValue, step: SsaValue, i: SsaValue) -> None:
        """Print how two rows are split, for a step of terms."""
        emit, maker = self.emit, self.row_maker
        assert maker is not None
        for t in range(PAIR):
            row = emit.add(emit.add(first, i), emit.index(t * TILE_ROWS))
            at = emit.place("i16", to, emit.add(emit.times(i, EDGE), emit.index(t * TILE)))
            own = maker.of_row(emit.add(self.begin, row))
            line = partial(maker.line, at, own, emit.times(step, EDGE), self.terms, STEP)
            is_whole = self.count.number is not None and self.count.number % EDGE == 0
            emit.branch(YES if is_whole else emit.before(row, self.count), line)

    def _column_part(self, number: SsaValue, to: SsaValue, step: SsaValue, i: SsaValue) -> None:
        """Print how a pair of terms of a strip is split."""
        emit, maker = self.emit, self.column_maker
        assert maker is not None
        column = emit.times(emit.divided(number, self.parts_of_terms), STRIP)
        first, terms = emit.index(0), self.terms
        if self.step.factor is not None:
            terms = emit.times(self.steps, EDGE)
            first = self._product(terms, emit.rest(number, self.parts_of_terms))
        maker.pair(maker.pair_of(to, step, i, (terms, first)), column, self._masks_from(column))

    def _fetch(self, strip: SsaValue, has_next: SsaValue, step: SsaValue, slots: tuple[SsaValue, SsaValue]) -> None:
        """Print the prefetches of some lines of the next strip; after the last one, of what follows the first one."""
        emit, size = self.emit, STEP * self.parts[1]
        begin, end = self._some(*slots, size * 2 // LINE_BYTES, YES)
        at = emit.select(has_next, emit.times(strip, self.strip), emit.times(self.steps, size))
        at = emit.place("i16", self.b.at, emit.add(at, emit.times(step, size)))
        self._fetch_lines(at, begin, end)

    # Sums

    def _row(self, k: SsaValue, pending: Pending, vectors: int, mask: SsaValue | None) -> None:
        """Print what takes a row of the sums of two tiles."""
        emit, (place, first, column, part, _) = self.emit, pending
        sums = self._sums_of(emit.add(place, emit.times(k, STRIP)), vectors)
        if self.step.factor is None:
            self._take(emit.add(first, k), column, sums, mask)
            return
        block = SumBlock(emit.index(0), 1, column, vectors, (), self.b.at, mask, lambda _: emit.index(0))
        factors = self._factors(self.step.factor, self.around, part, block)
        totals = emit.place("float", self.totals, emit.times(emit.add(first, k), STRIP))
        self.context.era += 1
        places = [emit.place("float", totals, emit.index(v * LANES)) for v in range(vectors)]
        is_first, is_last = (emit.test("icmp eq", part, emit.index(n)) for n in (0, self.parts_of_terms - 1))
        for v, at in enumerate(places):
            before = emit.load("float", LANES, at, LINE_BYTES, emit.depth, self.context.era)
            before = emit.select(is_first, ZERO, before)
            sums[v] = fused(emit, sums[v], factors[v], before)

        def store() -> None:
            for x, at in zip(sums, places, strict=True):
                emit.store(x, at, LINE_BYTES)

        emit.branch(is_last, lambda: self._take(emit.add(first, k), column, sums, mask), store)

    def _take(self, row: SsaValue, column: SsaValue, sums: Sequence[SsaValue], mask: SsaValue | None) -> None:
        """Print what takes a row of sums; those that are not finite are computed again."""
        emit, inner = self.emit, self.rows[-1].extent
        masks, wrong = [*[None] * (len(sums) - 1), mask], ZERO
        for x, own in zip(sums, masks, strict=True):
            difference = emit.op("fsub", x, x)
            wrong = emit.op("fadd", wrong, difference if own is None else emit.select(own, difference, ZERO))
        bits = emit.bits_of_mask(emit.test("fcmp une", wrong, ZERO))
        is_known = emit.test("icmp eq", bits, constant(bits.kind, 0))
        sums = emit.branch(is_known, lambda: sums, lambda: self._sums_again(row, column, masks))
        block = SumBlock(row, 1, column, len(sums), (), self.b.at, mask, lambda _: emit.divided(row, inner))
        if not self.sums.is_zeroed:
            sums = [emit.op("fadd", x, y) for x, y in zip(sums, self.printer.begin(block), strict=True)]
        self.printer.end(block, sums)

    def _again(self) -> None:
        """Print how vector units compute all sums: none of the units' sums is known."""
        emit, part = self.emit, self.emit.index(self.parts_of_terms - 1)
        for i in range(SUMS // LANES):
            emit.store(NAN, emit.place("float", self.found, emit.index(i * LANES)), LINE_BYTES)

        def block(first: SsaValue, column: SsaValue) -> None:
            pending = (emit.index(0), emit.add(self.begin, first), column, part, self._rows_from(first))
            self._finish(pending, emit.index(0), pending[-1])

        zero = emit.index(0)
        emit.loop(zero, self.count, EDGE, lambda r: emit.loop(zero, self.end, STRIP, lambda c: block(r, c)) and None)

    def _sums_again(self, row: SsaValue, column: SsaValue, masks: Sequence[SsaValue | None]) -> Sequence[SsaValue]:
        """Print the sums of a row of some columns, computed from the numbers before they were split."""
        emit, maker = self.emit, self.row_maker
        assert maker is not None
        own = maker.of_row(row)

        def term(k: SsaValue, *sums: SsaValue) -> Sequence[SsaValue]:
            columns = self._numbers(k, column, masks)
            if self.step.factor is not None:
                block = SumBlock(row, 1, column, len(sums), (), self.b.at, masks[-1], lambda _: row)
                part = emit.op("udiv", k, emit.times(self.steps, EDGE))
                factors = self._factors(self.step.factor, self.around, part, block)
                columns = [emit.op("fmul", x, y) for x, y in zip(columns, factors, strict=True)]
            x = emit.splat(maker.number(own, k), LANES)
            return [fused(emit, x, y, total) for y, total in zip(columns, sums, strict=True)]

        return emit.loop(emit.index(0), self.terms, 1, term, *[ZERO] * len(masks))

    def _numbers(self, k: SsaValue, column: SsaValue, masks: Sequence[SsaValue | None]) -> list[SsaValue]:
        """Print the numbers of a term and some columns.

        Components are summed from the last one on: for a number near the largest, the first two may sum to infinity.
        """
        emit, found, parts = self.emit, list[SsaValue](), self.parts[1]
        if self.column_maker is not None:
            columns = [emit.add(column, emit.index(v * LANES)) for v in range(len(masks))]
            return [self.column_maker.column(k, at, mask) for at, mask in zip(columns, masks, strict=True)]
        at = emit.times(emit.divided(column, STRIP), self.strip)
        at = emit.add(at, emit.times(emit.divided(k, EDGE), STEP * parts))
        at = emit.add(at, emit.times(emit.divided(emit.rest(k, EDGE), PAIR), EDGE))
        is_odd = emit.test("icmp ne", emit.rest(k, PAIR), emit.index(0))
        for v in range(len(masks)):
            total = ZERO
            for i in reversed(range(parts)):
                place = emit.place("i16", emit.place("i16", self.b.at, at), emit.index(i * STEP + v * TILE))
                both_ = emit.load("i32", LANES, place, LINE_BYTES, emit.depth)
                low = emit.op("shl", both_, constant("i32", LANES))
                x = emit.select(is_odd, emit.op("and", both_, constant("i32", TOP)), low)
                total = emit.op("fadd", total, emit.bits(x, "float"))
            found.append(total)
        return found
