"""Tasks of a plan's kernels, and the events that order them.

A *stage* has tasks that may run in any order; each is a range of grid points of a tile program's stage,
or a whole kernel. An *event tensor* is an array of events. A task notifies a range of events when it
ends, and begins after all events of the ranges that it waits for have their counts. So a join after
each kernel is one event that all tasks of the kernel notify and all tasks of the next one wait for.

Where a kernel's grid depends on the sizes of a run, the numbers of tasks and events are still constants: a task
is one of even shares of as many coordinates as there are in a run, and may be empty. Events order tasks for all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from korch.alignment import ceil_div
from korch.events.extent import RunExtent
from korch.events.spans import NOTHING, Spans, overlapping, run, union, unique_pairs
from korch.primitive.op import Array

Range = tuple[int, int]
"""The first event and the one after the last."""

Task = tuple[int, int]
"""The number of a stage, and that of a task in it."""

MOST_DIVISOR = 4
"""The largest divisor of an affine map."""


@dataclass(frozen=True)
class AffineMap:
    """The map from task i to events from (step * i + first) / divisor to before (step * i + end) / divisor.

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
    """The map from task i to the events of entry i."""

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
    """An array of events.

    Attributes:
        counts: how many notifications each event waits for.
        producers: the tasks that notify, by stage.
        consumers: the tasks that wait, by stage.
    """

    counts: tuple[int, ...]
    producers: tuple[Edge, ...]
    consumers: tuple[Edge, ...]


def share(tasks: int, thread: int, threads: int) -> int:
    """Return where the part of a thread begins if threads share some tasks evenly."""
    return tasks // threads * thread + min(thread, tasks % threads)


@dataclass(frozen=True)
class SharedExtent:
    """StageCoordinates that the tasks of a stage share evenly.

    Attributes:
        extent: how many there are in a run.
        unit: tasks begin at multiples of it.
    """

    extent: RunExtent
    unit: int = 1

    def part(self, count: int, task: int, tasks: int) -> Range:
        """Return the coordinates of a task if there are `count`."""
        first, end = (self.unit * share(ceil_div(count, self.unit), task + side, tasks) for side in (0, 1))
        return min(first, count), min(end, count)


@dataclass(frozen=True)
class EventStage:
    """Tasks that may run in any order; `shared` is what they share if that depends on the sizes of a run."""

    name: str
    tasks: int
    shared: SharedExtent | None = None

    def part(self, task: int, sizes: Sequence[int]) -> Range:
        """Return the coordinates of a task that shares some, for the sizes of a run."""
        if self.shared is None:
            raise AssertionError("a stage of constant tasks")
        return self.shared.part(self.shared.extent.at(sizes), task, self.tasks)


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
        """Return, for each task, those that notify the events that it waits for."""
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
    """What a task reads and writes: sets of bytes of each memory, for all sizes of a run.

    Attributes:
        reads: by memory.
        writes: by memory.
        rows: how that follows from the coordinates of the task, if it shares coordinates with the others of its stage.
    """

    reads: dict[str, Spans] = field(default_factory=dict)
    writes: dict[str, Spans] = field(default_factory=dict)
    rows: Rows | None = None

    def conflict(self, other: Touched) -> tuple[str, int] | None:
        """Return a byte that one of two tasks writes and the other touches, or None."""
        for first, second in ((self.writes, other.writes), (self.writes, other.reads), (self.reads, other.writes)):
            for memory, spans in first.items():
                byte = spans.common_byte(second.get(memory, NOTHING))
                if byte is not None:
                    return memory, byte
        return None


@dataclass(frozen=True, eq=False)
class Moving:
    """Bytes that tasks touch for each of their coordinates: for the next coordinate those `step` bytes further on."""

    memory: str
    is_write: bool
    first: Spans
    step: int


