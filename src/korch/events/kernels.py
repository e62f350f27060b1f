"""Kernels of a plan with the locations of their buffers -> stages of tasks with their footprints.

A parallel stage of a tile program becomes tasks of consecutive grid points: each thread has the points that it would
have in a parallel loop, in one or several tasks. A kernel that runs in the calling thread is one task. A kernel that
does not declare what it touches, or whose grid depends on the sizes of a run, has no tasks: it runs between joins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.events.graph import Touched, share
from korch.events.spans import NOTHING, Spans, run, union
from korch.events.touched import PortSpans, touched_by
from korch.provider.provider import Kernel, Threading
from korch.provider.teams import team_refusal
from korch.target import Target
from korch.tile.ir.program import Level, TileProgram
from korch.tile.lower.buffers import places_in_memory

Place = tuple[str, int]
"""A memory, and the offset in bytes at which a buffer begins in it."""


@dataclass(frozen=True)
class Use:
    """A kernel of a plan."""

    step: int  # its number in the plan
    kernel: Kernel  # the code
    # the locations of its buffers; None for constants and inputs of the model, which nothing writes
    places: tuple[Place | None, ...]
    cost_ns: float  # its measured or estimated time on all threads
    # its time on one thread, which is distributed over grid points; if None, `cost_ns` is distributed
    alone_ns: float | None = None


@dataclass(frozen=True)
class TaskPart:
    """A task: some grid points of a kernel's stage, on a thread; the stage is -1 for a kernel that is one task."""

    stage: int
    begin: int
    end: int
    thread: int


@dataclass(frozen=True)
class TaskStage:
    """The tasks of a stage of a kernel."""

    use: Use  # the kernel
    parts: tuple[TaskPart, ...]  # the tasks
    footprints: tuple[Touched, ...]  # what each of them touches
    times_ns: tuple[float, ...]  # how long each of them takes


def has_tasks(kernel: Kernel) -> bool:
    """Return whether a kernel can run as tasks."""
    program = kernel.program
    return program is not None and not program.parameters and bool(kernel.symbol) and team_refusal(kernel) is None


