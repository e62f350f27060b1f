"""Prints contractions: blocks of rows and vectors of columns whose sums stay in registers.

The pass of zeros before a contraction and the pass that takes its sums are part of the blocks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from korch.system.alignment import ceil_div
from korch.tile.analysis.axes import even_step, joined
from korch.tile.analysis.fetch import FAR_BYTES
from korch.tile.analysis.panels import in_rows, panels, strips
from korch.tile.analysis.registers import BYTE_REGISTERS, FEW_BYTE_REGISTERS, LONG_BLOCK, usual_registers
from korch.tile.analysis.sums import Sums, batches_of, is_by_lanes, kept_guards, leaves_out, sides_of, tails_of
from korch.tile.ir.index import Expr, Ranges, add, scale, substitute, var
from korch.tile.ir.index import constant as number
from korch.tile.ir.program import At, Axis, Buffer, Contract, Level, Product, TileProgram, refused
from korch.tile.llvm.block import BlockPrinter, Lines, OperandSide, SumBlock
from korch.tile.llvm.emit import SsaValue, array, constant
from korch.tile.llvm.index import Env, address, condition, end_of
from korch.tile.llvm.points import KernelContext
from korch.tile.llvm.sums import SumsPrinter
from korch.tile.lower.buffers import LINE_BYTES

STREAM_BYTES = 16384
"""The prefetch distance if the second operand is read contiguously and only once."""

FLOATS = (Product.F32, Product.F16, Product.BF16)
"""The products of float32 numbers; narrower operands are widened when they are read."""

FEW_LINES = 8
"""The most cache lines of a row of a second operand whose rows lie side by side, so that later rows are prefetched."""

SINGLE_ROWS = 8
"""The maximum rows of a block of one vector if there are 16 registers: LLVM moves each sum to another register with
each multiply-add, and needs free ones for that."""


def refused_contraction(program: TileProgram, step: Contract) -> str:
    """Return why a contraction is not printed yet; "" if it is."""
    if step.product not in FLOATS:
        return f"contractions by {step.product.value}"
    if step.factor is not None or leaves_out(step) or is_by_lanes(step):
        return "contractions of windows, or with factors"
    if {*step.where} - {*kept_guards(step)}:
        return "contractions with guards"
    second, columns = program.buffer(step.b.buffer), sides_of(step)[1]
    is_along = panels(second) is not None or step.b.index.coefficient(columns.name) == 1
    return "" if columns.extent == 1 or is_along else "strided columns"


@dataclass(frozen=True)
class Strip:
    """Vectors of columns, for which all rows are computed."""

    column: SsaValue  # the first column
    vectors: int  # how many
    second: SsaValue  # the address of their first elements of the second operand
    mask: SsaValue | None = None  # which lanes of the last vector exist; None for all
    # the address of the next whole strip of the second operand, and whether there is none
    following: tuple[SsaValue, SsaValue] | None = None


class ContractPrinter:
    """Prints one contraction."""

    printer_of: type[BlockPrinter] = BlockPrinter

    def __init__(self, context: KernelContext, sums: Sums, grid: tuple[Axis, ...], env: Env) -> None:
        self.context, self.emit, self.env, self.sums = context, context.emit, env, sums
        self.batch = batches_of(sums.step)
        self.grid = (*grid, *self.batch)
        self.step = replace(sums.step, axes=tuple(axis for axis in sums.step.axes if axis not in self.batch))
        self.ranges: Ranges = {a.name: (0, max(a.extent - 1, 0)) for a in (*self.grid, *self.step.axes)}
        self.lanes = context.lanes

    def run(self) -> None:
        """Print the loops over batches, and the blocks."""
        guards = kept_guards(self.step)

        def batch(axes: Sequence[Axis], env: Env) -> None:
            if axes:
                end = self._end(axes[0], env)
                self.emit.loop(self.emit.index(0), end, 1, lambda i: batch(axes[1:], {**env, axes[0].name: i}))
                return
            own = condition(self.emit, guards, env, self.ranges)
            self.emit.branch(own, lambda: self._blocks(env))

        batch(self.batch, self.env)

    def _end(self, axis: Axis, env: Env) -> SsaValue:
        return end_of(self.emit, axis, axis.extent, env)

    def _side(self, at: At, env: Env) -> OperandSide:
        """Print the address of an operand's first element; return it with the memory steps of the axes."""
        index, buffer = substitute(at.index, {}, self.ranges), self.context.program.buffer(at.buffer)
        layout, steps = panels(buffer), dict[str, int]()
        for axis in self.step.axes:
            slope = 0 if axis.extent == 1 else index.coefficient(axis.name)
            if slope is None:
                raise refused(f"buffer {at.buffer} is not read in equal steps of {axis.name}", "Pack the operand")
            steps[axis.name] = slope
        columns = sides_of(self.step)[1]
        if columns.extent == 1:
            steps[columns.name] = 0 if at is self.step.a or at is self.step.rescale else 1
        start = substitute(index, {axis.name: number(0) for axis in self.step.axes}, self.ranges)
        if layout is not None:
            start = in_rows(buffer, layout, start, self.ranges)
            for name in steps.keys() - {columns.name}:
                steps[name] = steps[name] // layout.columns * layout.width
        kind = self.context.kinds[at.buffer]
        base = self.context.bases.get(at.buffer, SsaValue("null", "ptr"))  # sums may have no memory
        return OperandSide(at.buffer, kind, address(self.emit, kind, base, start, env), steps, layout is not None)

    def _blocks(self, env: Env) -> None:
        """Print the loops over strips of columns and over blocks of rows."""
        step = self.step
        self.rows, self.columns, terms = sides_of(step)
        out, a, b = (self._side(at, env) for at in (step.out, step.a, step.b))
        self._require(terms, out, a, b)
        usual = usual_registers(self.lanes)
        if step.product.is_of_bytes:
            usual = BYTE_REGISTERS.get(self.lanes, FEW_BYTE_REGISTERS)
        chosen = step.registers or usual
        most = SINGLE_ROWS if chosen.vectors == 1 and not self.context.isa.is_avx512 else chosen.rows
        height = math.prod(axis.extent for axis in self.rows)
        self.registers = replace(chosen, rows=max(1, min(chosen.rows, most, height)))
        second = self.context.program.buffer(step.b.buffer)
        vector, strip = self._strides(second, b)
        finish = self.sums.finish and SumsPrinter(self.context, self.grid, step, self.sums.finish, env)
        terms = joined(terms, a.steps, b.steps)
        self.printer = self.printer_of(
            self.context,
            self.registers,
            (out, a, b),
            self.rows,
            terms,
            vector,
            self._end(terms[-1], env),
            finish or None,
            self.sums.is_zeroed,
            self._side(step.rescale, env) if step.rescale is not None else None,
        )
        self.a, self.b = a, b
        self.count = self.emit.times(self._end(self.rows[0], env), math.prod(axis.extent for axis in self.rows[1:]))
        self._strips(self._end(self.columns, env), vector, strip, self._after(terms))

    def _strides(self, second: Buffer, b: OperandSide) -> tuple[int, int]:
        """Return the memory steps between the vectors of a strip, and between strips."""
        return strips(second, self.registers.vectors, self.lanes, b.steps[self.columns.name])

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        tile = self.context.program.buffer(out.buffer)
        if tile.level is not Level.TILE or out.steps[self.columns.name] != 1 or panels(tile):
            raise refused(f"buffer {tile.name} is no tile with columns side by side")
        is_mixed = a.steps[self.columns.name] or any(b.steps[x.name] for x in self.rows)
        if is_mixed or any(out.steps[x.name] for x in terms):
            raise refused("an operand of a contraction has an axis of the other")
        if self.step.rescale is not None and self.columns.name in self.step.rescale.index.variables:
            raise refused("only factors of rows rescale the sums of a contraction")
        if b.steps[self.columns.name] != 1 or a.is_panel:
            raise refused(f"buffer {b.buffer} is not read along its columns, or {a.buffer} not along its rows")

    def _after(self, terms: Sequence[Axis]) -> SsaValue | None:
        """Print the address of the next contraction's second operand, if it follows this one's in memory."""
        if not self.batch or not self.b.is_panel or not self.registers.fetches_b:
            return None
        name, last = self.batch[-1].name, self.step.axes[-1]
        following = substitute(self.step.b.index, {name: add(var(name), number(1))}, self.ranges)
        distance = add(following, scale(substitute(self.step.b.index, {}, self.ranges), -1))
        layout = panels(self.context.program.buffer(self.b.buffer))
        assert layout is not None
        if distance != number(last.extent * layout.columns):
            return None
        return self.emit.place(self.b.kind, self.b.at, self.emit.index(last.extent * self.b.steps[terms[-1].name]))

    # Columns

    def _strips(self, end: SsaValue, vector: int, strip: int, after: SsaValue | None) -> None:
        """Print the loop over whole strips, and the strip of the remaining columns."""
        emit, most, lanes = self.emit, self.registers.vectors, self.lanes
        width = most * lanes
        whole = self._whole(end, width)

        def second(n: SsaValue) -> SsaValue:
            return emit.place(self.b.kind, self.b.at, emit.times(emit.divided(n, width), strip))

        def whole_strip(n: SsaValue) -> None:
            at = emit.add(n, emit.index(width))
            is_last = emit.op("xor", emit.before(at, end), constant("i1", 1))
            following = second(at)
            if after is not None:
                following, is_last = emit.select(is_last, after, following), constant("i1", 0)
            self._strip(Strip(n, most, second(n), None, (following, is_last)))

        emit.loop(emit.index(0), whole, width, whole_strip)
        begin = second(whole)
        for is_own, vectors, mask in self._tails(emit.add(end, emit.times(whole, -1))):
            emit.branch(is_own, lambda v=vectors, m=mask: self._strip(Strip(whole, v, begin, m)))  # type: ignore[misc]

    def _tails(self, left: SsaValue) -> Iterator[tuple[SsaValue, int, SsaValue | None]]:
        """Yield the possible numbers of vectors of the remaining columns: the condition, the number, the last mask."""
        emit, lanes, known = self.emit, self.lanes, left.number
        if known is not None:
            mask = array("i1", [i < known % lanes for i in range(lanes)]) if known % lanes else None
            if known:
                yield constant("i1", 1), -(-known // lanes), mask
            return
        for v in range(self.registers.vectors):
            low, high = (emit.index(n * lanes) for n in (v, v + 1))
            is_own = emit.op("and", emit.before(low, left), emit.test("icmp sle", left, high))
            narrow = emit.convert("trunc", emit.add(left, emit.index(-v * lanes)), "i32")
            yield is_own, v + 1, emit.test("icmp ult", array("i32", range(lanes)), narrow)

    def _whole(self, end: SsaValue, width: int) -> SsaValue:
        return self.emit.times(self.emit.divided(end, width), width)

    # Rows

    def _strip(self, strip: Strip) -> None:
        """Print the loop over all rows of a strip."""
        emit, at_once = self.emit, self.registers.rows
        whole = self._whole(self.count, at_once)
        emit.loop(emit.index(0), whole, at_once, lambda r: self._rows(strip, r, at_once))
        if any(isinstance(axis.ragged[1], Expr) for axis in self.rows if axis.ragged):
            emit.in_halves(whole, self.count, at_once // 2, lambda r, rows: self._rows(strip, r, rows))
            return
        left = emit.add(self.count, emit.times(whole, -1))
        for tail in tails_of(self.rows, at_once):
            is_own = constant("i1", left.number == tail)
            if left.number is None:
                is_own = emit.test("icmp eq", left, emit.index(tail))
            emit.branch(is_own, lambda tail=tail: self._rows(strip, whole, tail))  # type: ignore[misc]

    def _rows(self, strip: Strip, r: SsaValue, rows: int) -> None:
        """Print a block; if its rows may belong to two groups, with a version for where they do not."""
        emit, a, inner = self.emit, self.a, self.rows[-1]
        even, step, size = even_step(self.rows, a.steps), a.steps[inner.name], inner.extent

        place, next_group = emit.rest(r, size), a.steps[self.rows[0].name] - size * step

        def follows(i: int) -> SsaValue:  # whether a row is in the group after that of the first row
            return emit.test("icmp sge", place, emit.index(size - i))

        def group(i: int) -> SsaValue:
            own = emit.divided(r if size >= rows else emit.add(r, emit.index(i)), size)
            return own if i == 0 or size < rows else emit.add(own, emit.convert("zext", follows(i), "i64"))

        def first(i: int) -> SsaValue:
            row = r if size >= rows else emit.add(r, emit.index(i))
            base = emit.place(a.kind, a.at, emit.times(emit.divided(row, size), a.steps[self.rows[0].name]))
            at = emit.place(a.kind, base, emit.times(emit.rest(row, size), step))
            if i == 0 or size < rows:
                return at
            more = emit.select(follows(i), emit.index(next_group), emit.index(0))
            return emit.place(a.kind, emit.place(a.kind, at, more), emit.index(i * step))

        def apart() -> None:
            self.printer.run(replace(block, first=[(first(i), 0) for i in range(rows)]))

        def together() -> None:
            base = first(0)
            self.printer.run(replace(block, group=lambda i: group(0), first=[(base, i * step) for i in range(rows)]))

        lines = self._lines(strip, r)
        block = SumBlock(r, rows, strip.column, strip.vectors, (), strip.second, strip.mask, group, lines)
        at_once = self.registers.rows
        if even is not None:
            base = emit.place(a.kind, a.at, emit.times(r, even))
            self.printer.run(replace(block, first=[(base, i * even) for i in range(rows)]))
        elif size % rows == 0 and at_once % rows == 0 and size % at_once == 0:
            together()
        else:
            last = emit.add(emit.rest(r, size), emit.index(rows))
            emit.branch(emit.before(last, emit.index(size + 1)), together, apart)

    # Prefetches

    def _lines(self, strip: Strip, r: SsaValue) -> list[Lines]:
        """Print the addresses of the lines to prefetch with a whole block."""
        is_whole = strip.vectors == self.registers.vectors and strip.mask is None
        return [*(self._lines_of_b(strip, r) if is_whole else []), *self._lines_of_a(strip, r)]

    def _lines_of_b(self, strip: Strip, r: SsaValue) -> list[Lines]:
        """Print the lines of the second operand that are read next; then the rows of the first that follow."""
        emit, registers, b = self.emit, self.registers, self.b
        if not registers.fetches_b:
            return []
        count = math.prod(axis.extent for axis in self.rows)
        size = registers.vectors * self.lanes * b.size_bytes
        most = -(-size // LINE_BYTES)
        step = emit.index(b.steps[self.printer.terms[-1].name] * b.size_bytes)
        is_once = count <= registers.rows and not any(axis.ragged for axis in self.rows)
        if is_once and b.is_panel and self.printer.vector == self.lanes:
            return [Lines(emit.place("i8", strip.second, emit.index(STREAM_BYTES)), step, most, 2)]
        if not b.is_panel and step.number == self.columns.extent * b.size_bytes <= FEW_LINES * LINE_BYTES:
            ahead = emit.place("i8", strip.second, emit.index(FAR_BYTES))
            return [Lines(ahead, step, most, 2)] if r.number == 0 else []
        rest = strip.second, emit.index(0)
        even, last = even_step(self.rows, self.a.steps), self.printer.terms[-1].extent
        if self._is_dense and registers.rows * self.a.size_bytes <= LINE_BYTES and even == last:
            begin = emit.place(self.a.kind, self.a.at, emit.times(emit.add(r, emit.index(registers.rows)), last))
            rest = begin, emit.index(LINE_BYTES)
        return self._lines_ahead(strip, r, (size, step), rest)

    def _lines_ahead(
        self, strip: Strip, r: SsaValue, line: tuple[int, SsaValue], rest: tuple[SsaValue, SsaValue]
    ) -> list[Lines]:
        """Print the lines of the next strip that are prefetched with a block; then others.

        `line`: the bytes of a term of a strip, and those from term to term. `rest`: where the other lines begin, and
        the bytes from one to the next.
        """
        if strip.following is None:
            return []
        emit, at_once, (size, step), (following, is_last) = self.emit, self.registers.rows, line, strip.following
        blocks = max(1, math.prod(axis.extent for axis in self.rows) // at_once)
        each = ceil_div(ceil_div(size, LINE_BYTES), blocks)
        begin = emit.times(emit.divided(r, at_once), each * LINE_BYTES)
        is_inside = emit.op("and", emit.before(begin, emit.index(size)), emit.op("xor", is_last, constant("i1", 1)))
        at = emit.select(is_inside, emit.place("i8", following, begin), rest[0])
        return [Lines(at, emit.select(is_inside, step, rest[1]), each)]

    @property
    def _is_dense(self) -> bool:
        """Whether the rows of the first operand lie side by side."""
        terms = self.printer.terms
        is_one = len(terms) == 1 and self.a.steps[terms[-1].name] == 1
        return is_one and even_step(self.rows, self.a.steps) == terms[-1].extent

    def _lines_of_a(self, strip: Strip, r: SsaValue) -> list[Lines]:
        """Print the lines of later rows of the first operand, which are prefetched with the first strip."""
        emit, registers = self.emit, self.registers
        if not registers.fetches_a or not self._is_dense:
            return []
        extent = self.printer.terms[-1].extent
        each = -(-registers.rows * self.a.size_bytes // LINE_BYTES)
        further = registers.rows * -(-LONG_BLOCK // (registers.rows * registers.vectors * extent))
        is_first = emit.test("icmp eq", strip.column, emit.index(0))
        if strip.column.number is not None:
            is_first = constant("i1", strip.column.number == 0)
        row = emit.select(is_first, emit.add(r, emit.index(further)), r)
        return [Lines(emit.place(self.a.kind, self.a.at, emit.times(row, extent)), emit.index(each * LINE_BYTES), each)]
