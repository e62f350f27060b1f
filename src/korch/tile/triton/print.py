"""Prints a tile program as Triton kernels, usually one launch per stage.

A launch works on tiles of rows and columns. In a stage with reductions, the rows are tasks and the
columns are the points of a pass, so that a few instructions reduce a row. Scalars that a task passes
from one pass to the next stay in registers, and data that several passes read is loaded once if a row
is one tile. If there are too few tasks to fill the device, each pass becomes a separate launch over
parts of the rows (`split`), and the next launch combines the partial results. In a stage without
reductions, the columns are its points; if it transposes a matrix, rows and columns are the axes along
which reads and writes are contiguous. In a stage with contractions or loops, a task is a Triton program
(`korch.tile.triton.blocks`).
"""

import math
from dataclasses import replace

from korch.primitive.types import DType
from korch.tile.ir.program import Axis, Level, Load, Pass, Stage, TileProgram, read_by, refused, written_by
from korch.tile.triton.blocks import BlockStage, stage_is_blocked
from korch.tile.triton.launch import (
    MANY_NUMBERS,
    USUAL,
    LaunchOptions,
    PrintedProgram,
    StageLaunch,
    numbers_of,
    warps_for,
)
from korch.tile.triton.rows import RowStage, SplitStage
from korch.tile.triton.text import COLUMNS, Coordinate, power_of_two

MANY_WIDE = 128
"""The maximum points per program if it loads or stores many numbers for each point."""


def print_triton(
    program: TileProgram, comment: str, processors: int, split: bool = False, options: LaunchOptions = USUAL
) -> PrintedProgram:
    """Print a program.

    `program`: lowered for one lane, so that every kept axis of a reduction is a grid axis. `split`: whether rows are
    cut into parts if there are few tasks.

    Raises:
        InvalidGraphError: the program has parameters or layouts, or contractions that are not printed.
    """
    _require_known(program)
    found = PrintedProgram(program)
    for buffer in program.buffers:
        if buffer.level is Level.WORKSPACE:
            found.scratch[buffer.name] = (buffer.dtype, buffer.size)
    joined: Stage | None = None
    for stage in program.stages:
        if stage is joined or stage.tasks == 0 or not stage.steps:
            continue
        is_free = not stage_is_blocked(stage) and stage_is_free(stage)
        if stage_is_blocked(stage) or is_free:
            _require_all_points(stage)
        if stage_is_blocked(stage):
            block = BlockStage(program, stage, comment, found, processors, options)
            joined = block.joined
            block.print()
        elif is_free:
            _FreeStage(program, stage, comment, found, processors).print()
        elif split and stage_is_splittable(program, stage, processors):
            SplitStage(program, stage, comment, found, processors, options).print()
        else:
            RowStage(program, stage, comment, found, processors, options).print()
    return found


def _require_all_points(stage: Stage) -> None:
    """Raise an error for passes and contractions that leave points out."""
    if any(step.where for _, step in stage.leaves):
        raise refused("steps that leave points out can't be printed")


def stage_is_free(stage: Stage) -> bool:
    """Return whether a stage has no reduction."""
    return len(stage.passes) == 1 and not stage.passes[0].is_reduction


def stage_is_splittable(program: TileProgram, stage: Stage, processors: int) -> bool:
    """Return whether a stage has few, long tasks that pass only scalars from one pass to the next."""
    if stage_is_free(stage) or stage.tasks >= 2 * processors:
        return False
    longest = max(math.prod(axis.extent for axis in p.axes) for p in stage.passes)
    single = all(not pass_.is_reduction or all(axis.is_reduced for axis in pass_.axes) for pass_ in stage.passes)
    written = [buffer for buffer in program.buffers if buffer.name in written_by(stage.steps)]
    is_handed_on = all(b.size == 1 if b.level is Level.TILE else b.name not in read_by(stage.steps) for b in written)
    return longest >= 4096 and single and is_handed_on


