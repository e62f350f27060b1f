"""Footprints of tasks -> the tasks that each of them waits for.

Two tasks of different stages that touch the same byte run in the order of the plan if one of them writes it. A
pair that is already ordered through other pairs needs no wait: tasks are compared with those of the nearest earlier
stage first, and implied pairs are left out.
"""

from collections.abc import Iterator, Sequence

from korch.events.graph import Footprints, Task, Touched, Waits, conflicts
from korch.events.spans import union


def derive_waits(footprints: Footprints) -> Waits:
    """Return what the tasks of some stages wait for; the stages are in the order of the plan."""
    wholes = [_whole(own) for own in footprints]
    found: Waits = {(s, i): () for s, own in enumerate(footprints) for i in range(len(own))}
    numbers = {task: n for n, task in enumerate(found)}
    before = [0] * len(numbers)  # of each task, itself and all that end before it begins, as bits
    for consumer, own in enumerate(footprints):
        for producer in range(consumer - 1, -1, -1):
            if wholes[consumer].conflict(wholes[producer]) is not None:
                for task, other in _unordered(footprints, (producer, consumer), numbers, before):
                    found[task] += (other,)
        for i in range(len(own)):
            before[numbers[consumer, i]] |= 1 << numbers[consumer, i]
    return found


def _unordered(
    footprints: Footprints, pair: tuple[int, int], numbers: dict[Task, int], before: list[int]
) -> Iterator[tuple[Task, Task]]:
    """Yield the tasks of two stages that are not ordered yet, the later one first, and record them as ordered."""
    producer, consumer = pair
    first, count = numbers[producer, 0], len(footprints[producer])
    all_ = ((1 << count) - 1) << first
    if all(before[numbers[consumer, i]] & all_ == all_ for i in range(len(footprints[consumer]))):
        return
    for i, j in conflicts(footprints[consumer], footprints[producer]).tolist():
        own, other = numbers[consumer, i], numbers[producer, j]
        if not before[own] >> other & 1:
            before[own] |= before[other]
            yield (consumer, i), (producer, j)


def _whole(footprints: Sequence[Touched]) -> Touched:
    """Return the union of what the tasks of a stage touch."""
    memories = {memory for own in footprints for memory in (*own.reads, *own.writes)}
    return Touched(
        {m: union(own.reads[m] for own in footprints if m in own.reads) for m in memories},
        {m: union(own.writes[m] for own in footprints if m in own.writes) for m in memories},
    )
