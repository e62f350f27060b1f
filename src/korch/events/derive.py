"""Footprints of tasks -> the events that order them.

Two tasks of different stages that touch the same byte run in the order of the plan if one of them writes it. A
pair that is already ordered through other pairs needs no event: tasks are compared with those of the nearest earlier
stage first, and implied pairs are left out. The remaining pairs of two stages become one event tensor: tasks that
wait for the same tasks share an event, and tensors whose waiting tasks share events in the same way are merged. If a
task would notify events that are not a contiguous range, each event is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from korch.events.graph import (
    Edge,
    EventStage,
    EventTensor,
    Footprints,
    Task,
    TaskGraph,
    Touched,
    affine_or_table,
    conflicts,
)
from korch.events.spans import union

Relation = dict[int, set[int]]
"""For each task of a stage, the tasks of an earlier stage that it waits for."""


def derive_events(names: Sequence[str], footprints: Footprints) -> TaskGraph:
    """Return the task graph of some stages.

    `names`: the names of the stages, in the order of the plan.
    """
    stages = tuple(EventStage(name, len(own)) for name, own in zip(names, footprints, strict=True))
    events: list[EventTensor] = []
    for consumer, relations in enumerate(needed_order(footprints)):
        events += _tensors(stages, consumer, relations)
    return TaskGraph(stages, tuple(events))


def needed_order(footprints: Footprints) -> list[dict[int, Relation]]:
    """Return, for each stage, by earlier stage, the pairs of tasks that must be ordered."""
    wholes = [_whole(own) for own in footprints]
    numbers = {task: n for n, task in enumerate((s, i) for s, own in enumerate(footprints) for i in range(len(own)))}
    before = [0] * len(numbers)  # of each task, itself and all that end before it begins, as bits
    found: list[dict[int, Relation]] = []
    for consumer, own in enumerate(footprints):
        relations: dict[int, Relation] = {}
        for producer in range(consumer - 1, -1, -1):
            if wholes[consumer].conflict(wholes[producer]) is None:
                continue
            relation = _relation(footprints, (producer, consumer), numbers, before)
            if relation:
                relations[producer] = relation
        for i in range(len(own)):
            before[numbers[consumer, i]] |= 1 << numbers[consumer, i]
        found.append(relations)
    return found


def _relation(footprints: Footprints, pair: tuple[int, int], numbers: dict[Task, int], before: list[int]) -> Relation:
    """Return the pairs of tasks of two stages that are not ordered yet, and record them as ordered."""
    producer, consumer = pair
    found: Relation = {}
    first, count = numbers[producer, 0], len(footprints[producer])
    all_ = ((1 << count) - 1) << first
    if all(before[numbers[consumer, i]] & all_ == all_ for i in range(len(footprints[consumer]))):
        return found
    for i, j in conflicts(footprints[consumer], footprints[producer]).tolist():
        own, other = numbers[consumer, i], numbers[producer, j]
        if not before[own] >> other & 1:
            found.setdefault(i, set()).add(j)
            before[own] |= before[other]
    return found


def _whole(footprints: Sequence[Touched]) -> Touched:
    """Return the union of what the tasks of a stage touch."""
    memories = {memory for own in footprints for memory in (*own.reads, *own.writes)}
    return Touched(
        {m: union(own.reads[m] for own in footprints if m in own.reads) for m in memories},
        {m: union(own.writes[m] for own in footprints if m in own.writes) for m in memories},
    )


def _tensors(stages: Sequence[EventStage], consumer: int, relations: dict[int, Relation]) -> list[EventTensor]:
    """Return the event tensors for which a stage waits."""
    merged: dict[tuple[int, ...], list[tuple[int, list[set[int]]]]] = {}
    for producer, relation in sorted(relations.items()):
        shares: dict[frozenset[int], int] = {}
        waits = [frozenset(relation.get(i, ())) for i in range(stages[consumer].tasks)]
        events = tuple(-1 if not own else shares.setdefault(own, len(shares)) for own in waits)
        notified: list[set[int]] = [set() for _ in range(stages[producer].tasks)]
        for own, event in shares.items():
            for task in own:
                notified[task].add(event)
        merged.setdefault(events, []).append((producer, notified))
    found = []
    for events, producers in merged.items():
        is_ranges = all(max(own) - min(own) < len(own) for _, notified in producers for own in notified if own)
        parts = [range(max(events) + 1)] if is_ranges else [range(e, e + 1) for e in range(max(events) + 1)]
        found += [_tensor(consumer, events, producers, part) for part in parts]
    return found


def _tensor(
    consumer: int, events: tuple[int, ...], producers: list[tuple[int, list[set[int]]]], part: range
) -> EventTensor:
    """Return the tensor of the events in `part`; `events` has the one that each task waits for, or -1."""
    counts = [0] * len(part)
    edges = []
    for producer, notified in producers:
        own = [[event - part.start for event in sorted(events) if event in part] for events in notified]
        ranges = [(events[0], events[-1] + 1) if events else (0, 0) for events in own]
        for event in (event for events in own for event in events):
            counts[event] += 1
        if any(own):
            edges.append(Edge(producer, affine_or_table(ranges, len(part))))
    waits = [(event - part.start, event - part.start + 1) if event in part else (0, 0) for event in events]
    return EventTensor(tuple(counts), tuple(edges), (Edge(consumer, affine_or_table(waits, len(part))),))
