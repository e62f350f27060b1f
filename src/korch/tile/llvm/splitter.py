"""Prints how operands are split into bfloat16 components.

Components are in blocks of 32 rows or columns and steps of 32 terms. In a step, each component of 32 rows, or of 32
columns, lies after the one before. The rows of a component lie one after another. Its columns are two tiles of 16,
which have the terms in pairs: adjacent ones, or terms i and i + 16 of the step if both operands are split by the
kernel. Terms beyond the last one are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.target import EDGE
from korch.tile.analysis.components import split_of
from korch.tile.analysis.sums import by_row
from korch.tile.ir.index import substitute
from korch.tile.ir.program import PAIR, Axis, Load, Pass, Stage
from korch.tile.llvm.emit import SsaValue, array, constant
from korch.tile.llvm.index import Env
from korch.tile.llvm.points import KernelContext, PointPrinter, PointVector

LANES = 16
"""The lanes of its vectors, and the columns of a tile."""

TILE = LANES * EDGE
"""The numbers in a tile of one step."""

STEP = EDGE * EDGE
"""The numbers of a component of a block in one step."""

PAIRS = EDGE // PAIR
"""The pairs of terms of a step."""

TOP, HALF = 0xFFFF0000, 0x8000
"""The bits of a float32 that are those of a bfloat16, and half of the last one's value."""

ODD = tuple(range(1, 2 * EDGE, 2))


@dataclass(frozen=True)
class TermPair:
    """A pair of terms of columns."""

    to: SsaValue  # where its components are stored
    terms: tuple[SsaValue, SsaValue]  # both terms
    end: SsaValue  # the number of terms
    first: SsaValue  # what is added to the terms to get the axis of the pass


