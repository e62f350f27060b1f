"""Task graph and an order for each queue -> queues whose tasks wait for events that are counters.

With many queues, a task that must run after all tasks of a kernel would have to wait for a number of tasks of each
queue (`events.queues`). Here it waits for one event, which all of those tasks notify. Waits that follow from earlier
tasks of its queue, or from its other events, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import InvalidGraphError
from korch.events.graph import Task, TaskGraph
from korch.events.queues import QueuedTask, Queues, clocks_of
from korch.primitive.op import Array


@dataclass(frozen=True)
class CountedTask:
    """A task, the events that it waits for, and those that it notifies when it ends."""

    task: Task
    waits: tuple[int, ...] = ()
    notifies: tuple[int, ...] = ()


@dataclass(frozen=True)
class CounterQueues:
    """Queues, and how many notifications each event waits for."""

    counts: tuple[int, ...]
    queues: tuple[tuple[CountedTask, ...], ...]


def count_events(graph: TaskGraph, orders: Sequence[Sequence[Task]]) -> CounterQueues:
    """Return the queues of programs that run tasks in given orders.

    Args:
        graph: the tasks and events.
        orders: the tasks of each queue; each task is in exactly one queue.

    Raises:
        InvalidGraphError: a task is missing, or queues would wait for each other forever.
    """
    if sorted(task for order in orders for task in order) != sorted(graph.tasks):
        raise InvalidGraphError("not each task is in one queue", where="queues")
    pairs = [
        (before, after)
        for tensor in graph.events
        for before, after in zip(graph.notified(tensor), graph.waiting(tensor), strict=True)
    ]
    every = _numbered([before for before, _ in pairs], [after for _, after in pairs], orders)
    waits = _needed_waits(every)
    used = {event for own in waits.values() for event in own}
    kept = [number for number in range(len(pairs)) if number in used]
    number = {event: i for i, event in enumerate(kept)}
    queues = tuple(
        tuple(
            CountedTask(
                entry.task,
                tuple(number[event] for event in waits[entry.task]),
                tuple(number[event] for event in entry.notifies if event in number),
            )
            for entry in queue
        )
        for queue in every.queues
    )
    return CounterQueues(tuple(every.counts[event] for event in kept), queues)


def as_queues(counted: CounterQueues) -> Queues:
    """Return the same order as queues whose tasks wait for numbers of ended tasks, so that it can be checked.

    Raises:
        InvalidGraphError: an event is not notified as often as it counts.
    """
    needs = _positions(counted)

    def waits(events: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        least = needs[list(events)].max(0, initial=0)
        return tuple((queue, int(least[queue])) for queue in np.flatnonzero(least).tolist())

    return tuple(tuple(QueuedTask(entry.task, waits(entry.waits)) for entry in queue) for queue in counted.queues)


def _numbered(
    notified: Sequence[Sequence[Task]], waiting: Sequence[Sequence[Task]], orders: Sequence[Sequence[Task]]
) -> CounterQueues:
    """Return queues in which tasks wait for and notify all of their events."""
    sides: tuple[dict[Task, list[int]], dict[Task, list[int]]] = ({}, {})
    for side, tasks in zip(sides, (waiting, notified), strict=True):
        for event, own in enumerate(tasks):
            for task in own:
                side.setdefault(task, []).append(event)
    queues = ((CountedTask(t, *(tuple(side.get(t, ())) for side in sides)) for t in order) for order in orders)
    return CounterQueues(tuple(map(len, notified)), tuple(map(tuple, queues)))


def _positions(counted: CounterQueues) -> Array:
    """Return int64[events, queues]: how many tasks of each queue have surely ended when an event reaches its count.

    Raises:
        InvalidGraphError: an event is not notified as often as it counts.
    """
    found = np.zeros((len(counted.counts), len(counted.queues)), np.int64)
    notified = [0] * len(counted.counts)
    for q, queue in enumerate(counted.queues):
        for at, entry in enumerate(queue):
            for event in entry.notifies:
                found[event, q] = at + 1
                notified[event] += 1
    for event, (count, own) in enumerate(zip(counted.counts, notified, strict=True)):
        if count != own:
            raise InvalidGraphError(
                f"event {event} waits for {count} notifications, but {own} tasks notify it", where="queues"
            )
    return found


def _needed_waits(counted: CounterQueues) -> dict[Task, tuple[int, ...]]:
    """Return, for each task, a subset of the events that it waits for, which implies the others."""
    needs, clocks = _positions(counted), clocks_of(as_queues(counted))
    reach = needs.copy()  # also counts tasks that had ended before the notifying tasks began
    for queue in counted.queues:
        for entry in queue:
            for event in entry.notifies:
                np.maximum(reach[event], clocks[entry.task], out=reach[event])
    found = {}
    for q, queue in enumerate(counted.queues):
        known = np.zeros(len(counted.queues), np.int64)  # what has ended when a task of the queue begins
        for at, entry in enumerate(queue):
            kept = []
            for event in sorted(entry.waits, key=lambda event: -int(reach[event].sum())):
                if (needs[event] > known).any():
                    kept.append(event)
                    known = np.maximum(known, reach[event])
            found[entry.task] = tuple(sorted(kept))
            known[q] = at + 1
    return found
