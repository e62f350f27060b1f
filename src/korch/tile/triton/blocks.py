"""Prints a stage with contractions or loops as one Triton launch, in which tiles are blocks in registers.

A task is a Triton program. The axes of a pass are the rows and the columns of a block, whose sides are
powers of two. Elements beyond the end of an axis are masked in loads, stores and sums. A tile is a
variable: no memory is used between steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from korch.errors import InvalidGraphError
from korch.primitive.ops.reduce import identity
from korch.primitive.types import DType, row_major_strides
from korch.tile.ir.index import Expr
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Contract,
    Level,
    Literal,
    Load,
    Loop,
    Pass,
    Product,
    Select,
    Stage,
    Step,
    Store,
    TileProgram,
    written_by,
)
from korch.tile.triton.launch import StageLaunch
from korch.tile.triton.text import COLUMNS, REDUCE, ROWS, STORED, Coordinate, axes_of, converted, literal, power_of_two

SMALLEST = 16
"""The smallest side of a block that the matrix units multiply."""

BAND = 8
"""The number of row blocks that run together, so that they share columns in the cache."""

PRECISION = {
    Product.F32: ', input_precision="ieee"',
    Product.TF32: ', input_precision="tf32"',
    Product.SPLIT: ', input_precision="bf16x6"',
    Product.F16: "",
    Product.BF16: "",
}
"""The supported products, each with the arguments that tell Triton how to multiply."""


@dataclass(frozen=True, slots=True)
class TileBlock:
    """A tile that is held in a variable."""

    name: str  # the variable
    begin: int  # the constant part of its index
    steps: tuple[int, int]  # the index steps from row to row and from column to column; 0 along a side of 1
    shape: tuple[int, int]  # rows and columns, powers of two
    zero: frozenset[int] = frozenset()  # the sides (0, 1) along which elements beyond the end of the tile are 0


@dataclass(frozen=True, slots=True)
class PassFrame:
    """The rows and columns of one pass."""

    axes: tuple[Axis | None, Axis | None]  # the axis of rows and the axis of columns; None for a side of 1
    shape: tuple[int, int]  # the sides of the block, powers of two
    at: dict[str, Coordinate]  # the Triton text of all variables
    # by side, the condition that an element is inside its axis, if the block is longer than the axis
    masks: dict[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The shape as Triton text."""
        return str([*self.shape])

    def steps(self, index: Expr) -> tuple[int, int]:
        """Return by how much an index grows along rows and columns."""
        found = []
        for axis in self.axes:
            step = index.coefficient(axis.name) if axis is not None and axis.extent > 1 else 0
            if step is None:
                raise InvalidGraphError("an index of a tile is not affine", where="tile program")
            found.append(step)
        return found[0], found[1]


def stage_is_blocked(stage: Stage) -> bool:
    """Return whether a stage has contractions or loops."""
    return any(not isinstance(step, Pass) for step in stage.steps)


def _next_joined(program: TileProgram, stage: Stage) -> Stage | None:
    """Return the stage after a stage if its tasks are those of the stage without the first axis; else None."""
    later = program.stages[program.stages.index(stage) + 1 :]
    return later[0] if later and stage_is_blocked(later[0]) and later[0].grid == stage.grid[1:] else None


