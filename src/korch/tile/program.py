"""The tile program: what stands between a candidate and its source.

A program is a list of *stages*, one after another with a barrier between them. A stage has grid
axes; each grid point is a *task*, which any thread may run. A task runs *passes*: loop nests over
axes of its own, in which values flow through tile operations from loads to stores or accumulators.
Tiles that a task hands from pass to pass are buffers of level TILE; they stay in registers or in a
core's cache. The same three levels are Mirage's kernel, block and thread graphs.

Two printers read it, C++ (`korch.tile.cpp`) and Triton (`korch.tile.triton`), and, for tests, the
interpreter `korch.tile.reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from korch.primitive.types import DType
from korch.tile.index import Expr, Ranges, bounds


class Level(Enum):
    """Where a buffer lives."""

    INPUT = "input"
    OUTPUT = "output"
    WORKSPACE = "workspace"  # memory, shared by all tasks
    TILE = "tile"  # close to one core, private to a task


@dataclass(frozen=True, slots=True)
class Buffer:
    """A dense array of `size` elements (per task, for a tile)."""

    name: str
    level: Level
    dtype: DType
    size: int


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable that runs from 0 to `extent`.

    Attributes:
        name: the variable.
        extent: how many values it takes.
        is_reduced: whether accumulators collect along it.
        ragged: for the inner part of an axis that was cut into tiles: (outer variable, elements
            of the whole axis); the last tile ends early.
    """

    name: str
    extent: int
    is_reduced: bool = False
    ragged: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Inside:
    """The condition low <= expr < high."""

    expr: Expr
    low: int
    high: int


def holds(guard: Inside, ranges: Ranges) -> bool | None:
    """Return whether a guard holds for all points (True), none (False) or some (None)."""
    low, high = bounds(guard.expr, ranges)
    if guard.low <= low and high < guard.high:
        return True
    return False if high < guard.low or low >= guard.high else None


@dataclass(frozen=True, slots=True)
class Load:
    """Read buffer[index]; where a guard fails nothing is read and the value is 0."""

    name: str
    dtype: DType
    buffer: str
    index: Expr
    guards: tuple[Inside, ...] = ()


@dataclass(frozen=True, slots=True)
class Literal:
    """A number."""

    name: str
    dtype: DType
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise operation of the primitive table."""

    name: str
    dtype: DType
    op: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Select:
    """`inside` where all guards hold, else `outside`."""

    name: str
    dtype: DType
    guards: tuple[Inside, ...]
    inside: str
    outside: str


@dataclass(frozen=True, slots=True)
class Store:
    """Write a value to buffer[index]."""

    buffer: str
    index: Expr
    value: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Collect a value along the reduced axes by sum, prod, max or min; write it at the end."""

    buffer: str
    index: Expr
    value: str
    op: str


TileOp = Load | Literal | Apply | Select
Sink = Store | Accumulate


def arguments_of(op: TileOp) -> tuple[str, ...]:
    """Return the names of the values that an operation is computed from."""
    match op:
        case Apply(arguments=arguments):
            return arguments
        case Select(inside=inside, outside=outside):
            return inside, outside
    return ()


@dataclass(frozen=True, slots=True)
class Pass:
    """A loop nest: axes outermost first, kept axes before reduced ones.

    Attributes:
        axes: the loops inside of a task.
        vector: the axis whose elements lie side by side in vector registers, or "".
        ops: what is computed at each point, in order.
        sinks: where it goes: only stores, or only accumulators.
        across: the axis along which loads lie side by side where they don't along the vector axis,
            or "": squares of both axes are read whole and transposed. It stands next to the vector
            axis, and no guard turns on it.
    """

    axes: tuple[Axis, ...]
    vector: str
    ops: tuple[TileOp, ...]
    sinks: tuple[Sink, ...]
    across: str = ""

    @property
    def is_reduction(self) -> bool:
        """Whether it accumulates."""
        return isinstance(self.sinks[0], Accumulate)


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks that may run in any order; passes of one task run one after another."""

    grid: tuple[Axis, ...]
    passes: tuple[Pass, ...]

    @property
    def tasks(self) -> int:
        """How many grid points there are."""
        return math.prod(axis.extent for axis in self.grid)


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A whole kernel; the order of input and output buffers is the kernel's."""

    buffers: tuple[Buffer, ...]
    stages: tuple[Stage, ...]

    def buffer(self, name: str) -> Buffer:
        """Return a buffer by name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    @property
    def work(self) -> int:
        """Points of all loop nests: a measure of how much there is to do."""
        return sum(
            stage.tasks * math.prod(axis.extent for axis in pass_.axes)
            for stage in self.stages
            for pass_ in stage.passes
        )


def ranges_of(stage: Stage, pass_: Pass) -> Ranges:
    """Return the range of every variable that a pass may use."""
    return {axis.name: (0, max(axis.extent - 1, 0)) for axis in (*stage.grid, *pass_.axes)}


def identity(op: str, dtype: DType) -> float | int:
    """Return the number that changes nothing when it is accumulated."""
    if op in ("sum", "prod"):
        return (0 if op == "sum" else 1) * (1.0 if dtype.is_float else 1)
    if dtype.is_float:
        return -math.inf if op == "max" else math.inf
    if dtype is DType.BOOL:
        return 0 if op == "max" else 1
    bits = 8 * dtype.size_bytes
    is_signed = dtype.value.startswith("i")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return low if op == "max" else high
