"""Checks of task graphs and queues: counts fit, and tasks that touch the same bytes are ordered."""

from __future__ import annotations

from collections.abc import Iterator

from korch.errors import InvalidGraphError
from korch.events.graph import AffineMap, Footprints, Task, TaskGraph
from korch.events.queues import Queues, clocks_of


def check_graph(graph: TaskGraph) -> None:
    """Check that each event is notified as often as it counts, and that maps fit stages and events.

    Raises:
        InvalidGraphError: they do not; the text names the event.
    """
    for t, tensor in enumerate(graph.events):
        for edge in (*tensor.producers, *tensor.consumers):
            if edge.stage >= len(graph.stages):
                raise InvalidGraphError(f"there is no stage {edge.stage}", where=f"event tensor {t}")
            if isinstance(edge.map, AffineMap):
                continue
            is_long = len(edge.map.ranges) == graph.stages[edge.stage].tasks
            if not is_long or any(not 0 <= a <= b <= len(tensor.counts) for a, b in edge.map.ranges):
                raise InvalidGraphError(f"a table does not fit stage {edge.stage}", where=f"event tensor {t}")
        for event, (count, tasks) in enumerate(zip(tensor.counts, graph.notified(tensor), strict=True)):
            if count != len(tasks):
                raise InvalidGraphError(
                    f"event {event} waits for {count} notifications, but {len(tasks)} tasks notify it",
                    where=f"event tensor {t}",
                )


def check_queues(queues: Queues, footprints: Footprints) -> None:
    """Check that tasks are ordered wherever one writes bytes that the other touches.

    Each task has a vector clock: how many tasks of each queue have ended when it begins. Only tasks
    that no clock orders are compared. Those of one stage are not: the check of tile programs proves that they write
    nothing that others of the stage touch, and a set of many short runs has bytes between them, too (`Spans`).

    Raises:
        InvalidGraphError: two tasks may run at the same time, or in another order than that of the plan.
    """
    clocks = clocks_of(queues)
    for first, second in unordered(queues, clocks):
        if first[0] == second[0]:
            continue
        conflict = footprints[first[0]][first[1]].conflict(footprints[second[0]][second[1]])
        if conflict is not None:
            raise InvalidGraphError(
                f"nothing orders task {first[1]} of stage {first[0]} and task {second[1]} of stage {second[0]}, "
                f"and both touch byte {conflict[1]} of {conflict[0]}",
                where="queues",
            )
    for earlier, later in _turned(queues, clocks):
        if footprints[earlier[0]][earlier[1]].conflict(footprints[later[0]][later[1]]) is not None:
            raise InvalidGraphError(
                f"task {earlier[1]} of stage {earlier[0]} runs before task {later[1]} of the earlier stage {later[0]}",
                where="queues",
            )


def unordered(queues: Queues, clocks: dict[Task, tuple[int, ...]]) -> Iterator[tuple[Task, Task]]:
    """Yield the pairs of tasks of different queues that may run at the same time."""
    for q, queue in enumerate(queues):
        for other in range(q + 1, len(queues)):
            rest = queues[other]
            for i, entry in enumerate(queue):
                for at in range(clocks[entry.task][other], len(rest)):
                    if clocks[rest[at].task][q] > i:
                        break
                    yield entry.task, rest[at].task


def _turned(queues: Queues, clocks: dict[Task, tuple[int, ...]]) -> Iterator[tuple[Task, Task]]:
    """Yield the pairs of ordered tasks of which the first is of a later stage than the second."""
    for q, queue in enumerate(queues):
        for i, entry in enumerate(queue):
            for other, rest in enumerate(queues):
                start = (
                    i + 1 if other == q else next((at for at, e in enumerate(rest) if clocks[e.task][q] > i), len(rest))
                )
                for later in rest[start:]:
                    if later.task[0] < entry.task[0]:
                        yield entry.task, later.task
