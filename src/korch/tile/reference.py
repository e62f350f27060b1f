"""The meaning of a tile program: an interpreter in NumPy.

The tasks of a stage run in a random order, a few at a time, so that a program whose result depends
on their order gives another one; the passes of these tasks run one after another. A tile is an
array with one row per task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from korch.primitive.op import Array
from korch.primitive.ops import OPS
from korch.primitive.ops.elementwise import CastAttributes
from korch.tile.index import Expr
from korch.tile.points import Points
from korch.tile.program import (
    Accumulate,
    Apply,
    Inside,
    Level,
    Literal,
    Load,
    Pass,
    Select,
    Stage,
    TileProgram,
    identity,
)

MOST_TURNS = 8
"""Stages of more tasks run several of them at once: NumPy is slow for one."""


def run_program(program: TileProgram, inputs: Sequence[Array], seed: int = 0) -> list[Array]:
    """Run a program on flat input arrays; return the flat output arrays.

    Elements that no store writes are zero.

    Args:
        program: a program that `check_program` accepts.
        inputs: one array for each input buffer.
        seed: of the order of the tasks.
    """
    rng = np.random.default_rng(seed)
    memory: dict[str, Array] = {}
    given = iter(inputs)
    for buffer in program.buffers:
        if buffer.level is Level.INPUT:
            memory[buffer.name] = next(given).reshape(-1)
        elif buffer.level is not Level.TILE:
            memory[buffer.name] = np.zeros(buffer.size, buffer.dtype.numpy)
    for stage in program.stages:
        for buffer in program.buffers:
            if buffer.level is Level.TILE:
                memory[buffer.name] = np.zeros(stage.tasks * buffer.size, buffer.dtype.numpy)
        order = rng.permutation(stage.tasks)
        for tasks in np.array_split(order, max(1, min(MOST_TURNS, stage.tasks))):
            for pass_ in stage.passes:
                _PassRun(program, stage, pass_, memory, tasks).run()
    return [memory[b.name] for b in program.buffers if b.level is Level.OUTPUT]


class _PassRun:
    """One pass over all points of its loops, for some tasks of its stage."""

    def __init__(self, program: TileProgram, stage: Stage, pass_: Pass, memory: dict[str, Array], tasks: Array) -> None:
        self.program = program
        self.pass_ = pass_
        self.memory = memory
        self.points = Points(stage, pass_, tasks)
        self.reduced = tuple(i for i, axis in enumerate(pass_.axes, 1) if axis.is_reduced)
        self.values: dict[str, Array] = {}

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for op in self.pass_.ops:
                match op:
                    case Load(name, _, buffer, index, guards):
                        self.values[name] = self._load(buffer, index, guards)
                    case Literal(name, dtype, number):
                        self.values[name] = np.asarray(number, dtype.numpy)
                    case Apply(name, dtype, op_name, arguments):
                        given = [self.values[a] for a in arguments]
                        attributes = OPS[op_name].attributes
                        made = CastAttributes(dtype.value) if attributes is CastAttributes else attributes()
                        result = OPS[op_name].reference(np.broadcast_arrays(*given), made)
                        self.values[name] = result.astype(dtype.numpy)
                    case Select(name, _, guards, inside, outside):
                        chosen = (self.points.holds(guards), self.values[inside], self.values[outside])
                        self.values[name] = np.where(*chosen)
            for sink in self.pass_.sinks:
                value = np.broadcast_to(self.values[sink.value], self.points.shape)
                place = self._flat(sink.buffer, self.points.at(sink.index))
                live = np.broadcast_to(self.points.live, self.points.shape)
                if isinstance(sink, Accumulate):
                    self._accumulate(sink, value, place)
                else:
                    self.memory[sink.buffer][np.broadcast_to(place, self.points.shape)[live]] = value[live]

    def _accumulate(self, sink: Accumulate, value: Array, index: Array) -> None:
        target = self.memory[sink.buffer]
        functions: dict[str, Callable[..., Array]] = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
        function = functions[sink.op]
        start = np.asarray(identity(sink.op, self.program.buffer(sink.buffer).dtype), target.dtype)
        result = function(value, axis=self.reduced, keepdims=True, initial=start)
        where = np.broadcast_to(index, result.shape)
        target[where] = result.astype(target.dtype)

    def _load(self, buffer: str, index: Expr, guards: tuple[Inside, ...]) -> Array:
        place = self._flat(buffer, self.points.at(index))
        holds = self.points.holds(guards) & self.points.live
        source = self.memory[buffer]
        if not source.size:
            return np.zeros(1, source.dtype)
        inside = (place >= 0) & (place < source.size)
        if not np.all(inside | ~holds):
            raise IndexError(f"a load leaves buffer {buffer}")
        found = source[np.where(holds & inside, place, 0)]
        return np.where(holds, found, np.zeros((), source.dtype))

    def _flat(self, buffer: str, index: Array) -> Array:
        found = self.program.buffer(buffer)
        return self.points.task * found.size + index if found.level is Level.TILE else index
