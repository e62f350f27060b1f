"""Prints the loop nest of a pass of a tile program."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from korch.tile.ir.index import Var, substitute
from korch.tile.ir.passes import turns_on
from korch.tile.ir.program import Accumulate, Axis, Inside, Load, Sink
from korch.tile.llvm.emit import SHORT_LINES, UNROLLED_TURNS, SsaValue, constant
from korch.tile.llvm.index import Env, end_of
from korch.tile.llvm.points import PointVector
from korch.tile.llvm.reduce import SumPrinter
from korch.tile.lower.loops import ALIASED_ELEMENTS, LINE_ELEMENTS, is_across, side_of

ALIASED_SIDE = 8
"""The maximum rows written together if they map to the same L1 sets: a number that these sets can hold."""

FOUR = 4
"""The vectors of a square that are transposed together."""

UNROLLED_OPERATIONS = 12
"""The maximum operations of a square whose code is unrolled."""

UNROLLED_EXTENT = 4
"""Loops of at most this extent are unrolled if a guard depends on them."""

At = Callable[[SsaValue], None]


class NestPrinter(SumPrinter):
    """Prints the loop nest of one pass."""

    def run(self) -> None:
        """Print the loop nest."""
        kept = [a for a in self.pass_.axes if not a.is_reduced]
        self.across = next((a for a in kept if a.name == self.pass_.across), None)
        self.side = self._side(self.across) if self.across is not None else 1
        self.joined: Axis | None = None  # the axis along which adjacent rows are reduced at once
        if any(axis.extent == 0 for axis in kept):
            return
        outer = [a for a in kept if a is not self.vector and a is not self.across]
        self._where(outer, self.pass_.where, self.env)

    def _where(self, outer: Sequence[Axis], where: Sequence[Inside], env: Env) -> None:
        """Print guards of the pass outside the loops that they do not depend on, then these loops."""
        inner = {axis.name for axis in outer} | {self.pass_.vector, self.pass_.across}
        ready = [guard for guard in where if not guard.expr.variables & inner]
        if not ready:
            self._nest(outer, where, env)
        elif self.all_hold(ready, self.ranges) is not False:
            rest = [guard for guard in where if guard not in ready]
            condition = self.condition(ready, PointVector(env, self.ranges))
            before, self.decided = self.decided, self.decided.union(ready)
            self.emit.branch(condition, lambda: self._where(outer, rest, env))
            self.decided = before

    def _nest(self, outer: Sequence[Axis], where: Sequence[Inside], env: Env) -> None:
        """Print the kept loops, outermost first, then their body."""
        if not outer:
            self._inside(env)
            return
        axis, *rest = outer
        if axis.extent <= UNROLLED_EXTENT and axis.ragged is None and turns_on(self.pass_, axis.name):
            before = self.ranges
            for value in range(axis.extent):  # guards are decided for each value
                self.ranges = {**before, axis.name: (value, value)}
                self._where(rest, where, {**env, axis.name: self.emit.index(value)})
            self.ranges = before
            return
        begin, end = self.emit.index(0), end_of(self.emit, axis, axis.extent, env)
        if self.joined is None and self.can_join(axis):
            whole = self.whole(begin, end, self.lanes)
            self.joined = axis

            def joined(i: SsaValue) -> None:
                self.fetch_rows(axis, {**env, axis.name: i})
                self._where(rest, where, {**env, axis.name: i})

            self.emit.loop(begin, whole, self.lanes, joined)
            begin, self.joined = whole, None
        self.emit.loop(begin, end, 1, lambda i: self._where(rest, where, {**env, axis.name: i}), cost=self._cost(rest))

    def _cost(self, rest: Sequence[Axis]) -> int:
        points = self.lines
        for axis in (*rest, *(a for a in self.pass_.axes if a.name in (self.pass_.vector, self.pass_.across))):
            points *= max(1, axis.extent // (self.lanes if axis is self.vector else 1))
        return points * (UNROLLED_EXTENT if self.reduced else 1)

    def _inside(self, env: Env) -> None:
        """Print the loops over vectors."""
        if self.across is not None:
            self._squares(self.across, env)
        elif not self.pass_.is_reduction:
            self.over(self.vector, env, self._stores)
        elif self.joined is not None:
            self.reduce_rows(self.joined, env)
        elif self.vector is None or self.vector.is_reduced:
            self.reduce_row(env)
        else:
            self.over(self.vector, env, self.reduce_lanes, self.abreast(self.vector))

    # Stores

    def _stores(self, vectors: list[PointVector]) -> None:
        for points in vectors:
            self.compute_and_store(points)

    def compute_and_store(self, points: PointVector) -> None:
        """Print the operations at some points, and their stores."""
        values = self.values(points)
        for sink in self.pass_.sinks:
            self.store(sink.buffer, sink.index, values[sink.value], points, streams=self.streams(sink))

    @property
    def is_streamed(self) -> bool:
        """Whether anything is written past the caches."""
        return any(map(self.streams, self.pass_.sinks))

    def streams(self, sink: Sink) -> bool:
        """Return whether whole cache lines are written past the caches: all rows begin at boundaries of lines."""
        axis = self.vector
        if axis is None or sink.buffer not in self.context.streamed or isinstance(sink, Accumulate):
            return False
        if self.pass_.across and self.context.lanes < LINE_ELEMENTS:
            return False
        others = [step for atom, step in sink.index.terms if atom != Var(axis.name)]
        begins_lines = all(step % LINE_ELEMENTS == 0 for step in (sink.index.constant, *others))
        return begins_lines and substitute(sink.index, {}, self.ranges).coefficient(axis.name) == 1

    # Squares

    def _side(self, across: Axis) -> int:
        side = side_of(across.extent, self.context.lanes)
        steps = [sink.index.coefficient(across.name) or 0 for sink in self.pass_.sinks]
        is_aliased = self.pass_.axes[-1] is not across and not any(s % ALIASED_ELEMENTS for s in steps)
        return min(side, ALIASED_SIDE) if is_aliased and not self.is_streamed else side

    def _squares(self, across: Axis, env: Env) -> None:
        """Print the loops over both axes of squares, in the order of the pass."""

        def placed(points: PointVector, at: SsaValue) -> PointVector:
            return replace(points, env={**points.env, across.name: at})

        if self.pass_.axes[-1] is across:
            self.over(
                self.vector,
                env,
                lambda vectors: self._sides(
                    across,
                    vectors[0].env,
                    lambda at: self._square_stores(placed(vectors[0], at)),
                    lambda at: self.compute_and_store(placed(vectors[0], at)),
                ),
            )
            return
        self._sides(
            across,
            env,
            lambda at: self.over(self.vector, {**env, across.name: at}, lambda v: self._square_stores(v[0])),
            lambda at: self.over(self.vector, {**env, across.name: at}, lambda v: self.compute_and_store(v[0])),
        )

    def _sides(self, axis: Axis, env: Env, square: At, single: At) -> None:
        """Print the loop over an axis in steps of a square's side; the last step may overlap."""
        emit, side = self.emit, self.side
        limit = end_of(self.emit, axis, axis.extent, env)

        def squares() -> None:
            last = emit.add(limit, emit.index(-side))
            emit.loop(emit.index(0), limit, side, lambda at: square(emit.least(at, last)))

        def singles() -> None:
            emit.loop(emit.index(0), limit, 1, single)

        if side == 1:
            singles()
        elif axis.ragged is None:
            squares()
        else:
            emit.branch(emit.test("icmp sge", limit, emit.index(side)), squares, singles)

    def _square_stores(self, points: PointVector) -> None:
        """Print the loads of the squares that begin at a point of the across axis, and the stores of their vectors.

        Four vectors of each square are loaded at a time, which fit in registers.
        """
        across, emit = self.pass_.across, self.emit
        live, first = self._live(points.ranges), points.env[across]
        loads = [op for op in live if isinstance(op, Load) and self.all_hold(op.guards, points.ranges) is not False]
        squares = [op for op in loads if is_across(op, points.variable, across, points.ranges)]

        def four(side: SsaValue) -> None:
            vectors = {op.name: self._square(op, points, side) for op in squares}
            for i in range(FOUR):
                self.squares = {name: own[i] for name, own in vectors.items()}
                at = emit.add(first, emit.add(side, emit.index(i)))
                self.compute_and_store(replace(points, env={**points.env, across: at}))
            self.squares = {}

        cost = SHORT_LINES // UNROLLED_TURNS if len(live) <= UNROLLED_OPERATIONS else SHORT_LINES
        emit.loop(emit.index(0), emit.index(self.side), FOUR, four, cost=cost)

    def _square(self, op: Load, points: PointVector, side: SsaValue) -> Sequence[SsaValue]:
        """Print the loads of vectors of a square, the first one at `side`."""
        index, emit = substitute(op.index, {}, points.ranges), self.emit
        step, kind = index.coefficient(points.variable) or 0, self.context.kinds[op.buffer]

        def load() -> list[SsaValue]:
            place = self.place(op.buffer, index, points.env)
            return self.memory.square(replace(place, at=emit.place(kind, place.at, side)), points.lanes, step)

        zeros = [constant(kind, 0, points.lanes)] * FOUR
        return emit.branch(self.condition(op.guards, points), load, lambda: zeros)
