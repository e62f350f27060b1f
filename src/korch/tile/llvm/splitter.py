"""Prints how operands are split into bfloat16 components, of which each element has one.

Components are in blocks of 32 rows or columns and steps of 32 terms. The rows of a step lie one after another. Its
columns are two tiles of 16, which have the terms in pairs. Terms beyond the last one are 0.
"""

from __future__ import annotations

from collections.abc import Callable

from korch.target import EDGE
from korch.tile.analysis.sums import by_row
from korch.tile.ir.program import PAIR, Axis, Pass, Stage
from korch.tile.llvm.contract import Strip
from korch.tile.llvm.emit import SsaValue, array, constant
from korch.tile.llvm.index import Env
from korch.tile.llvm.points import KernelContext, PointPrinter, PointVector

LANES = 16
"""The lanes of its vectors, and the columns of a tile."""

TILE = LANES * EDGE
"""The components in a tile of one step."""

STEP = EDGE * EDGE
"""The components of a block in one step."""

PAIRS = EDGE // PAIR
"""The pairs of terms of a step."""

TOP = 0xFFFF0000
"""The bits of a float32 that are those of a bfloat16."""


class OperandSplitter(PointPrinter):
    """Prints how blocks of an operand are split."""

    def __init__(
        self, context: KernelContext, grid: tuple[Axis, ...], pass_: Pass, env: Env, *, is_image: bool = False
    ) -> None:
        """Prepare the pass; unless it is that of an image, its operations are indexed by the number of the row."""
        super().__init__(context, Stage(grid, (pass_,)), pass_, env)
        *self.rows, self.last = pass_.axes
        ranges = dict(self.ranges)
        self.pass_ = pass_ if is_image else by_row(pass_, self.rows, ranges)
        self.ranges, self.ops = ranges, {op.name: op for op in self.pass_.ops}

    def _of_row(self, row: SsaValue) -> Env:
        """Print the values of the axes of rows at a row."""
        own, left = {"row": row}, row
        for axis in reversed(self.rows):
            own[axis.name] = left if axis is self.rows[0] else self.emit.rest(left, axis.extent)
            left = self.emit.divided(left, axis.extent)
        return own

    def _bits(self, own: Env, at: SsaValue, mask: SsaValue | None, result: int = 0) -> SsaValue:
        """Print the bits of a vector of elements of a row from `at` on; those that are masked out are arbitrary."""
        emit = self.emit
        points = PointVector({**self.env, **own, self.last.name: at}, self.ranges, self.last.name, LANES, mask, True)
        value = self.values(points)[self.pass_.sinks[result].value]
        return emit.bits(emit.splat(value, LANES), "i32")

    def rows_block(self, to: SsaValue, first: SsaValue, count: SsaValue, terms: SsaValue) -> None:
        """Print the loops that split up to 32 rows.

        Args:
            to: where their components begin.
            first: the first row.
            count: how many there are.
            terms: the number of terms.
        """
        self._rows_of(to, lambda i: self._of_row(self.emit.add(first, i)), count, terms, STEP)

    def pixels(self, to: SsaValue, first: SsaValue, count: SsaValue, plane: int) -> None:
        """Print the loops that split pixels of an image, whose rows are one after another.

        Args:
            to: where their components begin.
            first: the first row of the image.
            count: the number of pixels.
            plane: the components of all pixels in a step of channels.
        """
        emit, (u, v) = self.emit, self.rows

        def line(i: SsaValue) -> None:
            begin = emit.times(i, v.extent)
            end = emit.least(emit.index(v.extent), emit.add(count, emit.times(begin, -1)))
            at, own = emit.place("i16", to, emit.times(begin, EDGE)), {u.name: emit.add(first, i)}
            self._rows_of(at, lambda x: {**own, v.name: x}, end, emit.index(self.last.extent), plane)

        emit.loop(emit.index(0), emit.divided(emit.add(count, emit.index(v.extent - 1)), v.extent), 1, line)

    def _rows_of(
        self, to: SsaValue, own: Callable[[SsaValue], Env], count: SsaValue, terms: SsaValue, plane: int
    ) -> None:
        emit = self.emit
        whole = emit.times(emit.divided(terms, EDGE), EDGE)
        left = emit.add(terms, emit.times(whole, -1))

        def row(i: SsaValue) -> None:
            at = emit.place("i16", to, emit.times(i, EDGE))

            def half(k: SsaValue, h: int, mask: SsaValue | None) -> None:
                bits = self._bits(own(i), emit.add(k, emit.index(h * LANES)), mask)
                high = emit.op("lshr", bits, constant("i32", LANES))
                if mask is not None:
                    high = emit.select(mask, high, constant("i32", 0, LANES))
                store(k, h, emit.convert("trunc", high, "i16"))

            def store(k: SsaValue, h: int, x: SsaValue) -> None:
                place = emit.place("i16", at, emit.times(emit.divided(k, EDGE), plane))
                emit.store(x, emit.place("i16", place, emit.index(h * LANES)), EDGE)

            def some(h: int) -> None:
                narrow = emit.convert("trunc", emit.add(left, emit.index(-h * LANES)), "i32")
                mask = emit.test("icmp ult", array("i32", range(LANES)), narrow)
                known = left.number
                half(whole, h, None if known is not None and known >= (h + 1) * LANES else mask)

            def rest() -> None:
                some(0)
                zero = constant("i16", 0, LANES)
                emit.branch(emit.before(emit.index(LANES), left), lambda: some(1), lambda: store(whole, 1, zero))

            def step(k: SsaValue) -> None:
                half(k, 0, None)
                half(k, 1, None)

            emit.loop(emit.index(0), whole, EDGE, step)
            emit.branch(emit.before(emit.index(0), left), rest)

        emit.loop(emit.index(0), count, 1, row)

    def columns_block(self, to: SsaValue, strip: Strip, terms: SsaValue, first: SsaValue) -> None:
        """Print the loops that split the columns of a strip.

        Args:
            to: where their components begin.
            strip: the columns.
            terms: the number of terms.
            first: the first term.
        """
        emit = self.emit
        whole, used = emit.divided(terms, PAIR), emit.divided(emit.add(terms, emit.index(1)), PAIR)
        end = emit.times(emit.divided(emit.add(terms, emit.index(EDGE - 1)), EDGE), PAIRS)

        def line(p: SsaValue, h: int, v: int) -> SsaValue:
            mask = strip.mask if v == strip.vectors - 1 else None
            column = emit.add(strip.column, emit.index(v * LANES))
            if len(self.pass_.sinks) == PAIR:  # the pass computes two terms of each of its rows
                return self._bits(self._of_row(p), column, mask, h)
            return self._bits(self._of_row(emit.add(emit.add(first, emit.times(p, PAIR)), emit.index(h))), column, mask)

        def pair(p: SsaValue, count: int = PAIR) -> None:
            at = emit.place("i16", to, emit.times(p, EDGE))
            at = emit.place("i16", at, emit.times(emit.divided(p, PAIRS), TILE))
            for v in range(strip.vectors):
                lines = [line(p, h, v) for h in range(count)]
                x = emit.op("lshr", lines[0], constant("i32", LANES)) if lines else constant("i32", 0, LANES)
                if count == PAIR:
                    x = emit.op("or", x, emit.op("and", lines[1], constant("i32", TOP)))
                emit.store(x, emit.place("i16", at, emit.index(v * TILE)), 2 * EDGE)

        emit.loop(emit.index(0), whole, 1, pair)
        emit.branch(emit.before(whole, used), lambda: pair(whole, 1))
        emit.loop(used, end, 1, lambda p: pair(p, 0))