class OperandSplitter(PointPrinter):
    """Prints how blocks of an operand are split."""

    def __init__(
        self, context: KernelContext, grid: tuple[Axis, ...], pass_: Pass, env: Env, *, is_image: bool, is_apart: bool
    ) -> None:
        """Prepare the pass.

        Args:
            context: the kernel.
            grid: the axes around the pass.
            pass_: the pass, whose operations are indexed by the number of the row unless it is that of an image.
            env: the values of the variables around the pass.
            is_image: whether rows are the pixels of an image.
            is_apart: whether terms i and i + 16 of a step form a pair.
        """
        super().__init__(context, Stage(grid, (pass_,)), pass_, env)
        *self.rows, self.last = pass_.axes
        ranges, split = dict(self.ranges), split_of(context.program.buffer(pass_.sinks[0].buffer))
        assert split is not None
        self.components, self.is_apart = split.components, is_apart
        self.ahead = 0  # how many terms ahead lines are prefetched; 0 if they are not
        self.pass_ = pass_ if is_image else by_row(pass_, self.rows, ranges)
        self.ranges, self.ops = ranges, {op.name: op for op in self.pass_.ops}

    def of_row(self, row: SsaValue) -> Env:
        """Print the values of the axes of rows at a row."""
        own, left = {"row": row}, row
        for axis in reversed(self.rows):
            own[axis.name] = left if axis is self.rows[0] else self.emit.rest(left, axis.extent)
            left = self.emit.divided(left, axis.extent)
        return own

    def number(self, own: Env, at: SsaValue, lanes: int = 1, mask: SsaValue | None = None, result: int = 0) -> SsaValue:
        """Print elements of a row from `at` on; those that are masked out are arbitrary."""
        variable = self.last.name if lanes > 1 else ""
        points = PointVector({**self.env, **own, self.last.name: at}, self.ranges, variable, lanes, mask, True)
        return self.emit.splat(self.values(points)[self.pass_.sinks[result].value], lanes)

    def fetch(self, own: Env, at: SsaValue) -> None:
        """Print prefetches of what elements of a row from `at` on are computed from."""
        for op in self.pass_.ops if self.ahead else ():
            index = substitute(op.index, {}, self.ranges) if isinstance(op, Load) else None
            if isinstance(op, Load) and index is not None and "table[" not in str(index):  # nothing beyond a table
                env = {**self.env, **own, self.last.name: at}
                self.emit.prefetch(self.place(op.buffer, index, env).at)

    def column(self, term: SsaValue, at: SsaValue, mask: SsaValue | None, first: int = 0, step: int = 1) -> SsaValue:
        """Print a vector of columns of a term, which leaves `first` if it is divided by `step`."""
        emit, each = self.emit, len(self.pass_.sinks)  # the pass computes several terms of each of its rows
        own, result = self.of_row(emit.divided(term, each)), emit.rest(term, each)
        found = self.number(own, at, LANES, mask, first % each)
        for other in range(first % each + step, each, step):
            is_other = emit.test("icmp eq", result, emit.index(other))
            found = emit.select(is_other, self.number(own, at, LANES, mask, other), found)
        return found

    def _store(self, low: SsaValue, high: SsaValue, to: SsaValue, apart: int, *, joins: bool) -> None:
        """Print the stores of the components of two vectors.

        `joins`: whether each lane of the result has a number of each vector; else those of one follow the other's.
        """
        emit = self.emit
        for i in range(self.components):
            is_last, bits = i + 1 == self.components, [emit.bits(x, "i32") for x in (low, high)]
            if not is_last:
                bits = [emit.op("and", emit.op("add", x, constant("i32", HALF)), constant("i32", TOP)) for x in bits]
            if joins:
                upper = emit.op("and", bits[1], constant("i32", TOP)) if is_last else bits[1]
                both = emit.op("or", emit.op("lshr", bits[0], constant("i32", LANES)), upper)
            else:
                wide = [emit.pure("i16", EDGE, f"bitcast {x.typed} to <{EDGE} x i16>", x) for x in bits]
                both = emit.shuffle(wide[0], wide[1], ODD)
            emit.store(both, emit.place("i16", to, emit.index(i * apart)), 2 * EDGE)
            if not is_last:
                low, high = (emit.op("fsub", x, emit.bits(y, "float")) for x, y in zip((low, high), bits, strict=True))

    # Rows

    def line(self, to: SsaValue, own: Env, k: SsaValue, terms: SsaValue, apart: int, ahead: Env | None = None) -> None:
        """Print how terms k to k + 31 of a row are split.

        `ahead`: the row whose numbers are prefetched meanwhile; if it is not given, later ones of the same row are.
        """
        emit, halves = self.emit, []
        for h in range(PAIR):
            self.fetch(ahead or own, emit.add(k, emit.index(h * LANES + (0 if ahead else self.ahead))))
        for h in range(PAIR):
            at, zero = emit.add(k, emit.index(h * LANES)), constant("float", 0.0, LANES)
            whole = terms.number
            if whole is not None and whole <= h * LANES:
                halves.append(zero)
            elif whole is not None and whole % EDGE in (0, *([LANES] if h == 0 else [])):
                halves.append(self.number(own, at, LANES))
            else:
                mask = self.lanes_before(emit.add(terms, emit.times(at, -1)))
                halves.append(emit.select(mask, self.number(own, at, LANES, mask), zero))
        self._store(halves[0], halves[1], to, apart, joins=self.is_apart)

    def lanes_before(self, count: SsaValue) -> SsaValue:
        """Print which lanes are before a number of them, which may be negative."""
        emit = self.emit
        if count.number is not None:
            return array("i1", [i < count.number for i in range(LANES)])
        return emit.test("icmp slt", array("i32", range(LANES)), emit.convert("trunc", count, "i32"))

    def rows_block(self, to: SsaValue, first: SsaValue, count: SsaValue, terms: SsaValue) -> None:
        """Print the loops that split up to 32 rows."""
        emit, step = self.emit, self.components * STEP

        def row(i: SsaValue) -> None:
            at, own = emit.place("i16", to, emit.times(i, EDGE)), self.of_row(emit.add(first, i))

            def some(k: SsaValue) -> None:
                self.line(emit.place("i16", at, emit.times(emit.divided(k, EDGE), step)), own, k, terms, STEP)

            emit.loop(emit.index(0), terms, EDGE, some)

        emit.loop(emit.index(0), count, 1, row)

    # Columns

    def pair(self, pair: TermPair, column: SsaValue, masks: Sequence[SsaValue | None]) -> None:
        """Print how a pair of terms of columns is split.

        `masks`: for each vector of columns, which lanes exist; None for all.
        """
        emit, (low, high) = self.emit, pair.terms

        def number(v: int, h: int) -> SsaValue:
            term, at = emit.add(pair.first, pair.terms[h]), emit.add(column, emit.index(v * LANES))
            return self.column(term, at, masks[v], *(() if self.is_apart else (h, PAIR)))

        def split(count: int) -> None:
            for v in range(len(masks)):
                terms = [number(v, h) if h < count else constant("float", 0.0, LANES) for h in range(PAIR)]
                self._store(terms[0], terms[1], emit.place("i16", pair.to, emit.index(v * TILE)), STEP, joins=True)

        def some() -> None:
            emit.branch(emit.before(low, pair.end), lambda: split(1), lambda: split(0))

        each = len(self.pass_.sinks)
        for term in pair.terms[: PAIR if each == 1 else 1]:
            row = self.of_row(emit.divided(emit.add(emit.add(pair.first, term), emit.index(self.ahead)), each))
            for v in range(len(masks)):
                self.fetch(row, emit.add(column, emit.index(v * LANES)))
        known = pair.end.number
        is_whole = constant("i1", 1) if known is not None and known % EDGE == 0 else emit.before(high, pair.end)
        emit.branch(is_whole, lambda: split(PAIR), some)

    def pair_of(self, to: SsaValue, step: SsaValue, i: SsaValue, ends: tuple[SsaValue, SsaValue]) -> TermPair:
        """Return pair i of a step of terms.

        `ends`: the number of terms, and what is added to a term to get the axis of the pass.
        """
        emit, begin = self.emit, self.emit.times(step, EDGE)
        at = emit.place("i16", to, emit.times(i, EDGE))
        low = emit.add(begin, i if self.is_apart else emit.times(i, PAIR))
        high = emit.add(low, emit.index(PAIRS if self.is_apart else 1))
        return TermPair(at, (low, high), *ends)

    def columns_block(
        self, to: SsaValue, column: SsaValue, masks: Sequence[SsaValue | None], ends: tuple[SsaValue, SsaValue]
    ) -> None:
        """Print the loops that split a strip of columns.

        `masks`: for each vector of columns, which lanes exist; None for all. `ends`: the number of terms, and what is
        added to a term to get the axis of the pass.
        """
        emit, size = self.emit, self.components * STEP
        steps = emit.divided(emit.add(ends[0], emit.index(EDGE - 1)), EDGE)

        def step(k: SsaValue) -> None:
            at = emit.place("i16", to, emit.times(k, size))
            each = emit.index(PAIRS)
            emit.loop(emit.index(0), each, 1, lambda i: self.pair(self.pair_of(at, k, i, ends), column, masks))

        emit.loop(emit.index(0), steps, 1, step)
