"""The meaning of a tile program: an interpreter in NumPy.

Each pass is run for all tasks at once; a tile is an array with one row per task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from korch.primitive.op import Array
from korch.primitive.ops import OPS
from korch.primitive.ops.elementwise import CastAttributes
from korch.tile.index import Atom, Choice, Entry, Expr, Quotient, Remainder, Var
from korch.tile.program import (
    Accumulate,
    Apply,
    Axis,
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


def run_program(program: TileProgram, inputs: Sequence[Array]) -> list[Array]:
    """Run a program on flat input arrays; return the flat output arrays.

    Elements that no store writes are zero.
    """
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
        for pass_ in stage.passes:
            _PassRun(program, stage, pass_, memory).run()
    return [memory[b.name] for b in program.buffers if b.level is Level.OUTPUT]


class _PassRun:
    """One pass over all points of its loops and its stage's grid."""

    def __init__(self, program: TileProgram, stage: Stage, pass_: Pass, memory: dict[str, Array]) -> None:
        self.program = program
        self.pass_ = pass_
        self.memory = memory
        axes: list[Axis] = [*stage.grid, *pass_.axes]
        self.shape = tuple(axis.extent for axis in axes)
        self.reduced = tuple(i for i, axis in enumerate(axes) if axis.is_reduced)
        self.env: dict[str, Array] = {}
        for position, axis in enumerate(axes):
            shape = [1] * len(axes)
            shape[position] = axis.extent
            self.env[axis.name] = np.arange(axis.extent).reshape(shape)
        task: Array = np.zeros([1] * len(axes), np.int64)
        for axis in stage.grid:
            task = task * axis.extent + self.env[axis.name]
        self.task = task
        self.live = np.ones([1] * len(axes), bool)
        for axis in pass_.axes:
            if axis.ragged is not None:
                outer, total = axis.ragged
                self.live = self.live & (self.env[outer] * axis.extent + self.env[axis.name] < total)
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
                        chosen = (self._holds(guards), self.values[inside], self.values[outside])
                        self.values[name] = np.where(*chosen)
            for sink in self.pass_.sinks:
                value = np.broadcast_to(self.values[sink.value], self.shape)
                place = self._flat(sink.buffer, self._at(sink.index))
                live = np.broadcast_to(self.live, self.shape)
                if isinstance(sink, Accumulate):
                    self._accumulate(sink, value, place)
                else:
                    self.memory[sink.buffer][np.broadcast_to(place, self.shape)[live]] = value[live]

    def _accumulate(self, sink: Accumulate, value: Array, index: Array) -> None:
        target = self.memory[sink.buffer]
        functions: dict[str, Callable[..., Array]] = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
        function = functions[sink.op]
        start = np.asarray(identity(sink.op, self.program.buffer(sink.buffer).dtype), target.dtype)
        result = function(value, axis=self.reduced, keepdims=True, initial=start)
        where = np.broadcast_to(index, result.shape)
        target[where] = result.astype(target.dtype)

    def _load(self, buffer: str, index: Expr, guards: tuple[Inside, ...]) -> Array:
        place = self._flat(buffer, self._at(index))
        holds = self._holds(guards) & self.live
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
        return self.task * found.size + index if found.level is Level.TILE else index

    def _holds(self, guards: tuple[Inside, ...]) -> Array:
        result: Array = np.ones([1] * len(self.shape), bool)
        for guard in guards:
            at = self._at(guard.expr)
            result = result & (at >= guard.low) & (at < guard.high)
        return result

    def _at(self, expr: Expr) -> Array:
        total: Array = np.full([1] * len(self.shape), expr.constant, np.int64)
        for atom, coefficient in expr.terms:
            total = total + coefficient * self._atom(atom)
        return total

    def _atom(self, atom: Atom) -> Array:
        match atom:
            case Var(name):
                return self.env[name]
            case Quotient(inner, divisor):
                return self._at(inner) // divisor
            case Remainder(inner, divisor):
                return self._at(inner) % divisor
            case Entry(table, inner):
                found: Array = np.asarray(table)[np.clip(self._at(inner), 0, len(table) - 1)]
                return found
            case Choice(inner, pieces, otherwise):
                at, result = self._at(inner), self._at(otherwise)
                for limit, piece in reversed(pieces):
                    result = np.where(at < limit, self._at(piece), result)
                return result
