"""Prints the accumulators and loops of the reductions of a pass."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from korch.primitive.ops.reduce import identity
from korch.primitive.types import DType
from korch.tile.analysis.fetch import FAR_BYTES
from korch.tile.ir.index import ZERO, substitute
from korch.tile.ir.program import Accumulate, Axis, Load, Select, arguments_of
from korch.tile.llvm.arithmetic import KIND
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.index import Env
from korch.tile.llvm.points import PointVector
from korch.tile.llvm.spans import Span, SpanPrinter
from korch.tile.llvm.wide import LANES as WIDE
from korch.tile.lower.buffers import LINE_BYTES

WORD = 4
"""The bytes of a word."""

UNROLL = 4
"""The number of independent accumulators of a reduction."""

SHORT_REDUCTION = 64
"""The maximum points of a reduction that accumulates several vectors at once."""

MOST_JOINED = 256
"""The most points of a reduction of which several rows are reduced at once: more rows are more streams of memory."""

GROUP = 4
"""The float32 elements of the 128 bits within which x86 shuffles fast."""

Sums = tuple[SsaValue, ...]
Step = Callable[[SsaValue, Sums, int], Sums]
Ends = Sequence[tuple[SsaValue, SsaValue]]


class SumPrinter(SpanPrinter):
    """Prints reductions with several independent vector accumulators, which are combined at the end."""

    @property
    def reduced(self) -> list[Axis]:
        """The reduction axes."""
        return [axis for axis in self.pass_.axes if axis.is_reduced]

    @property
    def accumulators(self) -> list[Accumulate]:
        """The sinks."""
        return [sink for sink in self.pass_.sinks if isinstance(sink, Accumulate)]

    def abreast(self, axis: Axis) -> int:
        """Return how many vectors of kept elements a short reduction accumulates at once."""
        points = math.prod(a.extent for a in self.reduced)
        is_long = axis.extent >= UNROLL * self.lanes
        return UNROLL if is_long and points <= SHORT_REDUCTION else 1

    def starts(self, lanes: int, copies: int) -> Sums:
        """Return the first values of some copies of all accumulators."""
        dtypes = [self.context.dtypes[sink.buffer] for sink in self.accumulators]
        pairs = zip(self.accumulators, dtypes, strict=True)
        return tuple(constant(KIND[d], identity(s.op, d), lanes) for s, d in pairs) * copies

    def combined(self, k: int, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the reduction of two numbers of accumulator k."""
        sink = self.accumulators[k]
        return self.context.arithmetic.combine(sink.op, self.context.dtypes[sink.buffer], a, b)

    def added(self, sums: Sums, points: PointVector) -> Sums:
        """Print the accumulation of the values at some points."""
        found, values = list[SsaValue](), self.values(points)
        for k, (sink, total) in enumerate(zip(self.accumulators, sums, strict=True)):
            own = self.combined(k, total, self.emit.splat(values[sink.value], points.lanes))
            found.append(own if points.mask is None else self.emit.select(points.mask, own, total))
        return tuple(found)

    def total(self, sums: Sums, copies: int) -> Sums:
        """Print the reduction of copies of all accumulators."""
        size = len(self.accumulators)
        found = sums[:size]
        for u in range(1, copies):
            own = sums[u * size : (u + 1) * size]
            found = tuple(self.combined(k, a, b) for k, (a, b) in enumerate(zip(found, own, strict=True)))
        return found

    # Vectors of kept elements

    def reduce_lanes(self, vectors: list[PointVector]) -> None:
        """Print the accumulation of whole vectors of kept elements, and their stores."""
        count, inner = len(vectors), self.reduced[-1] if self.reduced else None
        size = len(self.accumulators)
        is_long = inner is not None and inner.extent >= 2 * UNROLL
        copies = UNROLL if count == 1 and is_long and size <= UNROLL else 1
        start = self.starts(vectors[0].lanes, max(count, copies))
        words = self._loads_of_words(vectors)

        def step(env: Env, sums: Sums, copy: int) -> Sums:
            own = list(sums)
            for u, points in enumerate(vectors):
                first = (copy + u) * size
                placed = PointVector({**points.env, **env}, points.ranges, points.variable, points.lanes, points.mask)
                self.squares = {op.name: self._byte_of_words(op, {**vectors[0].env, **env}, u) for op in words}
                own[first : first + size] = self.added(tuple(own[first : first + size]), placed)
            self.squares = {}
            return tuple(own)

        if inner is None:
            sums = step({}, start, 0)
        else:
            ranges, env = vectors[0].ranges, vectors[0].env
            ends = [self.ends(axis, ranges, env) for axis in self.reduced]
            sums = self._loops(self.reduced, ends, start, step, copies)
        sums = self.total(sums, copies) if count == 1 else sums
        for k, sink in enumerate(self.accumulators):
            own = self._interleaved(sums[k::size]) if words else sums[k::size]
            for points, one in zip(vectors, own, strict=True):
                self.store(sink.buffer, sink.index, one, points)

    def _loads_of_words(self, vectors: list[PointVector]) -> tuple[Load, ...]:
        """Return the loads of bytes for which four vectors load one vector of words.

        Byte u of each word belongs to vector u then, so lane i of vector u is element 4 i + u, and widening the bytes
        takes a shift instead of a permutation: on Zen 4, a row of int4 takes 0.91 of the time. The bytes must be
        indices of tables only, and no other value may differ between the elements.
        """
        points = vectors[0]
        if len(vectors) != WORD or points.lanes != WIDE or points.mask is not None or not self.tables:
            return ()
        live, found = self._live(points.ranges), list[Load]()
        direct = {sink.value for sink in self.accumulators}
        direct |= {name for op in live if op.name not in self.tables for name in arguments_of(op)}
        for op in live:
            if isinstance(op, Select):
                return ()
            if not isinstance(op, Load):
                continue
            slope = self.step_of(substitute(op.index, {}, points.ranges), points)
            is_plain = self.all_hold(op.guards, points.ranges) is True
            if is_plain and slope == 1 and op.dtype is DType.U8 and op.name not in direct:
                found.append(op)
            elif not is_plain or slope != 0:
                return ()
        return tuple(found)

    def _byte_of_words(self, op: Load, env: Env, u: int) -> SsaValue:
        """Print the words whose lowest byte is byte `u` of each loaded word."""
        place = self.place(op.buffer, substitute(op.index, {}, self.ranges), env)
        words = self.emit.load("i32", WIDE, place.at, 1, place.floor, place.era)
        return self.emit.op("lshr", words, constant("i32", 8 * u)) if u else words

    def _interleaved(self, sums: Sums) -> Sums:
        """Print four vectors of adjacent elements from four whose lane i of vector u has element 4 i + u."""
        shuffle, half = self.emit.shuffle, WIDE // 2
        low = [i // 2 + i % 2 * WIDE for i in range(WIDE)]
        y = [shuffle(sums[j], sums[j + 1], [n + k for n in low]) for k in (0, half) for j in (0, 2)]
        pairs = [i // 4 * 2 + i % 2 + i % 4 // 2 * WIDE for i in range(WIDE)]
        return tuple(shuffle(y[j], y[j + 1], [n + k for n in pairs]) for j in (0, 2) for k in (0, half))

    def _loops(
        self, axes: Sequence[Axis], ends: Ends, start: Sums, step: Callable[[Env, Sums, int], Sums], copies: int
    ) -> Sums:
        """Print loops over reduced axes, the innermost one with several accumulators."""
        axis, *rest = axes
        begin, end = ends[0]
        if rest:
            cost = self.lines * math.prod(a.extent for a in rest)

            def body(i: SsaValue, *sums: SsaValue) -> Sums:
                return self._loops(
                    rest, ends[1:], sums, lambda env, own, u: step({**env, axis.name: i}, own, u), copies
                )

            return self.emit.loop(begin, end, 1, body, *start, cost=cost)
        return self.unrolled(begin, end, 1, copies, start, lambda i, sums, u: step({axis.name: i}, sums, u))

    def unrolled(self, begin: SsaValue, end: SsaValue, width: int, copies: int, sums: Sums, step: Step) -> Sums:
        """Print a loop over whole vectors, with several independent accumulators."""
        emit = self.emit
        if copies > 1:

            def body(i: SsaValue, *own: SsaValue) -> Sums:
                for u in range(copies):
                    own = step(emit.add(i, emit.index(u * width)), own, u)
                return own

            most = self.whole(begin, end, copies * width)
            sums = emit.loop(begin, most, copies * width, body, *sums)
            begin = most
        size = self.whole(begin, end, width) if width > 1 else end
        return emit.loop(begin, size, width, lambda i, *own: step(i, own, 0), *sums, cost=self.lines)

    # Vectors of reduced elements

    def reduced_width(self) -> int:
        """Return the widest vector along the reduced vector axis."""
        axis = self.vector
        if axis is None:
            return 1
        can_mask = self.can_mask(axis.name, self.ranges)
        return max((self.width(axis, *part, can_mask=can_mask) for part in self.parts(axis)), default=1)

    def _row_sums(self, env: Env) -> tuple[Sums, Sums]:
        """Print the reduction of a row with vectors along it; return the accumulators, and those of single elements."""
        emit, axis, width = self.emit, self.vector, self.reduced_width()
        parts = self.parts(axis) if axis is not None else []
        longest = max((high - low for low, high in parts), default=0)
        copies = UNROLL if longest >= UNROLL * width > UNROLL else 1
        size = len(self.accumulators)
        can_mask = width > 1 and axis is not None and self.can_mask(axis.name, self.ranges)
        rest = self.starts(1, 1) if width > 1 and not can_mask else ()

        def row(env: Env, sums: Sums) -> Sums:
            if axis is None:
                return self.added(sums, PointVector(env, self.ranges))
            for span in self.spans(axis):
                sums = self._part_sums(replace(span, can_mask=can_mask), width, copies, env, sums)
            return sums

        def nest(axes: Sequence[Axis], env: Env, sums: Sums) -> Sums:
            if not axes:
                return row(env, sums)
            begin, end = self.ends(axes[0], self.ranges, env)
            return emit.loop(begin, end, 1, lambda i, *own: nest(axes[1:], {**env, axes[0].name: i}, own), *sums)

        start = self.starts(width, copies)
        sums = nest([a for a in self.reduced if a is not axis], env, (*start, *rest))
        return self.total(sums, copies), sums[copies * size :]

    def _part_sums(self, span: Span, width: int, copies: int, env: Env, sums: Sums) -> Sums:
        emit, size = self.emit, len(self.accumulators)
        axis, low, high, ranges, can_mask = span.axis, span.low, span.high, span.ranges, span.can_mask
        begin, end = self.ends(axis, ranges, env)

        def step(i: SsaValue, own: Sums, u: int, lanes: int = width, mask: SsaValue | None = None) -> Sums:
            points = PointVector({**env, axis.name: i}, ranges, axis.name, lanes, mask)
            found = list(own)
            found[u * size : (u + 1) * size] = self.added(own[u * size : (u + 1) * size], points)
            return tuple(found)

        at = begin
        if can_mask or (width > 1 and self.width(axis, low, high, can_mask=False) == width):
            sums = self.unrolled(begin, end, width, copies, sums, step)
            at = self.whole(begin, end, width)
        if at == end:
            return sums
        if can_mask:
            first, last = at.number, end.number
            if first is not None and last is not None:
                return step(at, sums, 0, mask=self.first(last - first, width)) if first < last else sums
            left = emit.add(end, emit.times(at, -1))
            is_more = emit.test("icmp slt", at, end)
            return emit.branch(is_more, lambda: step(at, sums, 0, mask=self.first(left, width)), lambda: sums)
        single = copies if width > 1 else 0
        return emit.loop(at, end, 1, lambda i, *own: step(i, own, single, 1), *sums)

    def reduce_row(self, env: Env) -> None:
        """Print a reduction with vectors along a reduced axis, whose lanes are combined at the end."""
        sums, rest = self._row_sums(env)
        for k, (sink, total) in enumerate(zip(self.accumulators, sums, strict=True)):
            one = self.context.memory.folded(total, partial(self.combined, k))
            one = self.combined(k, one, rest[k]) if rest else one
            self.store(sink.buffer, sink.index, one, PointVector(env, self.ranges))

    # Vectors of rows

    def can_join(self, axis: Axis) -> bool:
        """Return whether the reductions of adjacent rows along a kept axis can be printed at once."""
        row = self.vector
        if row is None or [row] != self.reduced or row.ragged or len(self.accumulators) > 1 or axis is row:
            return False
        (sink,), lanes = self.accumulators, self.lanes
        guards = [guard for op in self.pass_.ops if isinstance(op, Load | Select) for guard in op.guards]
        is_free = not any({axis.name, row.name} & guard.expr.variables for guard in (*guards, *self.pass_.where))
        is_free &= not any(a.ragged and a.ragged[0] == axis.name for a in self.pass_.axes)
        is_whole = lanes % GROUP == 0 == row.extent % lanes and row.extent <= MOST_JOINED and axis.extent >= lanes
        is_float = self.context.dtypes[sink.buffer] is DType.F32 and self.context.lanes == lanes
        return is_free and is_whole and is_float and sink.index.coefficient(axis.name) == 1

    def reduce_rows(self, axis: Axis, env: Env) -> None:
        """Print the reductions of as many adjacent rows as a vector has lanes, and the store of their vector."""
        row, emit, lanes, (sink,) = self.vector, self.emit, self.lanes, self.accumulators
        assert row is not None
        places = [emit.add(env[axis.name], emit.index(u)) for u in range(lanes)]

        def step(i: SsaValue, *sums: SsaValue) -> Sums:
            own = ({**env, axis.name: place, row.name: i} for place in places)
            vectors = (PointVector(one, self.ranges, row.name, lanes) for one in own)
            return tuple(self.added((total,), points)[0] for total, points in zip(sums, vectors, strict=True))

        start = self.starts(lanes, lanes)
        sums = emit.loop(emit.index(0), emit.index(row.extent), lanes, step, *start, cost=lanes * self.lines)
        self.store(sink.buffer, sink.index, self._folded(sums), PointVector(env, self.ranges, axis.name, lanes))

    def fetch_rows(self, axis: Axis, env: Env) -> None:
        """Print the prefetches of later rows of large buffers, of as many as are reduced at once.

        Each row is read by all other kept axes, so the prefetches are printed outside of their loops.
        """
        row, others = self.vector, {a.name for a in self.pass_.axes if a is not axis and a is not self.vector}
        assert row is not None
        for op in self.pass_.ops:
            if not isinstance(op, Load) or op.buffer not in self.context.large or op.guards:
                continue
            steps = op.index.coefficient(row.name), op.index.coefficient(axis.name)
            if steps != (1, row.extent) or others & op.index.variables:
                continue
            place = self.place(op.buffer, substitute(op.index, {row.name: ZERO}, self.ranges), env)
            for line in range(0, self.lanes * row.extent * place.size_bytes, LINE_BYTES):
                ahead = self.emit.place("i8", place.at, self.emit.index(FAR_BYTES + line))
                self.emit.prefetch(ahead, locality=2)

    def _folded(self, rows: Sums) -> SsaValue:
        """Print the vector of the reductions of the lanes of as many vectors."""
        lanes, half = len(rows), GROUP // 2
        pairs = [[i // GROUP * GROUP + i % GROUP // 2 + i % 2 * lanes for i in range(lanes)]]
        pairs += [[i // GROUP * GROUP + i % 2 + i % GROUP // 2 * lanes for i in range(lanes)]]
        moves = [half, half]
        size = lanes  # the lanes with parts of one group of rows
        while size > GROUP:
            halves = [i for i in range(2 * lanes) if i % size < size // 2]
            pairs, moves, size = [*pairs, halves], [*moves, size // 2], size // 2
        for low, move in zip(pairs, moves, strict=True):
            high = [i + move for i in low]
            pairs_of_rows = zip(rows[::2], rows[1::2], strict=True)
            parts = [[self.emit.shuffle(a, b, order) for order in (low, high)] for a, b in pairs_of_rows]
            rows = tuple(self.combined(0, *part) for part in parts)
        return rows[0]
