"""Runs the tasks of a task graph one by one, in a random order that its events allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from korch.errors import InvalidGraphError
from korch.events.graph import Task, TaskGraph


def run_tasks(graph: TaskGraph, execute: Callable[[Task], None], seed: int = 0) -> None:
    """Run all tasks in a random order that events allow.

    Args:
        graph: the tasks and events.
        execute: runs a task.
        seed: the seed of the random order.

    Raises:
        InvalidGraphError: some tasks never run, because their events do not reach their counts.
    """
    rng = random.Random(seed)
    missing = [[*tensor.counts] for tensor in graph.events]
    waiting = [graph.waiting(tensor) for tensor in graph.events]
    notified = _events_of(graph, [graph.notified(tensor) for tensor in graph.events])
    waits = {task: len(events) for task, events in _events_of(graph, waiting).items()}
    ready = [task for task, count in waits.items() if count == 0]
    done = 0
    while ready:
        chosen = ready.pop(rng.randrange(len(ready)))
        execute(chosen)
        done += 1
        for t, event in notified[chosen]:
            missing[t][event] -= 1
            for after in waiting[t][event] if missing[t][event] == 0 else ():
                waits[after] -= 1
                if waits[after] == 0:
                    ready.append(after)
    if done < len(waits):
        stage, task = next(task for task, count in waits.items() if count > 0)
        raise InvalidGraphError(
            f"its events never have their counts, and {len(waits) - done} tasks do not run",
            where=f"task {task} of stage {stage} ({graph.stages[stage].name})",
        )


def _events_of(graph: TaskGraph, tasks: Sequence[Sequence[Sequence[Task]]]) -> dict[Task, list[tuple[int, int]]]:
    """Return the events of each task, given the tasks of each event of each event tensor."""
    found: dict[Task, list[tuple[int, int]]] = {task: [] for task in graph.tasks}
    for t, events in enumerate(tasks):
        for event, own in enumerate(events):
            for task in own:
                found[task].append((t, event))
    return found
