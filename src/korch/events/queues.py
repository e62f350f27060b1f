"""Waits of tasks and an order for each thread -> queues: which tasks each thread runs, and what it waits for.

The tasks of a queue run one after another, so one counter per thread, the number of its ended tasks, says
which tasks have ended. All tasks that a task waits for become at most one number for each other thread: how
many tasks of that thread must have ended. Waits that follow from other waits are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import InvalidGraphError
from korch.events.graph import Task, Waits

Wait = tuple[int, int]
"""A queue, and how many of its tasks must have ended."""


@dataclass(frozen=True)
class QueuedTask:
    """A task in a queue, and what it waits for."""

    task: Task
    waits: tuple[Wait, ...] = ()


Queues = tuple[tuple[QueuedTask, ...], ...]
"""The entries of each thread, in the order in which it runs them."""

Clocks = dict[Task, tuple[int, ...]]
"""For each task, how many tasks of each queue have surely ended when it begins."""


def make_queues(waits: Waits, orders: Sequence[Sequence[Task]]) -> Queues:
    """Return the queues of threads that run tasks in given orders.

    `orders`: the tasks of each thread; each task is in exactly one queue.

    Raises:
        InvalidGraphError: a task is missing, or threads would wait for each other forever.
    """
    places = {task: (q, i) for q, order in enumerate(orders) for i, task in enumerate(order)}
    if sorted(places) != sorted(waits) or len(places) != sum(map(len, orders)):
        raise InvalidGraphError("not each task is in one queue", where="queues")
    needed: list[list[tuple[Wait, ...]]] = [[() for _ in order] for order in orders]
    for task, producers in waits.items():
        q, i = places[task]
        least = [0] * len(orders)
        for producer in producers:
            other, at = places[producer]
            least[other] = max(least[other], at + 1)
        if least[q] > i:
            raise InvalidGraphError(f"it waits for what the queue runs later: task {task}", where=f"queue {q}")
        needed[q][i] = tuple((other, n) for other, n in enumerate(least) if n and other != q)
    queues = tuple(
        tuple(QueuedTask(*entry) for entry in zip(order, own, strict=True))
        for order, own in zip(orders, needed, strict=True)
    )
    return _reduced(queues, clocks_of(queues))


def clocks_of(queues: Queues) -> Clocks:
    """Return, for each task, how many tasks of each queue have surely ended when it begins.

    Raises:
        InvalidGraphError: threads wait for each other forever.
    """
    at = [0] * len(queues)
    firsts = np.cumsum([0, *map(len, queues)]).tolist()
    ended = np.zeros((firsts[-1], len(queues)), np.int64)  # what has ended when each task has ended
    found: Clocks = {}
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for q, queue in enumerate(queues):
            while at[q] < len(queue) and all(at[other] >= n for other, n in queue[at[q]].waits):
                rows = [firsts[other] + n - 1 for other, n in queue[at[q]].waits if n]
                rows += [firsts[q] + at[q] - 1] if at[q] else []
                clock = ended[rows].max(0, initial=0)
                found[queue[at[q]].task] = tuple(clock.tolist())
                clock[q] = at[q] + 1
                ended[firsts[q] + at[q]] = clock
                at[q] += 1
                is_stuck = False
    for q, queue in enumerate(queues):
        if at[q] < len(queue):
            waits = ", ".join(f"{n} tasks of queue {other}" for other, n in queue[at[q]].waits)
            raise InvalidGraphError(f"its task {at[q]} waits forever for {waits}", where=f"queue {q}")
    return found


def _reduced(queues: Queues, clocks: Clocks) -> Queues:
    """Return queues without the waits that follow from other waits."""
    ends = [[_end(clocks[entry.task], q, i) for i, entry in enumerate(queue)] for q, queue in enumerate(queues)]

    def kept(q: int, i: int) -> tuple[Wait, ...]:
        entry = queues[q][i]
        known = list(ends[q][i - 1]) if i else [0] * len(queues)
        waits = [(other, n) for other, n in entry.waits if n > known[other]]
        return tuple(
            (other, n) for other, n in waits if not any(ends[o][m - 1][other] >= n for o, m in waits if o != other)
        )

    return tuple(tuple(QueuedTask(e.task, kept(q, i)) for i, e in enumerate(queue)) for q, queue in enumerate(queues))


def _end(clock: tuple[int, ...], queue: int, position: int) -> tuple[int, ...]:
    return (*clock[:queue], position + 1, *clock[queue + 1 :])
