"""Prints contractions of bytes on matrix units (AMX), with exact sums of 32 bits in tile registers.

Rows are read in place: a tile consists of at most 16 rows and some contiguous terms. The rows come in lines, like the
pixels of an image; a product of matrices has one line. All tiles of a line have the same height, so the last tile may
overlap the one before, and nothing beyond a line is read. Two tiles of rows are multiplied by a strip of 32 columns.
While the matrix units multiply, the vector units finish the sums of the two tiles before, and prefetch the next strip.

The system must allow a process to use the units; else the vector units multiply the same operands.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from korch.system.alignment import ceil_div
from korch.tile.analysis.axes import even_step, joined
from korch.tile.analysis.panels import panels
from korch.tile.analysis.registers import BYTE_REGISTERS, STRIP, steps_of
from korch.tile.ir.program import QUAD, Axis, refused
from korch.tile.llvm.block import OperandSide, SumBlock
from korch.tile.llvm.contract import ContractPrinter
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.functions import fused
from korch.tile.llvm.index import both
from korch.tile.llvm.instructions import (
    COLUMNS,
    ROWS,
    TILE_BYTES,
    TILE_ROWS,
    DotInstruction,
    configure_tiles,
    dot_of_tiles,
    print_tiles,
)
from korch.tile.llvm.integers import IntegerPrinter
from korch.tile.llvm.points import KernelContext
from korch.tile.lower.buffers import LINE_BYTES

READY = "korch_matrix_units"
"""The function that asks the system whether this process may use the matrix units."""

CHANGED, KEPT = (0, 1, 4, 2, 6, 3, 5, 7), (0, 2, 6, 1, 3, 7)
"""The order of four products and of loads of operands of the next four, if these have other rows or the same."""

NO, YES = constant("i1", 0), constant("i1", 1)

LOAD = "llvm.x86.tileloadd64"

USED = 'call void asm sideeffect "", "v"({})'
"""What a value is computed for."""

SUMS = 2 * TILE_ROWS * STRIP
"""The sums of two tiles of rows and a strip of columns."""

LINE = QUAD * STRIP
"""The bytes of a group of terms of a strip, and of a row of sums of it."""

MOST_TURNS = 2
"""The maximum number of axes of terms outside the innermost one."""


Pending = Sequence[SsaValue]
"""Sums that are not finished: their place, their first row or tile, the first column, and the number of rows."""


@dataclass(frozen=True)
class TileTurn:
    """Two tiles of rows and two of columns."""

    # prints the address of a tile of rows, given its number, the step, and the number of the component
    rows: Callable[[int, SsaValue, int], SsaValue]
    columns: Callable[[int, SsaValue, int], SsaValue]  # the same for columns
    strides: tuple[int, int]  # the bytes between rows of both kinds of tiles
    steps: SsaValue  # the number of steps
    is_pair: SsaValue  # whether the second tile of rows exists
    is_wide: SsaValue  # whether the second tile of columns exists
    to: SsaValue  # where the sums are stored
    adds: SsaValue = NO  # whether the products are added to the sums there


class TileCore(ContractPrinter):
    """Prints products of tiles, and what vector units do beside them: they take the sums before.

    Attributes:
        pairs: the components of rows and columns that are multiplied in each step, in order.
        kind: the type of a sum.
        dot: the instruction.
        end: the number of columns.
    """

    pairs: Sequence[tuple[int, int]] = ((0, 0),)
    kind = "i32"
    dot: DotInstruction
    end: SsaValue
    found: SsaValue

    def _is_ready(self) -> SsaValue:
        """Print whether the system allows this process to use the units."""
        self.emit.declared[READY] = f"declare i32 @{READY}()"
        return self.emit.test("icmp ne", self.emit.call(READY, "i32", 1), constant("i32", 0))

    def _quotient(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a number divided by another one and rounded up; neither is negative."""
        more = self.emit.add(self.emit.add(a, b), self.emit.index(-1))
        return self.emit.op("udiv", more, b) if b.number is None else self.emit.divided(more, b.number)

    def _product(self, a: SsaValue, b: SsaValue) -> SsaValue:
        return self.emit.op("mul nsw", a, b) if b.number is None else self.emit.times(a, b.number)

    # Products

    def _multiply(self, turn: TileTurn, beside: Callable[[SsaValue, int], None]) -> None:
        """Print the products of two tiles of rows and two of columns, and what vector units do beside each four.

        A tile for the next step is loaded as soon as the tile that it replaces has been used.
        """
        emit, zero, last = self.emit, self.emit.index(0), len(self.pairs) - 1
        exists = (YES, turn.is_wide, turn.is_pair, both(emit, turn.is_pair, turn.is_wide))

        def load(n: int, s: SsaValue, k: int) -> None:
            side, t, component = n // 2 - 2, n % 2, self.pairs[k][n // 2 - 2]

            def one() -> None:
                at = (turn.rows, turn.columns)[side](t, s, component)
                print_tiles(emit, LOAD, constant("i8", n), at, emit.index(turn.strides[side]))

            emit.branch(exists[t] if side else exists[2 * t], one)

        def products(k: int, following: SsaValue | None) -> None:
            after = (k + 1) % len(self.pairs)
            changes = [k == last or a != b for a, b in zip(self.pairs[k], self.pairs[after], strict=True)]
            for n in CHANGED if changes[0] else KEPT:
                if n < ROWS[0]:
                    dot = partial(self.dot.add_tiles, emit, n, ROWS[n // 2], COLUMNS[n % 2])
                    emit.branch(exists[n], dot)
                elif following is not None and changes[n // 2 - 2]:
                    load(n, following, after)

        # A vector operation per step. After about 0.7 us without one, vector units power down, and the next store of a
        # tile waits a quarter of a microsecond for them (measured on Granite Rapids).
        def step(s: SsaValue, awake: SsaValue) -> tuple[SsaValue]:
            for k in range(last):
                products(k, s)
                beside(s, k)
            following = emit.add(s, emit.index(1))
            has_next = emit.before(following, turn.steps)
            emit.branch(has_next, lambda: products(last, following), lambda: products(last, None))
            beside(s, last)
            return (fused(emit, awake, awake, awake),)

        def sums(name: str) -> None:
            for n in range(ROWS[0]):
                at = emit.place("i32", turn.to, emit.index((n // 2 * STRIP + n % 2) * TILE_ROWS))
                whole = partial(print_tiles, emit, name, constant("i8", n), at, emit.index(LINE))
                emit.branch(exists[n], whole)

        def zeros() -> None:
            for n in range(ROWS[0]):
                print_tiles(emit, "llvm.x86.tilezero", constant("i8", n))

        emit.branch(turn.adds, lambda: sums(LOAD), zeros)
        for n in (ROWS[0], COLUMNS[0], COLUMNS[1], ROWS[1]):
            load(n, zero, 0)
        (awake,) = emit.loop(zero, turn.steps, 1, step, constant("float", 0.0, self.lanes))
        emit.effect(USED.format(awake.typed))
        sums("llvm.x86.tilestored64")

    # Sums

    def _finish(self, pending: Pending, begin: SsaValue, end: SsaValue) -> None:
        """Print what takes the sums of some rows of two tiles."""
        emit, column = self.emit, pending[2]
        left = emit.add(self.end, emit.times(column, -1))

        def rows(vectors: int, mask: SsaValue | None) -> None:
            last = emit.least(end, pending[-1])
            emit.loop(begin, last, 1, lambda k: self._row(k, pending, vectors, mask))

        def edge() -> None:
            rest = left if self.end.number is None else emit.index(self.end.number % STRIP)
            for is_own, vectors, mask in self._tails(rest):
                emit.branch(is_own, lambda v=vectors, m=mask: rows(v, m))  # type: ignore[misc]

        is_whole = emit.test("icmp sge", left, emit.index(STRIP))
        if self.end.number is not None and (self.end.number % STRIP == 0 or self.end.number < STRIP):
            is_whole = constant("i1", self.end.number >= STRIP)
        emit.branch(is_whole, lambda: rows(2, None), edge)

    def _row(self, k: SsaValue, pending: Pending, vectors: int, mask: SsaValue | None) -> None:
        """Print what takes a row of the sums of two tiles."""
        raise NotImplementedError

    def _sums_of(self, at: SsaValue, vectors: int) -> list[SsaValue]:
        """Print the loads of a row of sums."""
        emit, found = self.emit, []
        self.context.era += 1
        for v in range(vectors):
            place = emit.place(self.kind, emit.place(self.kind, self.found, at), emit.index(v * self.lanes))
            found.append(emit.load(self.kind, self.lanes, place, LINE_BYTES, emit.depth, self.context.era))
        return found

    def _fetch_lines(self, at: SsaValue, begin: SsaValue, end: SsaValue) -> None:
        emit = self.emit

        def line(i: SsaValue) -> None:
            emit.prefetch(emit.place("i8", at, emit.times(i, LINE_BYTES)), locality=2)

        emit.loop(begin, end, 1, line, cost=1)


class TilePrinter(TileCore, IntegerPrinter):
    """Prints one contraction of bytes on matrix units."""

    def __init__(self, context: KernelContext, *given: object) -> None:
        super().__init__(context, *given)  # type: ignore[arg-type]
        registers = self.step.registers
        self.strips_pass = registers is not None and registers.fetches_b
        self.step = replace(self.step, registers=BYTE_REGISTERS[self.lanes])  # of the vector units

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        *turns, last = joined(terms, a.steps, b.steps)
        super()._require([last], out, a, b)
        second = self.context.program.buffer(b.buffer)
        layout = panels(second)
        if layout is None or (layout.width, layout.group) != (STRIP, QUAD):
            raise refused(f"buffer {second.name} is not in panels of {STRIP} columns and {QUAD} terms")
        depth = expected = second.size // layout.columns // math.prod(axis.extent for axis in turns)
        for axis in reversed(turns):
            if b.steps[axis.name] != expected * STRIP:
                raise refused(f"the turns of buffer {second.name} do not lie one after another")
            expected *= axis.extent
        count = steps_of(ceil_div(depth, QUAD))
        if len(turns) > MOST_TURNS or depth % (QUAD * count) or depth < last.extent or (turns and depth > last.extent):
            raise refused(f"terms of buffer {a.buffer} do not lie side by side in whole steps")
        self.dot = dot_of_tiles(*(self.context.dtypes[at.buffer] for at in (a, b)))
        self.quads = depth // (QUAD * count)
        self.around = [(count, QUAD * self.quads), *((axis.extent, a.steps[axis.name]) for axis in reversed(turns))]
        self.steps = math.prod(n for n, _ in self.around)

    def _strips(self, end: SsaValue, vector: int, strip: int, after: SsaValue | None) -> None:
        """Print the contraction for both kinds of units."""
        emit, on_vectors = self.emit, super()._strips
        emit.branch(self._is_ready(), lambda: self._tiles(end, strip), lambda: on_vectors(end, vector, strip, None))

    def _after(self, terms: Sequence[Axis]) -> SsaValue | None:
        return None

    # Rows

    def _tiles(self, end: SsaValue, strip: int) -> None:
        """Print the contraction on matrix units."""
        emit, rows, a = self.emit, self.rows, self.a
        even = even_step(rows, a.steps)
        self.row_bytes, self.line_bytes = even or 0, 0
        lines, self.width = emit.index(1), self.count
        if even is None:
            self.line_bytes, self.row_bytes = (a.steps[axis.name] for axis in rows)
            lines, self.width = emit.divided(self.count, rows[1].extent), emit.index(rows[1].extent)
        self.across = emit.most(self._quotient(self.width, emit.index(TILE_ROWS)), emit.index(1))
        self.height = self._quotient(self.width, self.across)
        self.end, self.strip = end, strip
        self.tiles = self._product(lines, self.across)
        self.turns = self._quotient(self.tiles, emit.index(2))
        self.found = emit.array("i32", 2 * SUMS)
        has_sums = both(emit, emit.before(emit.index(0), self.count), emit.before(emit.index(0), end))
        emit.branch(has_sums, self._products)

    def _tile(self, number: SsaValue) -> tuple[SsaValue, SsaValue, SsaValue]:
        """Print the address of a tile, its first row, and how many rows it shares with the tile before."""
        emit, line, at = self.emit, self.emit.index(0), number
        if self.line_bytes and self.across.number is not None:
            line, at = emit.divided(number, self.across.number), emit.rest(number, self.across.number)
        begin = self._product(at, self.height)
        x = emit.least(begin, emit.add(self.width, emit.times(self.height, -1)))
        place = emit.place("i8", self.a.at, emit.times(line, self.line_bytes))
        place = emit.place("i8", place, emit.times(x, self.row_bytes))
        return place, emit.add(self._product(line, self.width), x), emit.add(begin, emit.times(x, -1))

    def _products(self) -> None:
        """Print the loops over pairs of tiles of rows and over strips of columns."""
        emit, zero = self.emit, self.emit.index(0)
        configure_tiles(emit, QUAD * self.quads, self.height, self.quads)

        def strips(body: Callable[..., Sequence[SsaValue]], *own: SsaValue) -> tuple[SsaValue, ...]:
            return emit.loop(zero, self.end, STRIP, body, *own)

        def pairs(body: Callable[..., Sequence[SsaValue]], *own: SsaValue) -> tuple[SsaValue, ...]:
            return emit.loop(zero, self.turns, 1, body, *own)

        pending: tuple[SsaValue, ...] = (zero,) * 4
        if self.strips_pass:
            pending = strips(lambda n, *own: pairs(lambda p, *last: self._turn(p, n, last), *own), *pending)
        else:
            pending = pairs(lambda p, *own: strips(lambda n, *last: self._turn(p, n, last), *own), *pending)
        print_tiles(emit, "llvm.x86.tilerelease")
        self._finish(pending, zero, pending[-1])

    # Products

    def _turn(self, pair: SsaValue, column: SsaValue, pending: Pending) -> tuple[SsaValue, ...]:
        """Print the products of two tiles of rows and a strip; return what is pending then."""
        emit, first = self.emit, self.emit.times(pair, 2)
        second, half = emit.add(first, emit.index(1)), emit.add(column, emit.index(STRIP // 2))
        is_even, is_whole = (self.tiles.number or 1) % 2 == 0, (self.end.number or 1) % STRIP == 0
        is_pair = YES if is_even else emit.before(second, self.tiles)
        is_wide = YES if is_whole else emit.before(half, self.end)
        rows = [self._tile(n)[0] for n in (first, second)]
        b = emit.place("i8", self.b.at, emit.times(emit.divided(column, STRIP), self.strip))
        following = emit.place("i8", b, emit.index(self.strip))
        has_next = emit.before(emit.add(column, emit.index(STRIP)), self.end)

        def columns(c: int, step: SsaValue, _: int) -> SsaValue:
            at = emit.add(emit.times(step, self.quads * LINE), emit.index(c * TILE_BYTES))
            return emit.place("i8", b, at)

        def beside(step: SsaValue, _: int) -> None:
            self._finish_some(step, pending)
            if self.strips_pass:
                emit.branch(has_next, lambda: self._fetch(following, pair, step))

        place = emit.op("xor", pending[0], emit.index(SUMS))
        turn = TileTurn(
            lambda r, step, _: emit.place("i8", rows[r], self._offset(step)),
            columns,
            (self.row_bytes, LINE),
            emit.index(self.steps),
            is_pair,
            is_wide,
            emit.place(self.kind, self.found, place),
        )
        self._multiply(turn, beside)
        count = emit.times(self.height, 2)
        if not is_even:
            count = emit.add(self.height, self._product(self.height, emit.convert("zext", is_pair, "i64")))
        return place, first, column, count

    def _offset(self, step: SsaValue) -> SsaValue:
        """Print the distance of the terms of a step from the first ones of a row."""
        emit, found, rest = self.emit, self.emit.index(0), step
        for i, (count, each) in enumerate(self.around):
            own = rest if i + 1 == len(self.around) else emit.rest(rest, count)
            found, rest = emit.add(found, emit.times(own, each)), emit.divided(rest, count)
        return found

    # Beside products

    def _finish_some(self, step: SsaValue, pending: Pending) -> None:
        """Print what takes some of the sums before: in all steps together, all of them."""
        if self.turns.number == 1 and (self.end.number or STRIP + 1) <= STRIP:
            return
        each = self._quotient(self.emit.times(self.height, 2), self.emit.index(self.steps))
        begin = self._product(step, each)
        self._finish(pending, begin, self.emit.add(begin, each))

    def _fetch(self, strip: SsaValue, pair: SsaValue, step: SsaValue) -> None:
        """Print the prefetches of some lines of a strip: in all steps of all rows together, all of them."""
        emit, turns = self.emit, ceil_div(math.prod(axis.extent for axis in self.rows), 2 * TILE_ROWS)
        count = ceil_div(ceil_div(self.strip, LINE_BYTES), turns * self.steps)
        first = emit.times(emit.add(emit.times(pair, self.steps), step), count * LINE_BYTES)
        at = emit.place("i8", strip, first)

        self._fetch_lines(at, emit.index(0), emit.index(count))

    def _row(self, k: SsaValue, pending: Pending, vectors: int, mask: SsaValue | None) -> None:
        """Print what takes a row of the sums of two tiles."""
        emit, inner = self.emit, self.rows[-1].extent
        place, number, column, _ = pending
        is_second = emit.test("icmp sge", k, self.height)
        tiles = zip(self._tile(number)[1:], self._tile(emit.add(number, emit.index(1)))[1:], strict=True)
        first, shared = (emit.select(is_second, b, a) for a, b in tiles)
        r = emit.add(k, emit.select(is_second, emit.times(self.height, -1), emit.index(0)))
        row = emit.add(first, r)

        def take() -> None:
            at = emit.add(r, emit.select(is_second, emit.index(TILE_ROWS), emit.index(0)))
            sums = self._sums_of(emit.add(emit.times(at, STRIP), place), vectors)
            block = SumBlock(row, 1, column, vectors, (), self.b.at, mask, lambda _: emit.divided(row, inner))
            self.printer.end(block, sums)

        across, height = self.across.number, self.height.number
        is_even = across is not None and height is not None and across * height == self.width.number
        emit.branch(constant("i1", 1) if is_even else emit.test("icmp sge", r, shared), take)
