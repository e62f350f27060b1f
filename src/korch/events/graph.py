"""Tasks of a plan's kernels, what they touch, and which of them wait for others.

A *stage* has tasks that may run in any order; each is a range of grid points of a tile program's stage, or a whole
kernel. The *event* of a task is its end: other tasks begin after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from korch.events.spans import NOTHING, Spans, overlapping, unique_pairs
from korch.primitive.op import Array

Task = tuple[int, int]
"""The number of a stage, and that of a task in it."""

Waits = dict[Task, tuple[Task, ...]]
"""For each task, in the order of the plan, the tasks whose ends it waits for."""


def share(tasks: int, thread: int, threads: int) -> int:
    """Return the first task of a thread if some tasks are divided evenly among threads."""
    return tasks // threads * thread + min(thread, tasks % threads)


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
