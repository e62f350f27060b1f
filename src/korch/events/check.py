"""Check of queues: tasks that touch the same bytes are ordered."""

from itertools import combinations

from korch.errors import InvalidGraphError
from korch.events.graph import Footprints, Task, conflicts
from korch.events.queues import Queues, clocks_of


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
