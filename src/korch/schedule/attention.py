"""Attention -> tile programs: softmax(f(q k)) v, a block of rows at a time.

A task computes the scores of a block of rows and a block of keys in a tile, replaces them by their exponentials
(the weights), and multiplies the weights by the values. If there are several blocks of keys, either a loop goes
over them and rescales a row's results when a later block has a larger maximum, or each block is a task of its own
and a second stage combines the results. Keys and values are packed in panels by the task that reads them or by an
earlier stage; for few rows they are read in place. Rows of heads that share keys and values are rows of one block.

Source: the online softmax of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from korch.candidate.candidate import Group
from korch.primitive.types import DType
from korch.ranges.live import count_of, rounded
from korch.schedule.blocks import Blocked, arranged, cut, direct, factored, fill, flat, spaced, store
from korch.schedule.contraction import Layouts, NotFusedError, extent
from korch.schedule.heads import Attention, contractions_of, emit_score
from korch.schedule.softmax import SoftmaxRows
from korch.system.alignment import round_up
from korch.tile.analysis.registers import usual_registers
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, scale, var
from korch.tile.ir.passes import needed
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Panels,
    Pass,
    Product,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
)
from korch.tile.lower.emit import Emitter
from korch.tile.lower.staging import Machine

STRIP_VECTORS = 2
"""Vectors of columns that the contraction's kernel reads together."""

PACKED_KEYS = 32
"""Keys that one task packs if a separate stage packs them."""


class Packing(Enum):
    """Who packs keys and values in panels: nobody, the task itself or an earlier stage. SPLIT is for matrix units."""

    NONE = "read"
    TASK = "task"
    STAGE = "stage"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class AttentionBlocking:
    """How attention is cut into tasks."""

    rows: int  # rows of a block
    keys: int  # keys of a block; all keys if there are no more than that
    packing: Packing  # who packs keys and values
    is_split: bool = False  # whether each block of keys is a task of its own, not an iteration of a loop
    chunks: int = 1  # tasks among which the rows of one head are divided, if tasks pack keys and values


class Attentions:
    """What all attention programs of a group have in common."""

    def __init__(self, group: Group, found: Attention, layouts: Layouts, machine: Machine) -> None:
        """Prepare the two products.

        Raises:
            NotFusedError: the operations around the products can't be fused with them.
        """
        scores, mixed = contractions_of(group, found, layouts)
        self.found, self.machine = found, machine
        self.scores = Blocked(group, found.first, layouts, scores)
        self.mixed = Blocked(group, found.second, layouts, mixed)
        self.tasks, self.rows, self.keys = extent(scores.batch), extent(scores.rows), extent(scores.columns)
        self.terms, self.columns = extent(scores.terms), extent(mixed.columns)
        self.packed_bytes = 4 * self.keys * (self.terms + self.columns)


