"""Launches of Triton kernels with the locations of their buffers -> tasks of programs, queues of persistent programs.

A launch is a stage; a task is a range of its consecutive programs. If a launch does not declare what each of its
programs computes, each of its tasks counts as touching everything that its kernel touches, so other stages wait for
all of its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from korch.cuda.kernel import CudaKernel, Launch
from korch.cuda.persistent import PersistentTask, plan_table, read_plan_table
from korch.errors import InvalidGraphError
from korch.events.check import check_graph, check_queues
from korch.events.counters import CountedTask, CounterQueues, as_queues, count_events
from korch.events.derive import derive_events
from korch.events.graph import Footprints, Task, TaskGraph, Touched, share
from korch.events.kernels import Place, placed
from korch.events.schedule import spread_orders
from korch.events.spans import run
from korch.events.touched import PortSpans, touched_by
from korch.tile.ir.program import Level, TileProgram
from korch.tile.lower.buffers import BufferPlace
from korch.tile.triton.program_order import ProgramOrder


@dataclass(frozen=True)
class LaunchUse:
    """A launch in a plan.

    Attributes:
        kernel: the kernel that the launch belongs to.
        number: the number of the launch in the kernel.
        places: the locations of the kernel's buffers; None for constants and inputs of the model, which nothing writes.
        time_ns: the measured or estimated time of the launch.
    """

    kernel: CudaKernel
    number: int
    places: tuple[Place | None, ...]
    time_ns: float

    @property
    def launch(self) -> Launch:
        """What is launched."""
        return self.kernel.launches[self.number]


@dataclass(frozen=True)
class LaunchSegment:
    """Launches that run as one persistent kernel.

    Attributes:
        uses: the launches in order, each a stage.
        parts: for each launch, the first program of each task and the one after its last.
        footprints: what each task touches.
        graph: the tasks and their events.
        counted: the queue of tasks of each persistent program.
    """

    uses: tuple[LaunchUse, ...]
    parts: tuple[tuple[tuple[int, int], ...], ...]
    footprints: Footprints
    graph: TaskGraph
    counted: CounterQueues

    @property
    def functions(self) -> dict[str, Launch]:
        """The different functions of the launches, by symbol."""
        return {use.launch.symbol: use.launch for use in self.uses}

    @property
    def rows(self) -> list[int]:
        """For each launch, the index of its first buffer address; then the index after the last launch's addresses."""
        return list(accumulate((len(use.launch.arguments) for use in self.uses), initial=0))


