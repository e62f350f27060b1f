"""Prints convolutions of images that are split into bfloat16 components, on matrix units: pixels of one class are rows.

The pixels that one window position reads for 16 adjacent results form a tile, and the next window position's tile is at
another offset. Tiles continue from one row of results into the next; results computed for positions between two rows
are discarded. Either strips of columns are kept in the cache while rows are streamed, a block of rows of results at a
time; or all rows are kept while strips are streamed, some steps at a time.
"""

import itertools
from collections.abc import Sequence
from functools import partial

from korch.system.alignment import ceil_div
from korch.target import EDGE
from korch.tile.analysis.components import units_at_once
from korch.tile.analysis.registers import STRIP
from korch.tile.llvm.component_tiles import ZERO, ComponentTilePrinter, Tiles
from korch.tile.llvm.components import ComponentWindowPrinter
from korch.tile.llvm.emit import SsaValue
from korch.tile.llvm.functions import fused
from korch.tile.llvm.index import Env, global_table
from korch.tile.llvm.instructions import TILE_ROWS
from korch.tile.llvm.splitter import LANES, STEP
from korch.tile.llvm.tiles import SUMS, YES, Pending


class ComponentWindowTilePrinter(ComponentTilePrinter, ComponentWindowPrinter):
    """Prints one contraction over windows on matrix units."""

    in_classes, ahead = True, EDGE

    def _measure(self, env: Env) -> None:
        super()._measure(env)
        emit, own, (t0, t1) = self.emit, self.pixels, self.taps
        self.apart, self.lines = own.pitch // own.strides[1], self._end(self.rows[0], env)
        units = t0.extent * t1.extent * self.channel_steps
        self.each = units if self.passes_rows else units_at_once(self.step)
        offsets = []
        for y, x in itertools.product(range(t0.extent), range(t1.extent)):
            row = y * own.dilations[0]
            pixel = row % own.classes * own.of_class(self.most) + row // own.classes * own.pitch + x * own.dilations[1]
            offsets += [pixel * EDGE + i * self.plane * self.parts[0] for i in range(self.channel_steps)]
        self.offsets, self.turns = offsets, [(emit.index(self.each), 0, 0)]

    def _span(self, env: Env) -> tuple[SsaValue, SsaValue]:
        """Return the first position, and the number of positions of results, including those between rows."""
        return self.emit.index(0), self._positions(self.lines)

    def _positions(self, lines: SsaValue) -> SsaValue:
        emit = self.emit
        return emit.add(emit.times(emit.add(lines, emit.index(-1)), self.apart), emit.index(self.rows[1].extent))

    def _all_turns(self) -> Sequence[SsaValue]:
        emit, units = self.emit, len(self.offsets)
        if self.passes_rows:
            self.down = self._quotient(self.lines, emit.index(self.most))
        elif self.each < units:
            self.parts_of_terms = units // self.each
            after = 2 * self.each * STEP * self.parts[1]
            self.found = emit.place("i16", self.b.at, emit.index(after))
        return super()._all_turns()

    def _make_first(self) -> None:
        self._split_block(self.a.at, self.emit.index(0), self._lines_from(self.emit.index(0)))
        self._make_strip()

    def _lines_from(self, line: SsaValue) -> SsaValue:
        """Print the rows of results of a block that begins at a row."""
        return self.emit.least(self.emit.index(self.most), self.emit.add(self.lines, self.emit.times(line, -1)))

    def _block(self, o: SsaValue) -> SsaValue:
        """Print where the components of a block of rows are stored."""
        block = self.plane * self.channel_steps * self.parts[0]
        return self.emit.place("i16", self.a.at, self.emit.times(self.emit.rest(o, 2), block))

    def _inner(self, o: SsaValue) -> SsaValue:
        if not self.passes_rows:
            return self.down
        emit, following = self.emit, self.emit.add(o, self.emit.index(1))
        after = self._lines_from(emit.times(following, self.most))
        has_next = emit.before(following, self.down)
        emit.branch(has_next, lambda: self._zeros(self._block(following), self._met(after)))
        positions = self._positions(self._lines_from(emit.times(o, self.most)))
        return self._product(self._quotient(positions, emit.index(EDGE)), self.across)

    def _strip_of(self, o: SsaValue, i: SsaValue) -> SsaValue:
        if not self.passes_rows:
            return super()._strip_of(o, i)
        known = self.across.number
        return self.emit.rest(i, known) if known is not None else self.emit.op("urem", i, self.across)

    def _rows_of(self, o: SsaValue, i: SsaValue) -> tuple[Tiles, int, SsaValue, SsaValue]:
        emit, across = self.emit, self.pixels.strides[1] * EDGE
        part, line, block, tile = emit.rest(o, self.parts_of_terms), emit.index(0), self.a.at, i
        if self.passes_rows:
            known = self.across.number
            tile = emit.divided(i, known) if known is not None else emit.op("udiv", i, self.across)
            line, part, block = emit.times(o, self.most), emit.index(0), self._block(o)
        first = emit.times(tile, EDGE)
        count = emit.add(self._positions(self._lines_from(line)), emit.times(first, -1))
        at = emit.place("i16", block, emit.times(first, across))
        begin = emit.times(part, self.each)

        def tiles(t: int, step: SsaValue, k: int) -> SsaValue:
            place = emit.add(self._offset(emit.add(begin, step)), emit.index(k * self.plane + t * TILE_ROWS * across))
            return emit.place("i16", at, place)

        first = emit.add(emit.times(line, self.apart), first)
        return tiles, 2 * across, first, emit.least(emit.index(EDGE), count)

    def _offset(self, unit: SsaValue) -> SsaValue:
        """Print the distance of a step's pixels from those of the first one."""
        emit, known = self.emit, unit.number
        if known is not None:
            return emit.index(self.offsets[known])
        table = SsaValue(global_table(emit, "i32", self.offsets), "ptr")
        return emit.convert("sext", emit.load("i32", 1, emit.place("i32", table, unit), 4, emit.depth), "i64")

    def _sums_place(self, i: SsaValue, part: SsaValue, pending: Pending) -> tuple[SsaValue, SsaValue]:
        if self.parts_of_terms == 1:
            return super()._sums_place(i, part, pending)
        return self.emit.times(i, SUMS), self.emit.before(self.emit.index(0), part)

    def _finished(self, part: SsaValue, count: SsaValue) -> SsaValue:
        is_last = self.emit.test("icmp eq", part, self.emit.index(self.parts_of_terms - 1))
        return count if self.parts_of_terms == 1 else self.emit.select(is_last, count, self.emit.index(0))

    def _prepare_rows(self, following: SsaValue, has_next: SsaValue, at: tuple[SsaValue, SsaValue], k: int) -> None:
        emit, (i, step), pairs, line = self.emit, at, len(self.pairs), self.emit.times(following, self.most)
        blocks = ceil_div((self.most - 1) * self.apart + self.rows[1].extent, EDGE) * self.each * pairs
        slot = emit.add(emit.add(emit.times(i, self.each * pairs), emit.times(step, pairs)), emit.index(k))
        total = self.pixels.met(self.most) * self.pixels.pitch * self.channel_steps
        begin, end = self._some(slot, emit.times(self.across, blocks), total, has_next)
        part = partial(self._pixel, self._block(following), line, self._met(self._lines_from(line)))
        emit.loop(begin, end, 1, part)

    def _column_part(self, number: SsaValue, to: SsaValue, step: SsaValue, i: SsaValue) -> None:
        emit, maker, each = self.emit, self.column_maker, self.channel_steps
        assert maker is not None
        column = emit.times(emit.divided(number, self.parts_of_terms), STRIP)
        unit = emit.add(emit.times(emit.rest(number, self.parts_of_terms), self.each), step)
        ends = emit.index(self.channels), emit.times(emit.divided(unit, each), self.channels)
        maker.pair(maker.pair_of(to, emit.rest(unit, each), i, ends), column, self._masks_from(column))

    def _row(self, k: SsaValue, pending: Pending, vectors: int, mask: SsaValue | None) -> None:
        emit, (place, first, column, *_), width = self.emit, pending, self.rows[1].extent
        position = emit.add(first, k)
        y, x = emit.divided(position, self.apart), emit.rest(position, self.apart)

        def take() -> None:
            sums = self._sums_of(emit.add(place, emit.times(k, STRIP)), vectors)
            self._take(emit.add(emit.times(y, width), x), column, sums, mask)

        emit.branch(YES if self.apart == width else emit.before(x, emit.index(width)), take)

    def _sums_again(self, row: SsaValue, column: SsaValue, masks: Sequence[SsaValue | None]) -> Sequence[SsaValue]:
        emit, maker, own = self.emit, self.row_maker, self.pixels
        assert maker is not None
        zero, (u, v), width, across = emit.index(0), maker.rows, self.rows[1].extent, self.taps[1].extent
        line, pixel = emit.divided(row, width), emit.rest(row, width)

        def tap(n: SsaValue, *sums: SsaValue) -> Sequence[SsaValue]:
            places = ((line, emit.divided(n, across)), (pixel, emit.rest(n, across)))
            met = [
                emit.add(emit.times(place, stride), emit.times(tap, dilation))
                for (place, tap), stride, dilation in zip(places, own.strides, own.dilations, strict=True)
            ]
            at = {u.name: met[0], v.name: met[1]}

            def channel(c: SsaValue, *sums: SsaValue) -> Sequence[SsaValue]:
                columns = self._numbers(emit.add(emit.times(n, self.channels), c), column, masks)
                x = emit.splat(maker.number(at, c), LANES)
                return [fused(emit, x, y, total) for y, total in zip(columns, sums, strict=True)]

            def inside() -> Sequence[SsaValue]:
                return emit.loop(zero, emit.index(self.channels), 1, channel, *sums)

            is_inside = emit.before(met[1], emit.index(own.pitch)) if own.extra else YES
            return emit.branch(is_inside, inside, lambda: sums)

        taps = emit.index(self.taps[0].extent * across)
        return emit.loop(zero, taps, 1, tap, *[ZERO] * len(masks))
