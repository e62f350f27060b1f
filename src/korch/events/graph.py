"""Tasks of a plan's kernels, and the events that order them.

A *stage* has tasks that may run in any order; each is a range of grid points of a tile program's stage,
or a whole kernel. An *event tensor* is an array of events. A task notifies a range of events when it
ends, and begins after all events of the ranges that it waits for have reached their counts. So a join after
each kernel is one event that all tasks of the kernel notify and all tasks of the next kernel wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from korch.events.spans import NOTHING, Spans, overlapping, unique_pairs
from korch.primitive.op import Array

Range = tuple[int, int]
"""The first event and the one after the last."""

Task = tuple[int, int]
"""The number of a stage, and that of a task in it."""

MOST_DIVISOR = 4
"""The largest divisor of an affine map."""


@dataclass(frozen=True)
class AffineMap:
    """The map from task i to the events in [(step * i + first) / divisor, (step * i + end) / divisor).

    Quotients are rounded down, and the range is limited to the events that exist.
    """

    step: int
    first: int
    end: int
    divisor: int = 1

    def range(self, task: int, events: int) -> Range:
        """Return the events of a task."""
        low = max(0, (self.step * task + self.first) // self.divisor)
        return low, max(low, min(events, (self.step * task + self.end) // self.divisor))


@dataclass(frozen=True)
class TableMap:
    """The map from task i to the events in range i of a table."""

    ranges: tuple[Range, ...]

    def range(self, task: int, events: int) -> Range:
        """Return the events of a task."""
        return self.ranges[task]


@dataclass(frozen=True)
class Edge:
    """Which events the tasks of a stage notify or wait for."""

    stage: int
    map: AffineMap | TableMap


@dataclass(frozen=True)
class EventTensor:
    """An array of events."""

    counts: tuple[int, ...]  # how many notifications each event waits for
    producers: tuple[Edge, ...]  # the tasks that notify, by stage
    consumers: tuple[Edge, ...]  # the tasks that wait, by stage


def share(tasks: int, thread: int, threads: int) -> int:
    """Return the first task of a thread if some tasks are divided evenly among threads."""
    return tasks // threads * thread + min(thread, tasks % threads)


@dataclass(frozen=True)
class EventStage:
    """Tasks that may run in any order."""

    name: str
    tasks: int


@dataclass(frozen=True)
class TaskGraph:
    """Stages in the order of the plan, and the event tensors that order their tasks."""

    stages: tuple[EventStage, ...]
    events: tuple[EventTensor, ...]

    @property
    def tasks(self) -> Iterator[Task]:
        """All tasks, stage by stage."""
        return ((s, i) for s, stage in enumerate(self.stages) for i in range(stage.tasks))

    def notified(self, tensor: EventTensor) -> list[list[Task]]:
        """Return the tasks that notify each event of a tensor."""
        return self._tasks_of(tensor, tensor.producers)

    def waiting(self, tensor: EventTensor) -> list[list[Task]]:
        """Return the tasks that wait for each event of a tensor."""
        return self._tasks_of(tensor, tensor.consumers)

    def producers(self) -> dict[Task, list[Task]]:
        """Return, for each task, the tasks that notify the events that it waits for."""
        found: dict[Task, dict[Task, None]] = {task: {} for task in self.tasks}
        for tensor in self.events:
            for before, after in zip(self.notified(tensor), self.waiting(tensor), strict=True):
                for task in after:
                    found[task] |= dict.fromkeys(before)
        return {task: list(before) for task, before in found.items()}

    def _tasks_of(self, tensor: EventTensor, edges: Sequence[Edge]) -> list[list[Task]]:
        found: list[list[Task]] = [[] for _ in tensor.counts]
        for edge in edges:
            for i in range(self.stages[edge.stage].tasks):
                for event in range(*edge.map.range(i, len(tensor.counts))):
                    found[event].append((edge.stage, i))
        return found


@dataclass(frozen=True)
class Touched:
    """What a task reads and writes: sets of bytes of each memory."""

    reads: dict[str, Spans] = field(default_factory=dict)  # the bytes that it reads, by memory
    writes: dict[str, Spans] = field(default_factory=dict)  # the bytes that it writes, by memory

    def conflict(self, other: Touched) -> tuple[str, int] | None:
        """Return a byte that one of two tasks writes and the other touches, or None."""
        for first, second in ((self.writes, other.writes), (self.writes, other.reads), (self.reads, other.writes)):
            for memory, spans in first.items():
                byte = spans.common_byte(second.get(memory, NOTHING))
                if byte is not None:
                    return memory, byte
        return None


Footprints = Sequence[Sequence[Touched]]
"""What each task of each stage touches."""


def conflicts(first: Sequence[Touched], second: Sequence[Touched]) -> Array:
    """Return int64[n, 2], ascending: the pairs of tasks of two stages, one of which writes a byte the other touches."""
    found = [np.zeros((0, 2), np.int64)]
    sides = [([task.writes for task in first], [task.writes for task in second])]
    sides += [(sides[0][0], [task.reads for task in second]), ([task.reads for task in first], sides[0][1])]
    for a, b in sides:
        for memory in set().union(*a) & set().union(*b):
            found.append(overlapping(*([own.get(memory, NOTHING) for own in tasks] for tasks in (a, b))))
    return unique_pairs(np.concatenate(found))


def affine_or_table(ranges: Sequence[Range], events: int) -> AffineMap | TableMap:
    """Return the map that gives some ranges: an affine map if there is one, else a table."""
    for divisor in range(1, MOST_DIVISOR + 1):
        for step in _steps(ranges, divisor):
            ends = [_offset([r[side] for r in ranges], step, divisor, (0, events)[side]) for side in (0, 1)]
            if ends[0] is None or ends[1] is None:
                continue
            found = AffineMap(step, ends[0], ends[1], divisor)
            if all(found.range(i, events) == own for i, own in enumerate(ranges)):
                return found
    return TableMap(tuple(ranges))


def _steps(ranges: Sequence[Range], divisor: int) -> list[int]:
    """Return the steps that an affine map may have, the most likely ones first."""
    last = max(1, len(ranges) - 1)
    slopes = {divisor * (ranges[-1][side] - ranges[0][side]) // last for side in (0, 1)} if ranges else set()
    return sorted({slope + more for slope in slopes for more in (0, 1, -1, 2)}, key=abs)


def _offset(ends: Sequence[int], step: int, divisor: int, limit: int) -> int | None:
    """Return b such that (step * i + b) / divisor is each end, or is beyond the limit if the end is at the limit."""
    least = divisor * np.array(ends, np.int64) - step * np.arange(len(ends))
    is_inside = np.array(ends, np.int64) != limit
    low = int(least[is_inside | (limit != 0)].max(initial=-(1 << 40)))
    high = int(least[is_inside | (limit == 0)].min(initial=1 << 40)) + divisor - 1
    return min((low, high), key=abs) if low <= high else None
