"""Prints contractions of float32: blocks of rows and vectors of columns whose sums stay in registers.

A block is the declared instruction `SumBlock`: it says how many rows and vectors it has and where its operands are. The
pass of zeros before a contraction and the pass that takes its sums are part of the block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from korch.tile.analysis.axes import Steps, even_step, joined
from korch.tile.analysis.panels import in_rows, panels, strips
from korch.tile.analysis.registers import FEW_REGISTERS, REGISTERS
from korch.tile.analysis.sums import Sums, batches_of, by_row, is_by_lanes, kept_guards, leaves_out, sides_of, tails_of
from korch.tile.ir.index import Expr, Ranges, substitute, vector_step
from korch.tile.ir.index import constant as number
from korch.tile.ir.program import At, Axis, Contract, Level, Load, Product, Stage, TileProgram, refused
from korch.tile.llvm.emit import SsaValue, array, constant
from korch.tile.llvm.functions import fused
from korch.tile.llvm.index import Env, address, condition, end_of
from korch.tile.llvm.memory import Place
from korch.tile.llvm.points import KernelContext, PointPrinter, PointVector

LINE_BYTES = 64
STREAM_BYTES = 16384
"""The prefetch distance if the second operand is read contiguously and only once."""

UNROLLED, MOST_UNROLLED = 16, 90
"""Up to UNROLLED adjacent terms are unrolled if they have at most MOST_UNROLLED multiply-adds."""

UNROLL = 4
"""Otherwise, this number of terms is unrolled."""

OPERANDS = 4
"""The size of an element of an operand in bytes."""


def refused_contraction(program: TileProgram, step: Contract, lanes: int) -> str:
    """Return why a contraction is not printed yet; "" if it is."""
    operands = [program.buffer(at.buffer) for at in (step.out, step.a, step.b)]
    if step.product is not Product.F32 or any(buffer.dtype.value != "f32" for buffer in operands):
        return f"contractions by {step.product.value}"
    if step.rescale is not None or step.factor is not None or leaves_out(step) or is_by_lanes(step):
        return "contractions of windows, or with factors"
    if {*step.where} - {*kept_guards(step)} or lanes != max(REGISTERS):
        return "contractions with guards, or for few lanes"
    if sides_of(step)[1].extent == 1:
        return "contractions of one column"
    first, second = operands[1:]
    if panels(first) is not None or any(axis.ragged for axis in step.axes if axis.is_reduced):
        return "contractions of panels on both sides, or with terms that are cut"
    return (
        "" if panels(second) is not None or step.b.index.coefficient(sides_of(step)[1].name) == 1 else "strided columns"
    )


class SumsPrinter(PointPrinter):
    """Prints what takes a vector of sums."""

    def step_of(self, index: Expr, points: PointVector) -> int | None:
        """Return the step between adjacent lanes: a vector begins at a multiple of the lanes."""
        return vector_step(index, points.variable, self.context.lanes)

    def place(self, buffer: str, index: Expr, env: Mapping[str, SsaValue]) -> Place:
        """Print the address of an element, which is read after the multiply-adds: they need all registers."""
        return replace(super().place(buffer, index, env), floor=self.emit.depth)

    def take(self, sums: SsaValue, points: PointVector, buffer: str) -> None:
        """Print the operations on a vector of sums, and their stores."""
        self.squares = {op.name: sums for op in self.pass_.ops if isinstance(op, Load) and op.buffer == buffer}
        values = self.values(points)
        for sink in self.pass_.sinks:
            self.store(sink.buffer, sink.index, values[sink.value], points)


@dataclass(frozen=True)
class OperandSide:
    """An operand: the address of its first element, and its memory steps along the axes."""

    at: SsaValue
    steps: Steps


@dataclass(frozen=True)
class SumBlock:
    """A block of sums in registers.

    Attributes:
        row: its first row.
        rows: the number of rows.
        column: its first column.
        vectors: vectors of columns of each row.
        first: the addresses of the first operand's rows.
        second: the address of its columns of the second operand.
        mask: which lanes exist; None for all.
        ahead: the address and the step in bytes per term of lines to prefetch, and how many per term.
    """

    row: SsaValue
    rows: int
    column: SsaValue
    vectors: int
    first: Sequence[SsaValue]
    second: SsaValue
    mask: SsaValue | None = None
    ahead: tuple[SsaValue, SsaValue, int] | None = None


class ContractPrinter:
    """Prints one contraction."""

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
            steps[columns.name] = 0 if at is self.step.a else 1
        start = substitute(index, {axis.name: number(0) for axis in self.step.axes}, self.ranges)
        if layout is not None:
            start = in_rows(buffer, layout, start, self.ranges)
            for name in steps.keys() - {columns.name}:
                steps[name] = steps[name] // layout.columns * layout.width
        base = self.context.bases.get(at.buffer, SsaValue("null", "ptr"))  # sums may have no memory
        return OperandSide(address(self.emit, "float", base, start, env), steps)

    def _blocks(self, env: Env) -> None:
        """Print the loops over strips of columns and over blocks of rows."""
        emit, step = self.emit, self.step
        rows, columns, terms = sides_of(step)
        out, a, b = (self._side(at, env) for at in (step.out, step.a, step.b))
        self._require(rows, columns, terms, out, a, b)
        self.terms = joined(terms, a.steps, b.steps)
        self.a, self.b, self.out, self.rows, self.columns = a, b, out, rows, columns
        usual = REGISTERS.get(self.lanes, FEW_REGISTERS)
        chosen = step.registers or usual
        height = math.prod(axis.extent for axis in rows)
        self.registers = replace(chosen, rows=max(1, min(chosen.rows, height)))
        second = self.context.program.buffer(step.b.buffer)
        vector, strip = strips(second, self.registers.vectors, self.lanes, b.steps[columns.name])
        self.vector, self.strip = vector, strip
        self.finish = self._finish(env) if self.sums.finish is not None else None
        inner = math.prod(axis.extent for axis in rows[1:])
        count = emit.times(self._end(rows[0], env), inner)
        width = self.registers.vectors * self.lanes
        end = self._end(columns, env)
        whole = self._whole(end, width)

        def strip_at(n: SsaValue) -> SsaValue:
            own = emit.times(
                emit.op("udiv", n, emit.index(width)) if n.number is None else emit.index((n.number or 0) // width),
                strip,
            )
            return emit.place("float", b.at, own)

        def whole_strip(n: SsaValue) -> None:
            following = emit.add(n, emit.index(width))
            is_last = (
                emit.test("icmp sge", following, end)
                if following.number is None or end.number is None
                else constant("i1", following.number >= end.number)
            )
            self._strip(n, self.registers.vectors, strip_at(n), count, None, (strip_at(following), is_last))

        emit.loop(emit.index(0), whole, width, whole_strip)
        vectors = self._whole(end, self.lanes)
        begin = strip_at(whole)
        for v in range(1, self.registers.vectors):  # vectors that fill no strip
            n = emit.add(whole, emit.index((v - 1) * self.lanes))
            is_inside = self._before(n, vectors)
            own = emit.place("float", begin, emit.index((v - 1) * vector))
            emit.branch(is_inside, lambda n=n, own=own: self._strip(n, 1, own, count, None, None))  # type: ignore[misc]
        left = emit.add(end, emit.times(vectors, -1))
        rest = emit.add(vectors, emit.times(whole, -1))
        own = emit.place("float", begin, emit.times(self._divided(rest, self.lanes), vector))
        mask = self._first(left)
        emit.branch(self._before(vectors, end), lambda: self._strip(vectors, 1, own, count, mask, None))

    def _whole(self, end: SsaValue, width: int) -> SsaValue:
        n = end.number
        return (
            self.emit.index(n // width * width) if n is not None else self.emit.times(self._divided(end, width), width)
        )

    def _divided(self, a: SsaValue, n: int) -> SsaValue:
        x = a.number
        return self.emit.index(x // n) if x is not None else self.emit.op("udiv", a, self.emit.index(n))

    def _before(self, a: SsaValue, b: SsaValue) -> SsaValue:
        x, y = a.number, b.number
        return constant("i1", x < y) if x is not None and y is not None else self.emit.test("icmp slt", a, b)

    def _first(self, count: SsaValue) -> SsaValue:
        n = count.number
        if n is not None:
            return array("i1", [i < n for i in range(self.lanes)])
        return self.emit.test("icmp ult", array("i32", range(self.lanes)), self.emit.convert("trunc", count, "i32"))

    def _require(
        self,
        rows: Sequence[Axis],
        columns: Axis,
        terms: Sequence[Axis],
        out: OperandSide,
        a: OperandSide,
        b: OperandSide,
    ) -> None:
        tile = self.context.program.buffer(self.step.out.buffer)
        if tile.level is not Level.TILE or out.steps[columns.name] != 1 or panels(tile):
            raise refused(f"buffer {tile.name} is no tile with columns side by side")
        if a.steps[columns.name] or any(b.steps[x.name] for x in rows) or any(out.steps[x.name] for x in terms):
            raise refused("an operand of a contraction has an axis of the other")
        if b.steps[columns.name] != 1:
            raise refused(f"buffer {self.step.b.buffer} is not read along its columns")

    def _finish(self, env: Env) -> SumsPrinter:
        assert self.sums.finish is not None
        axes = {axis.name: axis for axis in self.step.axes}
        own = tuple(axes[axis.name] for axis in self.sums.finish.axes if axis.name in axes)
        pass_ = replace(self.sums.finish, axes=own)
        found = SumsPrinter(self.context, Stage(self.grid, (pass_,)), pass_, env)
        ranges = dict(found.ranges)
        found.pass_ = by_row(pass_, self.rows, ranges)
        found.ops = {op.name: op for op in found.pass_.ops}
        found.ranges = ranges
        return found

    # Rows

    def _strip(
        self,
        n: SsaValue,
        vectors: int,
        second: SsaValue,
        count: SsaValue,
        mask: SsaValue | None,
        following: tuple[SsaValue, SsaValue] | None,
    ) -> None:
        """Print the loop over all rows of a strip."""
        emit, at_once = self.emit, self.registers.rows
        whole = self._whole(count, at_once)

        def block(r: SsaValue, rows: int = at_once) -> None:
            ahead = self._ahead(r, second, following) if mask is None and vectors == self.registers.vectors else None
            self._rows(SumBlock(r, rows, n, vectors, (), second, mask, ahead))

        emit.loop(emit.index(0), whole, at_once, block)
        left = emit.add(count, emit.times(whole, -1))
        if any(isinstance(axis.ragged[1], Expr) for axis in self.rows if axis.ragged):
            emit.in_halves(whole, count, at_once // 2, block)
            return
        for tail in tails_of(self.rows, at_once):
            is_own = (
                constant("i1", left.number == tail)
                if left.number is not None
                else emit.test("icmp eq", left, emit.index(tail))
            )
            emit.branch(is_own, lambda tail=tail: block(whole, tail))  # type: ignore[misc]

    def _ahead(
        self, r: SsaValue, second: SsaValue, following: tuple[SsaValue, SsaValue] | None
    ) -> tuple[SsaValue, SsaValue, int] | None:
        """Print the address and the step of the lines to prefetch with a block."""
        emit, (each, is_stream) = self.emit, self._fetched()
        if each == 0:
            return None
        step = emit.index(self.b.steps[self.terms[-1].name] * OPERANDS)
        if is_stream:
            return emit.place("i8", second, emit.index(STREAM_BYTES)), step, each
        assert following is not None
        line = emit.times(self._divided(r, self.registers.rows), each * LINE_BYTES)
        size = self.registers.vectors * self.lanes * OPERANDS
        is_inside = self._before(line, emit.index(size))
        if following[1].text != "false":
            is_inside = emit.op("and", is_inside, emit.op("xor", following[1], constant("i1", 1)))
        at = emit.select(is_inside, emit.place("i8", following[0], line), second)
        return at, emit.select(is_inside, step, emit.index(0)), each

    def _fetched(self) -> tuple[int, bool]:
        """Return how many lines of a term are prefetched with a block of rows, and whether b is read as a stream."""
        registers = self.registers
        if not registers.fetches_b:
            return 0, False
        count = math.prod(axis.extent for axis in self.rows)
        lines = -(-registers.vectors * self.lanes * OPERANDS // LINE_BYTES)
        is_once = count <= registers.rows and not any(axis.ragged for axis in self.rows)
        second = self.context.program.buffer(self.step.b.buffer)
        if is_once and panels(second) is not None and self.vector == self.lanes:
            return lines, True
        return -(-lines // max(1, count // registers.rows)), False

    def _rows(self, block: SumBlock) -> None:
        """Print a block; if its rows may belong to two groups, with a version for where they do not."""
        emit, even = self.emit, even_step(self.rows, self.a.steps)
        if even is not None:
            first = emit.place("float", self.a.at, emit.times(block.row, even))
            self._block(
                replace(block, first=[emit.place("float", first, emit.index(i * even)) for i in range(block.rows)])
            )
            return
        outer, inner = self.rows
        step, group, size = self.a.steps[inner.name], self.a.steps[outer.name], inner.extent

        def at(r: SsaValue) -> SsaValue:
            q, rest = self._divided(r, size), self._rest(r, size)
            return emit.place("float", emit.place("float", self.a.at, emit.times(q, group)), emit.times(rest, step))

        def together() -> None:
            first = at(block.row)
            self._block(
                replace(block, first=[emit.place("float", first, emit.index(i * step)) for i in range(block.rows)])
            )

        def apart() -> None:
            self._block(replace(block, first=[at(emit.add(block.row, emit.index(i))) for i in range(block.rows)]))

        if size % block.rows == 0 and self.registers.rows % block.rows == 0 and size % self.registers.rows == 0:
            together()
            return
        last = emit.add(self._rest(block.row, size), emit.index(block.rows))
        is_even = self._before(last, emit.index(size + 1))
        emit.branch(is_even, together, apart)

    def _rest(self, a: SsaValue, n: int) -> SsaValue:
        x = a.number
        return self.emit.index(x % n) if x is not None else self.emit.op("urem", a, self.emit.index(n))

    # The instruction

    def _block(self, block: SumBlock) -> None:
        """Print the multiply-adds of a block, and what takes its sums."""
        emit = self.emit
        if self.registers.fetches_out and block.mask is None:
            self._fetch_out(block)
        start = tuple(self._begin(block, r, v) for r in range(block.rows) for v in range(block.vectors))
        *outer, last = self.terms
        steps_a, steps_b = self.a.steps, self.b.steps
        mostly = last.extent <= UNROLLED and last.extent * block.rows * block.vectors <= MOST_UNROLLED

        def adjacent(
            from_a: SsaValue, from_b: SsaValue, turn: SsaValue, sums: tuple[SsaValue, ...]
        ) -> tuple[SsaValue, ...]:
            def add(k: SsaValue, own: tuple[SsaValue, ...]) -> tuple[SsaValue, ...]:
                if block.ahead is not None:
                    where, step, each = block.ahead
                    at = emit.op("mul", emit.add(k, turn), step)
                    for q in range(each):
                        place = emit.place("i8", emit.place("i8", where, at), emit.index(q * LINE_BYTES))
                        emit.prefetch(place, locality=2 if self._fetched()[1] else 3)
                a_at = emit.add(from_a, emit.times(k, steps_a[last.name]))
                b_at = emit.add(from_b, emit.times(k, steps_b[last.name]))
                return self._added(block, a_at, b_at, own)

            def several(k: SsaValue, *own: SsaValue) -> tuple[SsaValue, ...]:
                for u in range(UNROLL):
                    own = add(emit.add(k, emit.index(u)), own)
                return own

            if mostly:
                for k in range(last.extent):
                    sums = add(emit.index(k), sums)
                return sums
            whole = last.extent // UNROLL * UNROLL
            sums = emit.loop(emit.index(0), emit.index(whole), UNROLL, several, *sums)
            for k in range(whole, last.extent):
                sums = add(emit.index(k), sums)
            return sums

        def turns(
            axes: Sequence[Axis], from_a: SsaValue, from_b: SsaValue, turn: SsaValue, sums: tuple[SsaValue, ...]
        ) -> tuple[SsaValue, ...]:
            if not axes:
                return adjacent(from_a, from_b, turn, sums)
            axis = axes[0]

            def one(i: SsaValue, *own: SsaValue) -> tuple[SsaValue, ...]:
                a_at = emit.add(from_a, emit.times(i, steps_a[axis.name]))
                b_at = emit.add(from_b, emit.times(i, steps_b[axis.name]))
                done = emit.add(turn, emit.times(i, math.prod(x.extent for x in (*axes[1:], last))))
                return turns(axes[1:], a_at, b_at, done, own)

            return emit.loop(emit.index(0), emit.index(axis.extent), 1, one, *sums)

        zero = emit.index(0)
        sums = turns(outer, zero, zero, zero, start)
        for r in range(block.rows):
            for v in range(block.vectors):
                self._end_sum(block, r, v, sums[r * block.vectors + v])

    def _added(
        self, block: SumBlock, a_at: SsaValue, b_at: SsaValue, sums: tuple[SsaValue, ...]
    ) -> tuple[SsaValue, ...]:
        """Print the multiply-adds of one term."""
        emit, found = self.emit, list(sums)
        columns = [
            self._loaded(
                self.step.b,
                emit.place("float", emit.place("float", block.second, b_at), emit.index(v * self.vector)),
                block,
            )
            for v in range(block.vectors)
        ]
        for r, first in enumerate(block.first):
            x = emit.load("float", 1, emit.place("float", first, a_at), OPERANDS, emit.depth, self._era(self.step.a))
            for v, column in enumerate(columns):
                k = r * block.vectors + v
                found[k] = fused(emit, x, column, found[k])
        return tuple(found)

    def _era(self, at: At) -> int:
        if at.buffer in self.context.given:
            return 0
        self.context.era += 1
        return self.context.era

    def _loaded(self, at: At, place: SsaValue, block: SumBlock) -> SsaValue:
        own = Place(place, self.context.dtypes[at.buffer], "float", self.emit.depth, self._era(at))
        layout = panels(self.context.program.buffer(at.buffer))
        return self.context.memory.load(own, self.lanes, block.mask if layout is None else None)

    def _place_of_sum(self, block: SumBlock, r: int, v: int) -> Place:
        step = even_step(self.rows, self.out.steps)
        if step is None:
            raise refused(f"the rows of buffer {self.step.out.buffer} are not equally far apart")
        row = self.emit.times(self.emit.add(block.row, self.emit.index(r)), step)
        base = self.emit.place("float", self.emit.place("float", self.out.at, row), block.column)
        self.context.era += 1
        place = self.emit.place("float", base, self.emit.index(v * self.lanes))
        return Place(place, self.context.dtypes[self.step.out.buffer], "float", self.emit.depth, self.context.era)

    def _begin(self, block: SumBlock, r: int, v: int) -> SsaValue:
        if self.sums.is_zeroed:
            return constant("float", 0.0, self.lanes)
        return self.context.memory.load(self._place_of_sum(block, r, v), self.lanes, block.mask)

    def _points(self, block: SumBlock, r: int, v: int) -> PointVector:
        emit = self.emit
        assert self.finish is not None
        row = emit.add(block.row, emit.index(r))
        env = {**self.finish.env, "row": row, self.columns.name: emit.add(block.column, emit.index(v * self.lanes))}
        rest, left = row, math.prod(axis.extent for axis in self.rows)
        for axis in self.rows:  # a row number is split into axes like a task number
            left //= axis.extent
            env[axis.name] = emit.index(0) if axis.extent == 1 else self._divided(rest, left) if left > 1 else rest
            rest = rest if axis.extent == 1 or left == 1 else self._rest(row, left)
        env |= {a.name: emit.index(0) for a in self.step.axes if a.extent == 1 and a.name not in env}
        return PointVector(env, self.finish.ranges, self.columns.name, self.lanes, block.mask)

    def _end_sum(self, block: SumBlock, r: int, v: int, sums: SsaValue) -> None:
        if self.finish is not None:
            self.finish.take(sums, self._points(block, r, v), self.step.out.buffer)
        else:
            self.context.memory.store(self._place_of_sum(block, r, v), sums, block.mask)

    def _fetch_out(self, block: SumBlock) -> None:
        """Print the prefetches of the cache lines that a block's results are stored to."""
        if self.finish is None:
            return
        sink = self.finish.pass_.sinks[0]
        for r in range(block.rows):
            for v in range(block.vectors):
                points = self._points(block, r, v)
                index = substitute(sink.index, {}, points.ranges)
                self.emit.prefetch(self.finish.place(sink.buffer, index, points.env).at)