def schedule_launches(uses: Sequence[LaunchUse], programs: int, parts: int = 1) -> LaunchSegment:
    """Return the queues of some launches.

    Args:
        uses: the launches in order.
        programs: the number of persistent programs.
        parts: a launch is divided into at most this many tasks per persistent program.
    """
    cuts = tuple(_parts(use.launch.grid, programs * parts) for use in uses)
    footprints = [_footprints(use, own) for use, own in zip(uses, cuts, strict=True)]
    graph = derive_events([use.launch.symbol for use in uses], footprints)
    check_graph(graph)
    times_ns: dict[Task, float] = {}
    for s, (use, own) in enumerate(zip(uses, cuts, strict=True)):
        each_ns = use.time_ns / max(1, -(-use.launch.grid // programs))
        times_ns |= {(s, i): each_ns * (end - begin) for i, (begin, end) in enumerate(own)}
    counted = count_events(graph, spread_orders(graph, times_ns, programs))
    return LaunchSegment(tuple(uses), cuts, footprints, graph, counted)


def table_of(segment: LaunchSegment) -> tuple[int, ...]:
    """Return the table `plan` of a persistent kernel of the segment's functions (`korch.cuda.persistent`)."""
    symbols, rows, counted = list(segment.functions), segment.rows, segment.counted

    def entry(own: CountedTask) -> PersistentTask:
        stage, i = own.task
        waits = tuple((event, counted.counts[event]) for event in own.waits)
        return PersistentTask(
            symbols.index(segment.uses[stage].launch.symbol), rows[stage], *segment.parts[stage][i], waits, own.notifies
        )

    return plan_table([[entry(own) for own in queue] for queue in counted.queues])


def check_table(table: Sequence[int], segment: LaunchSegment) -> None:
    """Check that the queues of a table run each task once, in an order that gives the results of the plan.

    Raises:
        InvalidGraphError: they do not, or wait for each other forever.
    """
    symbols, rows = list(segment.functions), segment.rows
    counts: dict[int, set[int]] = {}

    def task(entry: PersistentTask) -> CountedTask:
        for event, count in entry.waits:
            counts.setdefault(event, set()).add(count)
        stage = rows.index(entry.row) if entry.row in rows[:-1] else -1
        part = entry.begin, entry.end
        is_known = stage >= 0 and part in segment.parts[stage]
        if not is_known or segment.uses[stage].launch.symbol != symbols[entry.kernel]:
            raise InvalidGraphError(f"{entry} is no task of the plan", where="queues")
        waits = tuple(event for event, _ in entry.waits)
        return CountedTask((stage, segment.parts[stage].index(part)), waits, entry.notifies)

    queues = tuple(tuple(map(task, entries)) for entries in read_plan_table(table, len(segment.counted.queues)))
    if sorted(entry.task for queue in queues for entry in queue) != list(segment.graph.tasks):
        raise InvalidGraphError("not each task is in one queue", where="queues")
    for event, own in counts.items():
        if len(own) > 1:
            raise InvalidGraphError(f"tasks wait for different counts of event {event}", where="queues")
    most = max([*counts, *(event for queue in queues for entry in queue for event in entry.notifies)], default=-1)
    counted = CounterQueues(tuple(max(counts.get(event, {0})) for event in range(most + 1)), queues)
    check_queues(as_queues(counted), segment.footprints)


def _parts(grid: int, most: int) -> tuple[tuple[int, int], ...]:
    count = min(grid, most)
    return tuple((share(grid, i, count), share(grid, i + 1, count)) for i in range(count))


def _footprints(use: LaunchUse, parts: Sequence[tuple[int, int]]) -> list[Touched]:
    """Return what each of some ranges of programs touches."""
    kernel, order = use.kernel, use.kernel.orders[use.number]
    program = kernel.program
    if program is None:
        raise AssertionError("a launch without a tile program")
    whole = _whole(kernel, program, is_known=order is not None)
    found: Sequence[PortSpans] = [{} for _ in parts]
    if order is not None:
        found = _of_programs(use, program, order, parts)
    return [placed(use.places, spans | whole) for spans in found]


def _of_programs(
    use: LaunchUse, program: TileProgram, order: ProgramOrder, parts: Sequence[tuple[int, int]]
) -> list[PortSpans]:
    in_memory = {b.name: b.dtype.size_bytes for b in program.buffers if b.level is not Level.TILE}
    places = {
        name: BufferPlace(i, 0, in_memory[name])
        for i, (name, place) in enumerate(zip(use.kernel.names, use.places, strict=True))
        if place is not None and name in in_memory
    }
    points = order.points()
    return touched_by(program, order.stage, [np.concatenate(points[begin:end]) for begin, end in parts], places)


def _whole(kernel: CudaKernel, program: TileProgram, is_known: bool) -> PortSpans:
    """Return the buffers that each task may touch as a whole: tiles in memory, or everything the kernel touches."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    ports = kernel.names[: len(kernel.names) - len(kernel.scratch) - len(kernel.tables)]
    sizes = [(buffers[name].dtype, buffers[name].size) for name in ports]
    found: PortSpans = {}
    for i, (name, (dtype, size)) in enumerate(zip(kernel.names, [*sizes, *kernel.scratch], strict=False)):
        level = buffers[name].level if name in buffers else Level.TILE
        if level is Level.TILE or not is_known:
            found[i, level is not Level.INPUT] = run(0, size * dtype.size_bytes)
    return found