class Splitter:
    """Splits kernels into tasks; the footprints of equal kernels are computed only once.

    Args:
        target: the threads.
        parts: into how many tasks the grid points of each thread are divided.
    """

    def __init__(self, target: Target, parts: int) -> None:
        self.target, self.parts = target, parts
        self._known: dict[tuple[str, int, tuple[int, ...], tuple[TaskPart, ...]], list[PortSpans]] = {}

    def stages(self, use: Use, thread: int) -> list[TaskStage]:
        """Return the stages of a kernel; a kernel that runs in one thread runs in the given one."""
        kernel = use.kernel
        program = kernel.program
        if program is None:
            raise AssertionError("a kernel without tasks")
        if kernel.threading is Threading.CALLER:
            part = TaskPart(-1, 0, 1, thread)
            time_ns = use.cost_ns if use.alone_ns is None else use.alone_ns
            return [TaskStage(use, (part,), (self._whole(use, program),), (time_ns,))]
        works = [stage.work for stage in program.stages]
        found = []
        for number, (stage, work) in enumerate(zip(program.stages, works, strict=True)):
            time_ns = (use.cost_ns if use.alone_ns is None else use.alone_ns) * work / max(1, sum(works))
            parts = tuple(self._parts(number, stage.tasks))
            touched = tuple(self._touched(use, program, number, parts))
            written = [sum(spans.size for spans in own.writes.values()) for own in touched]
            points = [part.end - part.begin for part in parts]
            times_ns = self._times(parts, written if all(written) else points, time_ns, use.alone_ns is None)
            found.append(TaskStage(use, parts, touched, times_ns))
        return found

    def _times(
        self, parts: Sequence[TaskPart], works: Sequence[int], time_ns: float, is_of_all: bool
    ) -> tuple[float, ...]:
        """Return the times of tasks in proportion to their work: the last grid points of an axis may have less work.

        `time_ns`: the time of the stage, on all threads or on one.
        """
        loads = [0] * self.target.threads
        for part, work in zip(parts, works, strict=True):
            loads[part.thread] += work
        each = time_ns / max(1, max(loads) if is_of_all else sum(loads))
        return tuple(each * work for work in works)

    def _parts(self, number: int, tasks: int) -> list[TaskPart]:
        found = []
        for thread in range(self.target.threads):
            begin, end = share(tasks, thread, self.target.threads), share(tasks, thread + 1, self.target.threads)
            count = min(self.parts, end - begin)
            for i in range(count):
                own = [begin + share(end - begin, i + side, count) for side in (0, 1)]
                found.append(TaskPart(number, own[0], own[1], thread))
        return found

    def _touched(self, use: Use, program: TileProgram, number: int, parts: tuple[TaskPart, ...]) -> list[Touched]:
        """Return what some tasks touch, the workspace of their threads included."""
        positions = [i for i, place in enumerate(use.places) if place is not None]
        found = [placed(use.places, spans) for spans in self._spans(use.kernel, program, number, parts, positions)]
        workspace = self._workspace(use)
        return [
            _with_room(touched, workspace, self._room(use, program, part.thread))
            for touched, part in zip(found, parts, strict=True)
        ]

    def _workspace(self, use: Use) -> Place | None:
        """Return where the workspace of a kernel is, if it has one in the arena; it follows inputs and outputs."""
        program = use.kernel.program
        if program is None or not use.kernel.workspace_bytes:
            return None
        return use.places[sum(buffer.level in (Level.INPUT, Level.OUTPUT) for buffer in program.buffers)]

    def _room(self, use: Use, program: TileProgram, thread: int) -> Spans:
        """Return the bytes of a workspace in the arena that a thread has for itself."""
        own, workspace = places_in_memory(program)[1], self._workspace(use)
        room = (use.kernel.workspace_bytes - own) // self.target.threads
        if room <= 0 or workspace is None:
            return NOTHING
        begin = workspace[1] + own + room * thread
        return run(begin, begin + room)

    def _spans(
        self, kernel: Kernel, program: TileProgram, number: int, parts: tuple[TaskPart, ...], positions: Sequence[int]
    ) -> list[PortSpans]:
        """Return what some tasks touch of the buffers at some positions."""
        key = kernel.symbol, number, tuple(positions), parts
        if key not in self._known:
            places = {n: place for n, place in places_in_memory(program)[0].items() if place.position in positions}
            sets = [np.arange(p.begin, p.end) for p in parts]
            self._known[key] = touched_by(program, program.stages[number], sets, places)
        return self._known[key]

    def _whole(self, use: Use, program: TileProgram) -> Touched:
        """Return what a kernel that is one task touches: whole buffers."""
        places, own = places_in_memory(program)
        reads: dict[str, list[Spans]] = {}
        writes: dict[str, list[Spans]] = {}
        for buffer in program.buffers:
            if buffer.level in (Level.INPUT, Level.OUTPUT) and (at := use.places[places[buffer.name].position]):
                size_bytes = buffer.size * buffer.dtype.size_bytes
                side = reads if buffer.level is Level.INPUT else writes
                side.setdefault(at[0], []).append(run(at[1], at[1] + size_bytes))
        if at := self._workspace(use):
            writes.setdefault(at[0], []).append(run(at[1], at[1] + max(own, use.kernel.workspace_bytes)))
        return Touched({m: union(s) for m, s in reads.items()}, {m: union(s) for m, s in writes.items()})


def _with_room(touched: Touched, workspace: Place | None, room: Spans) -> Touched:
    """Return what a task touches, including some bytes of a workspace."""
    if workspace is None or not room:
        return touched
    memory = workspace[0]
    return replace(touched, writes={**touched.writes, memory: union([touched.writes.get(memory, NOTHING), room])})


def placed(places: Sequence[Place | None], spans: PortSpans) -> Touched:
    """Return what a task touches, in the memories where its kernel's buffers are."""
    sides: tuple[dict[str, list[Spans]], dict[str, list[Spans]]] = ({}, {})
    for (position, is_write), own in spans.items():
        place = places[position]
        if place is not None and own:
            sides[is_write].setdefault(place[0], []).append(own.shifted(place[1]))
    reads, writes = ({memory: union(found) for memory, found in side.items()} for side in sides)
    return Touched(reads, writes)


def segments_of(uses: Sequence[Use]) -> list[list[Use]]:
    """Return the longest sequences of kernels that can run as tasks, of two kernels or more."""
    found: list[list[Use]] = [[]]
    for use in uses:
        if not use.kernel.symbol:
            continue
        if has_tasks(use.kernel):
            found[-1].append(use)
        else:
            found.append([])
    return [own for own in found if len(own) > 1]
