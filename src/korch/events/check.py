"""Checks of task graphs and queues: counts match, and tasks that touch the same bytes are ordered."""

from __future__ import annotations

from itertools import combinations

from korch.errors import InvalidGraphError
from korch.events.graph import AffineMap, Footprints, Task, TaskGraph, conflicts
from korch.events.queues import Queues, clocks_of


def check_graph(graph: TaskGraph) -> None:
    """Check that each event gets as many notifications as its count, and that maps fit stages and events.

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
    """Check that two tasks are ordered if one of them writes bytes that the other touches.

    Each task has a vector clock: how many tasks of each queue have ended when it begins. Tasks of one stage
    are not compared: the check of tile programs proves that no task writes what other tasks of the stage touch, and a
    set of many short runs also includes bytes in the gaps between them (`Spans`).

    Raises:
        InvalidGraphError: two such tasks may run at the same time, or in another order than that of the plan.
    """
    clocks = clocks_of(queues)
    places = {entry.task: (q, at) for q, queue in enumerate(queues) for at, entry in enumerate(queue)}

    def is_before(first: Task, second: Task) -> bool:
        queue, at = places[first]
        return clocks[second][queue] > at

    for earlier, later in combinations(range(len(footprints)), 2):
        for i, j in conflicts(footprints[earlier], footprints[later]).tolist():
            first, second = (earlier, i), (later, j)
            if is_before(first, second):
                continue
            if is_before(second, first):
                raise InvalidGraphError(
                    f"task {j} of stage {later} runs before task {i} of the earlier stage {earlier}", where="queues"
                )
            memory, byte = footprints[earlier][i].conflict(footprints[later][j]) or ("", 0)
            raise InvalidGraphError(
                f"nothing orders task {i} of stage {earlier} and task {j} of stage {later}, "
                f"and both touch byte {byte} of {memory}",
                where="queues",
            )
