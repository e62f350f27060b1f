"""The reference semantics of a tile program: an interpreter in NumPy.

The tasks of a stage run in a random order, in batches, so that a program whose result depends on the
order of tasks gives a different result. The tasks of a batch run their steps together, one step after
another. A tile is an array with one row per task. It holds unknown numbers before it is written and,
unless a loop carries it, at the start of each iteration.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import numpy as np

from korch.primitive.op import Array
from korch.tile.check.arithmetic import Typed
from korch.tile.check.points import Points
from korch.tile.ir.bind import bind
from korch.tile.ir.index import Expr, var
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    Buffer,
    Contract,
    Inside,
    Level,
    Literal,
    Load,
    Loop,
    Panels,
    Pass,
    Select,
    Stage,
    Step,
    TileProgram,
    written_by,
)
from korch.tile.ir.sort import Ordering, Sort, first_places

MOST_TURNS = 8
"""The maximum number of batches in which the tasks of a stage run: NumPy is slow for single tasks."""


def run_program(
    program: TileProgram,
    inputs: Sequence[Array],
    seed: int = 0,
    arithmetic: Typed | None = None,
    parameters: Mapping[str, int] | None = None,
) -> list[Array]:
    """Run a program on flat input arrays; return the flat output arrays.

    Output elements that no store writes are zero.

    `arithmetic`: the arithmetic to compute with; by default that of the program's types.

    Raises:
        IndexError: an access leaves its buffer.
    """
    return _Run(bind(program, parameters or {}), inputs, seed, arithmetic or Typed()).run()


class _Run:
    """The memory and tiles of one run."""

    def __init__(self, program: TileProgram, inputs: Sequence[Array], seed: int, arithmetic: Typed) -> None:
        self.program, self.arithmetic = program, arithmetic
        self.rng = np.random.default_rng(seed)
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.memory: dict[str, Array] = {}
        given = iter(inputs)
        for buffer in program.buffers:
            kind = arithmetic.array_type(buffer.dtype)
            if buffer.level is Level.INPUT:
                self.memory[buffer.name] = next(given).reshape(-1).astype(kind)
            elif buffer.level is not Level.TILE:
                self.memory[buffer.name] = np.zeros(buffer.size, kind)

    def run(self) -> list[Array]:
        for stage in self.program.stages:
            for buffer in self.program.buffers:
                if buffer.level is Level.TILE:
                    self.memory[buffer.name] = self.arithmetic.unknown(buffer.dtype, stage.tasks * buffer.size)
            if stage.sort is not None:
                self.sort(stage.sort)
            order = self.rng.permutation(stage.tasks)
            for tasks in np.array_split(order, max(1, min(MOST_TURNS, stage.tasks))):
                with np.errstate(all="ignore"):
                    self.steps(stage, stage.steps, tasks, {})
        return [self.memory[b.name] for b in self.program.buffers if b.level is Level.OUTPUT]

    def steps(self, stage: Stage, steps: Sequence[Step], tasks: Array, fixed: Mapping[str, int]) -> None:
        """Run steps of some tasks while the enclosing loops have the values `fixed`."""
        for step in steps:
            match step:
                case Pass():
                    points = Points(stage.grid, step.axes, tasks, fixed)
                    points.live = points.live & points.holds(step.where)
                    _PassRun(self, step, points).run()
                case Contract():
                    self.contract(step, Points(stage.grid, step.axes, tasks, fixed))
                case Loop(axis, carried, body, only, is_nearest):
                    lost = sorted(written_by(body) - {*carried})
                    live = Points(stage.grid, (axis,), tasks, fixed)
                    runs = live.spread(live.live)
                    if only is not None:
                        turn_of = live.spread(self.load(live, only.buffer, only.index, ()))
                        if is_nearest:
                            turn_of = np.clip(np.where(turn_of < 0, turn_of + axis.extent, turn_of), 0, axis.extent - 1)
                        runs = runs & (turn_of == np.arange(axis.extent))
                    for turn in range(axis.extent):
                        self.forget(lost, tasks)
                        if runs[:, turn].any():
                            self.steps(stage, body, tasks[runs[:, turn]], {**fixed, axis.name: turn})
                    self.forget(lost, tasks)
                case _:
                    assert_never(step)

    def sort(self, step: Ordering) -> None:
        """Run a sort, which writes the rows of each block, or a `Top`, which writes the first elements of each row."""
        if not isinstance(step, Sort):
            given = self.memory[step.source].reshape(step.rows, step.size)
            places = first_places(given, step.count, step.is_largest)
            for name, found in ((step.values, np.take_along_axis(given, places, 1)), (step.places, places)):
                if name:
                    self.memory[name][:] = found.reshape(-1)
            return
        keys = self.memory[step.keys].astype(np.int64)
        keys = np.clip(np.where(keys < 0, keys + step.groups, keys), 0, step.groups - 1)
        for name, fill in ((step.order, -1), (step.group, -1), (step.count, 0)):
            self.memory[name][:] = fill
        block = 0
        for group in range(step.groups):
            rows = np.flatnonzero(keys == group)
            for first in range(0, len(rows), step.block):
                own = rows[first : first + step.block]
                self.memory[step.order][block * step.block :][: len(own)] = own
                self.memory[step.group][block], self.memory[step.count][block] = group, len(own)
                block += 1

    def forget(self, names: Sequence[str], tasks: Array) -> None:
        """Overwrite some tiles of some tasks with unknown numbers."""
        for buffer in (self.buffers[name] for name in names):
            if buffer.level is Level.TILE and buffer.size:
                unknown = self.arithmetic.unknown(buffer.dtype, len(tasks) * buffer.size)
                self.memory[buffer.name].reshape(-1, buffer.size)[tasks] = unknown.reshape(-1, buffer.size)

    def contract(self, step: Contract, points: Points) -> None:
        kept, points.live = points.kept(), points.live & points.holds(step.where)
        a, b = (points.spread(self.load(points, at.buffer, at.index, ())) for at in (step.a, step.b))
        if step.part:
            (bits,) = (8 // axis.extent for axis in step.axes if axis.name == step.part)
            b = b >> (bits * points.spread(points.at(var(step.part)))).astype(b.dtype) & ((1 << bits) - 1)
        dtype, reduced = step.product.types[2], tuple(range(len(kept.shape), len(points.shape)))
        products = self.arithmetic.product(step.product, a, b)
        if step.factor is not None:
            factor = points.spread(self.load(points, step.factor.buffer, step.factor.index, ()))
            products = self.arithmetic.multiply(products, factor)
        total = self.arithmetic.collect("sum", dtype, products, reduced, points.spread(points.live))
        old = self.load(kept, step.out.buffer, step.out.index, ())
        if step.rescale is not None:
            factor = self.load(kept, step.rescale.buffer, step.rescale.index, ())
            old = self.arithmetic.multiply(old, factor)
        self.store(kept, step.out.buffer, step.out.index, self.arithmetic.add(old, total.reshape(kept.shape)))

    def load(self, points: Points, buffer: str, index: Expr, guards: tuple[Inside, ...]) -> Array:
        holds = points.holds(guards) & points.live
        source = self.memory[buffer]
        at = points.at(index)
        self.require_inside(points, buffer, at, holds, "load")
        if not source.size:
            return np.zeros(points.ones, source.dtype)
        place = np.where(holds, self.place(points, buffer, at), 0)
        return np.where(holds, source[place], np.zeros((), source.dtype))

    def store(self, points: Points, buffer: str, index: Expr, value: Array) -> None:
        live, at = points.spread(points.live), points.spread(points.at(index))
        self.require_inside(points, buffer, at, live, "store")
        place = points.spread(self.place(points, buffer, at))[live]
        self.memory[buffer][place] = self.arithmetic.stored(self.buffers[buffer], points.spread(value)[live])

    def require_inside(self, points: Points, buffer: str, at: Array, holds: Array, verb: str) -> None:
        outside = (at < 0) | (at >= self.buffers[buffer].size)
        if np.any(points.spread(outside & holds)):
            raise IndexError(f"a {verb} leaves buffer {buffer}")

    def place(self, points: Points, buffer: str, index: Array) -> Array:
        """Return the positions of elements in the array of a buffer."""
        found = self.buffers[buffer]
        for layout in found.layout:
            if isinstance(layout, Panels):
                index = panel_place(found, layout, index)
        return points.task * found.size + index if found.level is Level.TILE else index


def panel_place(buffer: Buffer, layout: Panels, index: Array) -> Array:
    """Return the offsets in memory of elements of a matrix that is packed in panels."""
    row, column = index // layout.columns, index % layout.columns
    rows, group = buffer.size // layout.columns, layout.group
    start = (column // layout.width * rows + row // group * group) * layout.width
    return np.asarray(start + column % layout.width * group + row % group)


class _PassRun:
    """One pass over all points of its loops, for some tasks of its stage."""

    def __init__(self, run: _Run, pass_: Pass, points: Points) -> None:
        self.run_, self.pass_, self.points = run, pass_, points
        self.reduced = tuple(i for i, axis in enumerate(pass_.axes, 1) if axis.is_reduced)
        self.values: dict[str, Array] = {}

    def run(self) -> None:
        arithmetic = self.run_.arithmetic
        for op in self.pass_.ops:
            match op:
                case Load(name, _, buffer, index, guards):
                    self.values[name] = self.run_.load(self.points, buffer, index, guards)
                case Literal(name, dtype, number):
                    self.values[name] = arithmetic.literal(dtype, number)
                case Apply(name, dtype, op_name, arguments):
                    self.values[name] = arithmetic.apply(op_name, dtype, [self.values[a] for a in arguments])
                case Select(name, _, guards, inside, outside):
                    chosen = (self.points.holds(guards), self.values[inside], self.values[outside])
                    self.values[name] = np.where(*chosen)
                case _:
                    assert_never(op)
        for sink in self.pass_.sinks:
            value = self.points.spread(self.values[sink.value])
            if isinstance(sink, Accumulate):
                self._accumulate(sink, value)
            else:
                self.run_.store(self.points, sink.buffer, sink.index, value)

    def _accumulate(self, sink: Accumulate, value: Array) -> None:
        points = self.points.kept()
        dtype = self.run_.buffers[sink.buffer].dtype
        live = self.points.spread(self.points.live)
        result = self.run_.arithmetic.collect(sink.op, dtype, value, self.reduced, live)
        self.run_.store(points, sink.buffer, sink.index, result.reshape(points.shape))
