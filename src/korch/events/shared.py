"""A stage whose grid depends on the sizes of a run -> the coordinates divided among threads, and what each one touches.

Threads divide rows if a task computes many of them, and grid points otherwise. A row touches the bytes of the first
row, shifted; so two stages that touch the same rows are compared once for all sizes. In a stage whose grid points are
divided, each task counts as touching what all tasks touch for the largest size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import InvalidGraphError
from korch.events.extent import counted_of
from korch.events.graph import Moving, Range, Rows, SharedExtent, Touched
from korch.events.spans import NOTHING, Spans, run, runs, union
from korch.events.touched import PortSpans, touched_by
from korch.provider.provider import Kernel
from korch.tile.bind import bind
from korch.tile.index import bounds
from korch.tile.memory import BufferPlace, places_in_memory
from korch.tile.program import TileProgram
from korch.tile.shares import PART, Shares

MOST_RUNS = 1 << 16
"""The most runs of bytes of a task that are kept apart; more are replaced by one run."""


@dataclass(frozen=True)
class StageCoordinates:
    """The coordinates that are divided among the tasks of a stage.

    Attributes:
        shared: the coordinates: rows, or grid points.
        most: how many there are for the largest sizes.
        shares: how rows are divided; None for grid points.
        order: what determines the position of a row that combines two coordinates (`PART`); else "".
    """

    shared: SharedExtent
    most: int
    shares: Shares | None
    order: str

    def most_of(self, task: int, tasks: int) -> Range:
        """Return a range of positions that contains those of a task at every size."""
        if self.order:
            return 0, self.most
        end = self.shared.part(self.most, task, tasks)[1]
        return min(self.shared.unit * task, end), end


@dataclass(frozen=True)
class PortRows:
    """What the first row touches, and what is touched whatever the row is, by position among the kernel's buffers.

    Attributes:
        moving: buffer position, whether it is written, the first row's bytes, and the distance to the next row's.
        fixed: the rest.
    """

    moving: tuple[tuple[int, bool, Spans, int], ...]
    fixed: PortSpans


def largest(program: TileProgram) -> TileProgram:
    """Return a program for the largest values of its parameters."""
    return bind(program, {p.name: p.high for p in program.parameters})


def coordinates_of(kernel: Kernel, number: int, unit: int = 1) -> StageCoordinates | None:
    """Return the coordinates divided among the tasks of a kernel's stage; None if its grid is the same for all sizes.

    Args:
        kernel: a kernel with a program.
        number: the number of the stage.
        unit: tasks begin at multiples of this if it is a multiple of the unit that the stage requires.
    """
    program = kernel.program
    if program is None:
        raise AssertionError("a kernel without tasks")
    counts = dict(kernel.counts)
    counted = counted_of(program, program.stages[number], counts)
    if counted is None:
        return None
    shares = counted.shares
    if shares is None:
        sizes = (axis.size for axis in program.stages[number].grid)
        most = (size if isinstance(size, int) else bounds(size, program.parameter_ranges)[1] for size in sizes)
        return StageCoordinates(SharedExtent(counted.extent), math.prod(most), None, "")
    own = unit if unit % shares.unit == 0 else shares.unit
    parts = [p for p in program.parameters if p.name == PART]
    order = "".join(f"{p.high} for each {counts[p.name].text('n')}" for p in parts)
    return StageCoordinates(
        SharedExtent(counted.extent, own), program.parameter_ranges[shares.parameter][1], shares, order
    )


def has_extents(kernel: Kernel) -> bool:
    """Return whether the coordinates divided among threads can be determined for each stage of a kernel."""
    stages = kernel.program.stages if kernel.program is not None else ()
    try:
        for number in range(len(stages)):
            coordinates_of(kernel, number)
    except InvalidGraphError:
        return False
    return True


def row_spans(program: TileProgram, number: int, shares: Shares, positions: Sequence[int]) -> PortRows:
    """Return what rows of a stage touch of the buffers at some positions."""
    values = {p.name: p.high for p in program.parameters}
    whole = largest(program)
    one = bind(program, {**values, shares.parameter: 1})
    places = {n: place for n, place in places_in_memory(whole)[0].items() if place.position in positions}
    first = [np.zeros(1, np.int64)]

    def moving() -> Iterator[tuple[int, bool, Spans, int]]:
        for name, step in shares.steps.items():
            if name in places:
                (found,) = touched_by(one, one.stages[number], first, {name: places[name]})
                for (position, is_write), spans in found.items():
                    yield position, is_write, spans, step * places[name].element_bytes

    others: dict[str, BufferPlace] = {name: place for name, place in places.items() if name not in shares.steps}
    (fixed,) = touched_by(whole, whole.stages[number], first, others)
    return PortRows(tuple(moving()), fixed)


def row_tasks(rows: Rows, own: StageCoordinates, tasks: int) -> list[Touched]:
    """Return what each task of a stage with shared rows touches."""
    found = []
    for task in range(tasks):
        reads, writes = {**rows.fixed.reads}, {**rows.fixed.writes}
        first, end = own.most_of(task, tasks)
        for each in rows.moving:
            side = writes if each.is_write else reads
            side[each.memory] = union([side.get(each.memory, NOTHING), _moved(each, first, end)])
        found.append(Touched(reads, writes, rows))
    return found


def _moved(moving: Moving, first: int, end: int) -> Spans:
    """Return the bytes of the rows in [first, end)."""
    own, steps = moving.first, moving.step * np.arange(first, max(first, end))
    if not own or not steps.size:
        return NOTHING
    if own.begins.size * steps.size > MOST_RUNS:
        return run(int(own.begins[0] + steps[0]), int(own.ends[-1] + steps[-1]))
    return runs((own.begins + steps[:, None]).ravel(), (own.ends + steps[:, None]).ravel())