class AttentionBuilder:
    """One program: its axes, and the buffers that its steps need."""

    product = Product.F32

    def __init__(self, given: Attentions, blocking: AttentionBlocking) -> None:
        self.scores, self.mixed, self.found = given.scores, given.mixed, given.found
        self.blocking, self.batch = blocking, given.scores.batch
        self.lanes = given.machine.lanes
        self.strip = STRIP_VECTORS * self.lanes
        self.m, self.n = given.rows, given.keys
        self.terms, self.columns = extent(self.scores.contraction.terms), extent(self.mixed.contraction.columns)
        self.gm, self.i = cut(self.m, min(blocking.rows, self.m), ("gm", "i"))
        self.row = flat(self.gm, self.i)
        block = round_up(min(blocking.keys, self.n), self.strip)
        self.h, self.j = cut(self.n, block, ("h", "j"))
        padded = rounded(self.n, self.lanes)
        is_ragged = padded % block or count_of(padded)
        self.whole = Axis("j", block, ragged=("h", padded) if is_ragged else None)
        if self.h.extent == 1:
            self.j, self.whole = Axis("j", self.n), Axis("j", padded)
        self.is_split = blocking.is_split and self.h.extent > 1
        self.is_online = not blocking.is_split and self.h.extent > 1
        self.is_staged = blocking.packing is Packing.STAGE and not self.is_split
        self.d, self.c = Axis("d", self.terms), Axis("c", self.columns)
        self.made: dict[str, Buffer] = {}
        self.factor: Sequence[TileOp] = ()  # what computes the factor of each key's values, if they are read in place
        self.step = spaced(block)
        self.softmax = SoftmaxRows(self.i, given.found.is_guarded, self.is_online or self.is_split)
        outer, key = self._packed_keys
        axes = (*self.batch, self.gm, self.i, self.h, self.j, self.d, self.c, outer, key)
        self.ranges: Ranges = {axis.name: (0, axis.extent - 1) for axis in axes}

    # Axes and buffers

    def values(self, blocked: Blocked, is_second: bool = False, key: Expr | None = None) -> dict[str, Expr]:
        """Return the variables of a contraction, expressed in the variables of the program.

        `is_second`: whether they index the second operand, which is the same for all rows. `key`: the number of the
        key, if it is not that of the current block.
        """
        row = ZERO if is_second else self.row
        key = key or flat(self.h, self.j)
        flats = (row, key, var("d")) if blocked is self.scores else (row, var("c"), key)
        return blocked.values(flats, self.ranges)

    @property
    def matrix(self) -> Expr:
        """The number of a task's head among all heads."""
        number = ZERO
        for axis in self.batch:
            number = add(scale(number, axis.extent), var(axis.name))
        return number

    @property
    def matrices(self) -> int:
        """How many heads have keys of their own."""
        return math.prod(axis.extent for axis in self.batch)

    def make(self, name: str, elements: int, level: Level = Level.TILE, layout: tuple[Panels, ...] = ()) -> str:
        """Return the name of a buffer, which is created if it does not exist."""
        self.made.setdefault(name, Buffer(name, level, DType.F32, elements, layout))
        return name

    def of_row(self, name: str) -> At:
        """Return the element of a row in a tile with one number per row."""
        return At(self.make(name, self.i.extent), var("i"))

    @property
    def score(self) -> At:
        """The element that holds a score."""
        return At(self.make("s", self.i.extent * self.step), add(scale(var("i"), self.step), var("j")))

    # The program

    def program(self) -> TileProgram:
        """Return the program.

        Raises:
            NotFusedError: the operations around the products can't be fused with them.
        """
        keys, values, packs = self._operands()
        if packs and not self.is_staged and not self.is_split:
            chunk = Axis("ch", self.blocking.chunks)
            steps = [*packs, *self._in_turns(chunk, keys, values)]
            stages = [Stage((*self.batch, chunk, *self._packed_axes()), tuple(steps))]
        else:
            packing = [Stage((*self.batch, *self._packed_axes()), tuple(packs))] if packs and self.is_staged else []
            grid = [*self.batch, self.gm, *([self.h] if self.is_split else [])]
            grid += [] if self.is_staged else self._packed_axes()
            steps = [*([] if self.is_staged else packs), *self._block(keys, values)]
            stages = [*packing, Stage(tuple(grid), tuple(steps))]
        if self.is_split:
            stages.append(Stage((*self.batch, self.gm), tuple(self._combine())))
        return TileProgram((*self.scores.memory(), *self.made.values()), tuple(stages))

    def _in_turns(self, chunk: Axis, keys: At | None, values: At) -> list[Step]:
        """Return the steps for a chunk of rows: as many full blocks as in every chunk, then a share of the rest."""
        rows = rows_of_block(self.m, chunk.extent, self.blocking.rows)
        if count_of(self.m) and chunk.extent == 1:
            turns, i = cut(self.m, rows, ("gm", "i"))
            return [Loop(turns, (), tuple(self._of(i, flat(turns, i), turns, chunk)._block(keys, values)))]
        turns = Axis("gm", self.m // (rows * chunk.extent))
        first = scale(_point(chunk), turns.extent * rows)
        whole = self._of(Axis("i", rows), add(first, scale(_point(turns), rows), var("i")), turns, chunk)
        steps: list[Step] = [Loop(turns, (), tuple(whole._block(keys, values)))]
        left = self.m - turns.extent * rows * chunk.extent
        if left:
            size = -(-left // chunk.extent)
            i = Axis("i", size, ragged=("ch", left) if left % size else None)
            number = add(constant(self.m - left), scale(_point(chunk), size), var("i"))
            steps += self._of(i, number, chunk)._block(keys, values)
        return steps

    def _of(self, i: Axis, row: Expr, *around: Axis) -> AttentionBuilder:
        """Return a builder for some rows, given their loop, the number of a row and the enclosing axes."""
        own = copy.copy(self)
        own.i, own.row, own.softmax = i, row, replace(self.softmax, axis=i)
        own.ranges = {**self.ranges, **{axis.name: (0, axis.extent - 1) for axis in (i, *around)}}
        return own

    def _block(self, keys: At | None, values: At) -> list[Step]:
        """Return the steps for a block of rows."""
        softmax = self.softmax
        queries, copy = self._queries(keys)
        steps: list[Step] = [*copy]
        sums = At(self.make("y", self.i.extent * self.columns), add(scale(var("i"), self.columns), var("c")))
        zero = fill((self.i, self.c), sums, 0.0)
        weigh = [*self._scores(queries, keys), softmax.largest(self.score, self.whole, self._top)]
        weights, more = self._weights()
        axes = (self.i, self.c, replace(self.j, is_reduced=True))
        registers = None
        if self.blocking.packing is Packing.NONE:  # values come from memory
            registers = replace(usual_registers(self.lanes), fetches_b=True)
        mix = Contract(axes, sums, weights, values, self.product, registers=registers)
        if self.is_online:
            carried = ("top", "total", "y")
            before = [fill((self.i,), self.of_row("top"), -math.inf), fill((self.i,), self.of_row("total"), 0.0)]
            body = [*weigh, *softmax.rescaled(self.of_row)]
            body += [softmax.weights(self.score, self.whole, self.of_row("base"))]
            body += [softmax.sums(self.score, self.whole, self.of_row("part")), *softmax.carried(self.of_row)]
            body += [replace(mix, rescale=self.of_row("factor"))]
            return [
                *steps,
                *before,
                zero,
                Loop(self.h, carried, tuple(body)),
                *self._finish(sums, self.of_row("total")),
            ]
        base = self._top
        steps += weigh
        if softmax.has_base:
            steps.append(softmax.base(self._top, self.of_row("base")))
            base = self.of_row("base")
        total = self._partial("wl") if self.is_split else self.of_row("total")
        steps += [softmax.weights(self.score, self.whole, base), softmax.sums(self.score, self.whole, total)]
        if not self.is_split:
            inverse = softmax.inverted(total, self.of_row("inverse"))
            return [*steps, inverse, *more, zero, mix, self._outputs(sums)]
        copied = Pass((self.i, self.c), "c", (Load("x0", DType.F32, "y", sums.index),), (store(self._part, "x0"),))
        return [*steps, *more, zero, mix, copied]

    def _finish(self, sums: At, total: At) -> list[Step]:
        return [self.softmax.inverted(total, self.of_row("inverse")), self._outputs(sums)]

    def _outputs(self, sums: At) -> Pass:
        axes = (self.i, self.c)
        return self.mixed.after(sums, axes, self.values(self.mixed), self.ranges, self.of_row("inverse"))

    # Scores

    def _scores(self, queries: At | None, keys: At | None) -> list[Step]:
        """Return the steps that compute the scores f(q k) of a block, with -infinity beyond the last key."""
        axes, d = (self.i, self.j), replace(self.d, is_reduced=True)
        product = At(self.make("t", self.i.extent * self.step), self.score.index)
        steps: list[Step] = []
        if self.n % self.lanes:  # whole vectors reach beyond the last key
            last = self.n - (self.h.extent - 1) * self.j.extent
            tail = Axis("w", self.lanes)
            at = add(scale(var("i"), self.step), var("w"), constant(last // self.lanes * self.lanes))
            steps.append(fill((self.i, tail), At("s", at), -math.inf))
        if queries is not None and keys is not None:
            steps += [fill(axes, product, 0.0), Contract((*axes, d), product, queries, keys, self.product)]
        else:
            steps += self._dots(product, d)

        def weighed(emitter: Emitter, result: str) -> list[Store]:
            return [store(self.score, emit_score(emitter, self.found, self.scores.contraction, result))]

        steps.append(self.scores.following(product, axes, (self.values(self.scores), self.ranges), weighed))
        return steps

    def _dots(self, product: At, d: Axis) -> list[Pass]:
        """Return the passes that multiply queries by keys, both read in place, and by a factor of each key."""
        emitter = self.scores.fusion.emitter(self.ranges)
        a, b = (self.scores.argument(emitter, side, self.values(self.scores, side == 1)) for side in (0, 1))
        b, factor = factored(emitter.ops, b, "d")
        name = f"x{len(emitter.ops)}"
        ops = (*needed(emitter.ops, a, b), Apply(name, DType.F32, "mul", (a, b)))
        is_along = all(op.index.coefficient("d") in (0, 1) for op in ops if isinstance(op, Load))
        vector = "d" if is_along and d.extent > 1 else "j"
        sums = (Accumulate(product.buffer, product.index, name, "sum"),)
        # All rows read a few keys while these are in the first cache.
        return [Pass((self.j, self.i, d), vector, ops, sums), *self._multiplied(product, factor)]

    def _multiplied(self, at: At, factor: Sequence[TileOp]) -> list[Pass]:
        """Return the pass that multiplies a number of each row and key by what some operations compute, if any."""
        if not factor:
            return []
        ops = (
            Load("given", DType.F32, at.buffer, at.index),
            *factor,
            Apply("product", DType.F32, "mul", ("given", factor[-1].name)),
        )
        return [Pass((self.i, self.j), "j", ops, (store(at, "product"),))]

    def _queries(self, keys: At | None) -> tuple[At | None, list[Pass]]:
        """Return where a contraction reads the queries, and the pass that copies them if they aren't read in place."""
        if keys is None:
            return None, []
        emitter = self.scores.fusion.emitter(self.ranges)
        value, axes = self.scores.argument(emitter, 0, self.values(self.scores)), (self.i, self.d)
        at = direct(emitter.ops, axes, can_widen=False)
        if at is not None:
            return at, []
        row = spaced(self.terms)
        copy = At(self.make("pq", self.i.extent * row), add(scale(var("i"), row), var("d")))
        pass_ = Pass(axes, "d", tuple(emitter.ops), (store(copy, value),))
        return copy, [arranged(pass_, self.ranges, self.lanes)]

    def _weights(self) -> tuple[At, list[Pass]]:
        """Return where a contraction reads the weights, and the passes that prepare them."""
        return self.score, self._multiplied(self.score, self.factor)

    # Keys and values

    def _operands(self) -> tuple[At | None, At, list[Pass]]:
        """Return where keys and values are read, and the passes that pack them."""
        is_read = self.blocking.packing is Packing.NONE
        keys, packs = (None, []) if is_read else self._packed(self.scores, "pk")
        if is_read:
            emitter = self.mixed.fusion.emitter(self.ranges)
            value = self.mixed.argument(emitter, 1, self.values(self.mixed, True))
            value, self.factor = factored(emitter.ops, value, "c")
            at = direct(needed(emitter.ops, value), (self.j, self.c), can_widen=True)
            if at is not None and (at.index.coefficient("c") == 1 or self.columns == 1):
                return None, at, []
            raise NotFusedError("the values are not read where they lie")
        values, more = self._packed(self.mixed, "pv")
        return keys, values, [*packs, *more]

    def _packed_axes(self) -> list[Axis]:
        """Return the grid axes along which the packing passes are divided."""
        if self.blocking.packing in (Packing.NONE, Packing.SPLIT):
            return []
        return [*([] if self.is_split else [self._packed_keys[0]]), Axis("gc", 1)]

    @cached_property
    def _packed_keys(self) -> tuple[Axis, Axis]:
        """The block axis and the inner axis of the keys to pack; a separate packing stage has several blocks."""
        if self.is_split:
            return self.h, self.j
        block = round_up(self.n, self.strip)
        return cut(self.n, min(block, PACKED_KEYS) if self.is_staged else block, ("gp", "jp"))

    @property
    def _wide(self) -> int:
        return round_up(self.columns, self.lanes)

    def _packed(self, blocked: Blocked, name: str) -> tuple[At, list[Pass]]:
        """Return where keys or values are read in panels, and the pass that packs them."""
        outer, key = self._packed_keys
        count = key.extent if self.is_split else round_up(self.n, self.strip)
        is_keys = blocked is self.scores
        rows, row = (self.terms, count) if is_keys else (count, self._wide)
        width = self.strip if row % self.strip == 0 else self.lanes
        level = Level.WORKSPACE if self.is_staged else Level.TILE
        first = scale(self.matrix, rows) if self.is_staged else ZERO
        self.make(name, (self.matrices if self.is_staged else 1) * rows * row, level, (Panels(row, width),))

        def place(at: Expr) -> At:
            pair = (var("d"), at) if is_keys else (at, var("c"))
            return At(name, add(scale(add(first, pair[0]), row), pair[1]))

        number = flat(outer, key)
        emitter = blocked.fusion.emitter(self.ranges)
        value = blocked.argument(emitter, 1, self.values(blocked, True, number))
        column = Axis("c", row, ragged=("gc", self.columns) if row != self.columns else None)
        axes = (self.d, key) if is_keys else (key, column)
        at = place(var(key.name) if self.is_split else number)
        packing = Pass(axes, axes[1].name, tuple(emitter.ops), (store(at, value),))
        read = place(var("j") if self.is_split else flat(self.h, self.j))
        return read, [arranged(packing, self.ranges, self.lanes)]

    # Tasks for blocks of keys

    @property
    def _task(self) -> Expr:
        """The number of a task among all tasks: one for each head, block of rows and block of keys."""
        block = add(scale(self.matrix, self.gm.extent), var("gm") if self.gm.extent > 1 else ZERO)
        return add(scale(block, self.h.extent), var("h"))

    @property
    def _top(self) -> At:
        """Where the largest score of a row is stored."""
        return self._partial("wt") if self.is_split else self.of_row("most")

    def _partial(self, name: str) -> At:
        rows = self.i.extent
        self.make(name, self.matrices * self.gm.extent * self.h.extent * rows, Level.WORKSPACE)
        return At(name, add(scale(self._task, rows), var("i")))

    @property
    def _part(self) -> At:
        """Where the sum of a row and column over one block of keys is stored."""
        row = self._partial("wt").index
        self.make("wy", self.made["wt"].size * self.columns, Level.WORKSPACE)
        return At("wy", add(scale(row, self.columns), var("c")))

    def _combine(self) -> list[Step]:
        """Return the steps that combine the results of the tasks that compute one block of rows."""
        softmax, h = self.softmax, replace(self.h, is_reduced=True)
        factors = At(self.make("f", self.i.extent * self.h.extent), add(scale(var("i"), self.h.extent), var("h")))
        sums = At(self.make("y", self.i.extent * self.columns), add(scale(var("i"), self.columns), var("c")))
        largest, total = self.of_row("most"), self.of_row("total")
        return [
            softmax.largest(self._partial("wt"), self.h, largest),
            softmax.base(largest, self.of_row("base")),
            softmax.weights(self._partial("wt"), self.h, self.of_row("base"), factors),
            _products((self.i, h), factors, self._partial("wl"), total),
            _products((self.i, self.c, h), factors, self._part, sums),
            *self._finish(sums, total),
        ]


def rows_of_block(rows: int, chunks: int, most: int) -> int:
    """Return the number of rows of a block such that all chunks get about the same number of rows.

    Raises:
        NotFusedError: a chunk would have no rows.
    """
    most = max(1, min(most, rows // chunks))

    def cost(block: int) -> float:
        blocks, left = divmod(rows, block * chunks)
        last = -(-left // chunks)
        is_uneven = left > 0 and (chunks - 1) * last >= left
        return math.inf if is_uneven else blocks * (block + 1) + last + (left > 0)

    best = min(range(most, most // 2, -1), key=cost)
    if rows < chunks or cost(best) == math.inf:
        raise NotFusedError("there are too few rows for the chunks")
    return best


def _point(axis: Axis) -> Expr:
    return var(axis.name) if axis.extent > 1 else ZERO


def _products(axes: tuple[Axis, ...], a: At, b: At, total: At) -> Pass:
    """Return the pass that sums products."""
    ops = (
        Load("x0", DType.F32, a.buffer, a.index),
        Load("x1", DType.F32, b.buffer, b.index),
        Apply("x2", DType.F32, "mul", ("x0", "x1")),
    )
    return Pass(axes, axes[-2].name, ops, (Accumulate(total.buffer, total.index, "x2", "sum"),))