@dataclass(frozen=True, eq=False)
class Rows:
    """What the tasks of a stage touch that share coordinates.

    Attributes:
        shared: the coordinates.
        order: what else says where a coordinate is; "" if it is as many steps from the first one as it says.
        most: coordinates are before this place.
        moving: what they touch for each of them; the place of the first one is 0.
        fixed: what any of them touches whatever its coordinates are.
    """

    shared: SharedExtent
    order: str
    most: int
    moving: tuple[Moving, ...]
    fixed: Touched

    def are_apart(self, other: Rows) -> bool:
        """Return whether tasks of two stages touch the same bytes for the same coordinates only, at each size.

        That holds if both have the same coordinates, at the same places, and bytes of a coordinate end before those of
        the next one begin.
        """
        if (self.shared, self.order, self.most) != (other.shared, other.order, other.most):
            return False
        if self.fixed.conflict(other.whole) is not None or self.whole.conflict(other.fixed) is not None:
            return False
        pairs = [(a, b) for a in self.moving for b in other.moving if a.memory == b.memory and a.first and b.first]
        return all(_are_in_step(a, b, self.most) for a, b in pairs if a.is_write or b.is_write)

    @property
    def whole(self) -> Touched:
        """All that the tasks touch."""
        sides: tuple[dict[str, Spans], dict[str, Spans]] = ({**self.fixed.reads}, {**self.fixed.writes})
        for own in self.moving:
            side = sides[own.is_write]
            side[own.memory] = union([side.get(own.memory, NOTHING), _all_of(own, self.most)])
        return Touched(*sides)


def _all_of(moving: Moving, most: int) -> Spans:
    """Return the bytes from the first coordinate's first to the last one's last."""
    if not moving.first:
        return NOTHING
    return run(int(moving.first.begins[0]), int(moving.first.ends[-1]) + (most - 1) * moving.step)


def _are_in_step(a: Moving, b: Moving, most: int) -> bool:
    """Return whether the bytes of different coordinates are different."""
    if _all_of(a, most).common_byte(_all_of(b, most)) is None:
        return True
    low = min(int(a.first.begins[0]), int(b.first.begins[0]))
    high = max(int(a.first.ends[-1]), int(b.first.ends[-1]))
    return a.step == b.step and high - low <= a.step


Footprints = Sequence[Sequence[Touched]]
"""What each task of each stage touches."""


def conflicts(first: Sequence[Touched], second: Sequence[Touched]) -> Array:
    """Return int64[n, 2]: the tasks of two stages of which one writes a byte that the other touches, ascending.

    These are all that do so at any size: the bytes of a task are those for all sizes. Where both stages have the same
    coordinates, tasks that share different ones are left out if their bytes are different whatever the size is.
    """
    found = [np.zeros((0, 2), np.int64)]
    sides = [([task.writes for task in first], [task.writes for task in second])]
    sides += [(sides[0][0], [task.reads for task in second]), ([task.reads for task in first], sides[0][1])]
    for a, b in sides:
        for memory in set().union(*a) & set().union(*b):
            found.append(overlapping(*([own.get(memory, NOTHING) for own in tasks] for tasks in (a, b))))
    pairs = unique_pairs(np.concatenate(found))
    rows = [own[0].rows if own else None for own in (first, second)]
    is_own = len(first) == len(second) and rows[0] and rows[1] and rows[0].are_apart(rows[1])
    return np.compress(pairs[:, 0] == pairs[:, 1], pairs, 0) if is_own else pairs


def affine_or_table(ranges: Sequence[Range], events: int) -> AffineMap | TableMap:
    """Return the map that gives some ranges, as an affine one if there is one."""
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
    """Return the steps that an affine map may have, those that are likely first."""
    last = max(1, len(ranges) - 1)
    slopes = {divisor * (ranges[-1][side] - ranges[0][side]) // last for side in (0, 1)} if ranges else set()
    return sorted({slope + more for slope in slopes for more in (0, 1, -1, 2)}, key=abs)


def _offset(ends: Sequence[int], step: int, divisor: int, limit: int) -> int | None:
    """Return b such that (step * i + b) / divisor is each end, or is beyond the limit where the end is there."""
    least = divisor * np.array(ends, np.int64) - step * np.arange(len(ends))
    is_inside = np.array(ends, np.int64) != limit
    low = int(least[is_inside | (limit != 0)].max(initial=-(1 << 40)))
    high = int(least[is_inside | (limit == 0)].min(initial=1 << 40)) + divisor - 1
    return min((low, high), key=abs) if low <= high else None