class _FreeStage(StageLaunch):
    """Prints a loop nest of stores: its points are the columns, or, for a transposed matrix, a tile is a square."""

    def print(self) -> None:
        pass_ = _whole(self.stage)
        rows = self._turned(pass_)
        text = self.text
        self.widen()
        at: dict[str, Coordinate] = {}
        masks: dict[int, str] = {}
        if rows is None:
            total = math.prod(axis.extent for axis in pass_.axes)
            wide = 1024 if total >= 1024 * 4 * self.processors else 256
            wide = wide if numbers_of(pass_) <= MANY_NUMBERS else MANY_WIDE
            columns = min(wide, power_of_two(total))
            grid, shape = -(-total // columns), [1, columns]
            text.line(f"c = pid * {columns} + tl.arange(0, {columns})[None, :]")
            at |= text.split("c", [(a.name, a.extent) for a in pass_.axes], COLUMNS)
            if total % columns:
                masks[1] = "inside"
                text.line(f"inside = c < {total}")
        else:
            column = next(a for a in pass_.axes if a.name == pass_.vector)
            others = [a for a in pass_.axes if a not in (rows, column)]
            height, width = min(64, power_of_two(rows.extent)), min(64, power_of_two(column.extent))
            down, across = -(-rows.extent // height), -(-column.extent // width)
            grid, shape = down * across * math.prod(a.extent for a in others), [height, width]
            at |= text.split(
                "pid", [*((a.name, a.extent) for a in others), ("down", down), ("across", across)], frozenset()
            )
            for axis, name, place, size in ((0, "r", rows, height), (1, "c", column, width)):
                tile = at["down" if axis == 0 else "across"].text
                spread = "[:, None]" if axis == 0 else "[None, :]"
                text.line(f"{name} = {tile} * {size} + tl.arange(0, {size}){spread}")
                at[place.name] = Coordinate(name, frozenset((axis,)))
                if place.extent % size:
                    masks[axis] = f"{name}_inside"
                    text.line(f"{name}_inside = {name} < {place.extent}")
        values: dict[str, str] = {}
        types: dict[str, DType] = {}
        text.ops(pass_.ops, at, masks, values, types)
        for sink in pass_.sinks:
            dtype = self.buffer(sink.buffer).dtype
            text.store(sink, dtype, values[sink.value], at, masks, str(shape))
        self.finish(grid, warps_for(math.prod(shape), numbers_of(pass_)))

    def _turned(self, pass_: Pass) -> Axis | None:
        """Return the axis along which the largest load is contiguous, if that is not the vector axis; else None."""
        loads = [op for op in pass_.ops if isinstance(op, Load)]
        sized = [op for op in loads if op.index.coefficient(pass_.vector) != 0]
        if not sized or not pass_.vector:
            return None
        largest = max(sized, key=lambda op: self.sizes[op.buffer])
        if largest.index.coefficient(pass_.vector) == 1:
            return None
        found = [a for a in pass_.axes if largest.index.coefficient(a.name) == 1]
        found = [a for a in found if a.name != pass_.vector and a.extent >= 4]
        return found[0] if found and _extent(pass_, pass_.vector) >= 4 else None


def _extent(pass_: Pass, name: str) -> int:
    return next(axis.extent for axis in pass_.axes if axis.name == name)


def _whole(stage: Stage) -> Pass:
    """Return the single pass of a free stage, with the grid axes added to its own axes."""
    pass_ = stage.passes[0]
    if any(axis.ragged for axis in pass_.axes):
        raise AssertionError("a free stage is cut for threads before it is printed as Triton")
    return replace(pass_, axes=(*stage.grid, *pass_.axes))


def _require_known(program: TileProgram) -> None:
    """Refuse programs that can't be printed as Triton.

    Raises:
        InvalidGraphError: the program has parameters, sorts, buffers with a layout, or loops that end early.
    """
    hint = "Bind the parameters first"
    for parameter in program.parameters:
        raise refused(f"{parameter.name} is known at run time only", hint)
    for buffer in program.buffers:
        if buffer.layout:
            raise refused(f"the layout of buffer {buffer.name} can't be printed")
    if program.is_sorted:
        raise refused("a program that sorts rows can't be printed")
    for stage in program.stages:
        for loops, _ in stage.leaves:
            if any(loop.axis.ragged is not None or loop.only is not None for loop in loops):
                raise refused("loops that end early can't be printed")