class BlockStage(StageLaunch):
    """Prints a stage as a launch with one program per task; tiles are blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stage = self.stage
        joined = self.joined = _next_joined(self.program, stage) if self.options.joins else None
        self.blocks: dict[str, TileBlock] = {}
        self.sides: dict[str, int] = {}
        self.band = 1
        for loops, step in (*stage.leaves, *(joined.leaves if joined else ())):
            for axis in step.axes:
                least = SMALLEST if isinstance(step, Contract) else 1
                side = max(least, power_of_two(axis.extent))
                self.sides[axis.name] = max(side, self.sides.get(axis.name, 1))
            for axis in (*stage.grid, *(loop.axis for loop in loops), *step.axes):
                self.text.ranges[axis.name] = (0, max(axis.extent, self.sides.get(axis.name, 1)) - 1)

    def print(self) -> None:
        """Print the stage as one launch.

        Raises:
            InvalidGraphError: it can't be printed.
        """
        self.text.known = {}
        self.widen()
        at = self.place()
        self.steps(self.stage.steps, at)
        if self.joined is not None:
            self.join(self.joined, at)
        self.finish(self.stage.tasks, self.options.warps)

    def join(self, stage: Stage, at: dict[str, Coordinate]) -> None:
        """Write the steps of the next stage, for the last of the programs that differ in the first axis only.

        These programs count themselves; the last one sets their counter back to 0, for the next run.
        """
        text, (first, *others) = self.text, self.stage.grid
        name = text.tables.setdefault((0,) * stage.tasks, f"c{len(text.tables)}")
        steps = row_major_strides(tuple(axis.extent for axis in others))
        number = [at[axis.name].times(step) for axis, step in zip(others, steps, strict=True)]
        counter = f"{text.pointer(name)} + ({' + '.join(filter(None, number)) or '0'})"
        text.line("tl.debug_barrier()")  # all threads have stored before one of them counts
        text.line(f"before = tl.atomic_add({counter}, 1)")
        text.line(f"if before == {first.extent - 1}:")
        text.depth += 1
        text.line(f"tl.store({counter}, 0)")
        self.steps(stage.steps, at)

    def place(self) -> dict[str, Coordinate]:
        """Write the task of a program; return the Triton text of the grid's axes."""
        grid, text = self.stage.grid, self.text
        if not (self.is_shared(grid[-2:]) and min(axis.extent for axis in grid[-2:]) > 1):
            return text.split("pid", [(a.name, a.extent) for a in grid], frozenset())
        *others, rows, columns = grid
        down, across = rows.extent, columns.extent
        at: dict[str, Coordinate] = {}
        block = "pid"
        if others:
            at = text.split(f"(pid // {down * across})", [(a.name, a.extent) for a in others], frozenset())
            block = "block"
            text.line(f"{block} = pid % {down * across}")
        band = self.band = min(BAND, down)
        text.line(f"first = ({block} // {band * across}) * {band}")
        text.line(f"height = tl.minimum({down} - first, {band})")
        text.line(f"{rows.name} = first + ({block} % {band * across}) % height")
        text.line(f"{columns.name} = ({block} % {band * across}) // height")
        return at | {axis.name: Coordinate(axis.name) for axis in (rows, columns)}

    def is_shared(self, axes: Sequence[Axis]) -> bool:
        """Return whether two axes are such that each operand of a contraction depends on a different one."""
        found: list[set[str]] = []
        names = {axis.name for axis in axes}
        operands = {at.buffer for _, s in self.stage.leaves if isinstance(s, Contract) for at in (s.a, s.b)}
        for loops, step in self.stage.leaves:
            if loops and isinstance(step, Pass) and {sink.buffer for sink in step.sinks} & operands:
                read = [op.index.variables & names for op in step.ops if isinstance(op, Load)]
                found.append(set().union(*read))
        return len(names) == 2 and len(found) == 2 and found[0] | found[1] == names and not found[0] & found[1]

    # Steps

    def steps(self, steps: Sequence[Step], at: dict[str, Coordinate]) -> None:
        """Write steps; `at` has the Triton text of the variables of the grid and of the enclosing loops."""
        for step in steps:
            if isinstance(step, Loop):
                self.loop(step, at)
            elif isinstance(step, Contract):
                self.contract(step, at)
            else:
                self.pass_(step, at)

    def loop(self, loop: Loop, at: dict[str, Coordinate]) -> None:
        """Write a loop; carried tiles are variables that it assigns to."""
        axis, here = loop.axis, Coordinate("0")
        is_turned = axis.extent != 1
        if is_turned:  # a loop over consecutive numbers would be unrolled
            has_product = any(isinstance(step, Contract) for step in loop.body)
            stages = self.options.stages if has_product else 0
            here = self.text.begin_loop(axis.name, axis.extent, self.terms(loop), stages)
        for name in loop.carried:
            self.blocks[name] = replace(self.blocks[name], zero=frozenset())
        self.steps(loop.body, at | {axis.name: here})
        for name in written_by(loop.body) - {*loop.carried}:
            self.blocks.pop(name, None)
        if is_turned:
            self.text.end_loop()

    def terms(self, loop: Loop) -> int:
        """Return the number of terms of a contraction in a loop, at least 2."""
        found = [a.extent for step in loop.body if isinstance(step, Contract) for a in step.axes if a.is_reduced]
        return max([2, *found])

    def contract(self, step: Contract, at: dict[str, Coordinate]) -> None:
        """Write a contraction of two blocks."""
        kept, reduced = (tuple(a for a in step.axes if a.is_reduced is is_reduced) for is_reduced in (False, True))
        if step.product not in PRECISION or len(kept) != 2 or len(reduced) != 1 or step.factor is not None:
            raise InvalidGraphError(f"contractions by {step.product.value} can't be printed", where="tile program")
        (i, j), (p,) = kept, reduced
        a = self.read(step.a, self.frame((i, p), at), zero=1)
        b = self.read(step.b, self.frame((p, j), at), zero=0)
        frame = self.frame((i, j), at)
        total = before = self.read(step.out, frame)
        if step.rescale is not None:
            before = f"{total} * {self.read(step.rescale, frame)}"
        self.text.line(f"{total} = tl.dot({a}, {b}, {before}{PRECISION[step.product]})")
        self.keep(step.out, frame, total, frozenset())

    def pass_(self, pass_: Pass, at: dict[str, Coordinate]) -> None:
        """Write a pass over one block."""
        text = self.text
        frame = self.frame(_sides(pass_), at)
        values: dict[str, str] = {}
        types: dict[str, DType] = {}
        ops = []
        written = {sink.buffer for sink in pass_.sinks}
        for op in pass_.ops:
            if not isinstance(op, Load) or self.buffer(op.buffer).level is not Level.TILE:
                ops.append(op)
                continue
            value = converted(self.read(At(op.buffer, op.index), frame), op.dtype)
            if op.buffer in written:  # a sink assigns to the tile's variable before other sinks have used its value
                text.line(f"{(name := text.fresh())} = {value}")
                value = name
            values[op.name], types[op.name] = value, op.dtype
        text.ops(ops, frame.at, frame.masks, values, types)
        for sink in pass_.sinks:
            value = values[sink.value]
            if isinstance(sink, Accumulate):
                self.collect(sink, value, frame)
            elif self.buffer(sink.buffer).level is Level.TILE:
                stored = f"tl.broadcast_to({value}, {frame.text}).to({STORED[self.buffer(sink.buffer).dtype]})"
                text.line(f"{_variable(sink.buffer)} = {stored}")
                self.keep(At(sink.buffer, sink.index), frame, _variable(sink.buffer), _zero_sides(pass_, sink, frame))
            else:
                dtype = self.buffer(sink.buffer).dtype
                text.store(sink, dtype, value, frame.at, frame.masks, frame.text)

    def collect(self, sink: Accumulate, value: str, frame: PassFrame) -> None:
        """Write the reduction of a block along its columns."""
        buffer = self.buffer(sink.buffer)
        start = literal(identity(sink.op, buffer.dtype))
        value = f"tl.broadcast_to({value}, {frame.text})"
        if 1 in frame.masks:
            value = f"tl.where({frame.masks[1]}, {value}, {start})"
        total = f"tl.sum({value}, 1)" if sink.op == "sum" else f"tl.reduce({value}, 1, {REDUCE[sink.op]})"
        left = PassFrame(
            (frame.axes[0], None), (frame.shape[0], 1), frame.at, {k: m for k, m in frame.masks.items() if not k}
        )
        name = _variable(sink.buffer)
        self.text.line(f"{name} = {total}[:, None]")
        if buffer.level is Level.TILE:
            self.keep(At(sink.buffer, sink.index), left, name, frozenset())
        else:
            self.text.store(sink, buffer.dtype, name, left.at, left.masks, left.text)

    # Blocks

    def frame(self, axes: Sequence[Axis | None], at: Mapping[str, Coordinate]) -> PassFrame:
        """Write the row and column numbers and the masks of a pass; return its frame."""
        text = self.text
        here, masks, shape = dict(at), {}, [1, 1]
        for side, axis in enumerate(axes):
            if axis is None:
                continue
            n = shape[side] = self.sides[axis.name]
            name = text.once(f"tl.arange(0, {n}){'[None, :]' if side else '[:, None]'}", axis.name)
            here[axis.name] = Coordinate(name, COLUMNS if side else ROWS)
            conditions = [f"({name} < {axis.extent})"] if n > axis.extent else []
            if axis.ragged is not None:
                outer, total = axis.ragged
                begin = at[outer].times(axis.extent)
                conditions.append(f"({begin} + {name} < {total})" if begin else f"({name} < {total})")
            if conditions:
                masks[side] = text.once(" & ".join(conditions), "m")
        return PassFrame((axes[0], axes[1]), (shape[0], shape[1]), here, masks)

    def read(self, place: At, frame: PassFrame, zero: int | None = None) -> str:
        """Return the text of a tile, or of a load, as a block; a tile is 0 beyond the end of side `zero`."""
        buffer, block = self.buffer(place.buffer), self.blocks.get(place.buffer)
        if buffer.level is not Level.TILE:
            name = self.text.fresh()
            self.text.load(Load(name, buffer.dtype, buffer.name, place.index), frame.at, frame.masks, name)
            return f"tl.broadcast_to({name}, {frame.text}).to({STORED[buffer.dtype]})"
        if block is None:
            raise InvalidGraphError(f"tile {place.buffer} is read before it is written", where="tile program")
        steps = frame.steps(place.index)
        is_turned = steps != block.steps and steps == block.steps[::-1]
        if (steps != block.steps and not is_turned) or place.index.constant != block.begin:
            raise InvalidGraphError(f"tile {place.buffer} is read in another order than written", where="tile program")
        name = f"tl.trans({block.name})" if is_turned else block.name
        if zero in frame.masks and (1 - zero if is_turned else zero) not in block.zero:
            return f"tl.where({frame.masks[zero]}, {name}, 0.0)"
        return name

    def keep(self, place: At, frame: PassFrame, name: str, zero: frozenset[int]) -> None:
        """Record that a variable holds a tile from now on."""
        self.blocks[place.buffer] = TileBlock(name, place.index.constant, frame.steps(place.index), frame.shape, zero)


def _variable(buffer: str) -> str:
    return f"t_{buffer}"


def _sides(pass_: Pass) -> tuple[Axis | None, Axis | None]:
    """Return the axes of rows and columns: the kept and the reduced axis, or, without a reduction, both in order."""
    if pass_.is_reduction:
        groups = [[a for a in pass_.axes if a.is_reduced is reduced] for reduced in (False, True)]
    else:
        groups = [[*pass_.axes[:1]], [*pass_.axes[1:]]]
    if max(map(len, groups)) > 1:
        raise InvalidGraphError("a pass of a block has more than two axes", where="tile program")
    rows, columns = (group[0] if group else None for group in groups)
    return rows, columns


def _zero_sides(pass_: Pass, sink: Store, frame: PassFrame) -> frozenset[int]:
    """Return the sides beyond whose end a value that is stored to a tile is 0."""
    op = next(op for op in pass_.ops if op.name == sink.value)
    match op:
        case Literal(value=0):
            return frozenset((0, 1))
        case Load(index=index, guards=guards):
            axes = axes_of(index, frame.at).union(*(axes_of(guard.expr, frame.at) for guard in guards))
            return axes & frame.masks.keys()
        case Literal() | Apply() | Select():
            return frozenset()
        case _:
            assert_never(op)
