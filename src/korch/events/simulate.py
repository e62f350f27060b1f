"""Queues, and the time of each task -> the time of a run, and the waiting time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from korch.events.graph import Task
from korch.events.queues import Queues

# Costs of communication between threads, measured on two cores of an Intel Xeon.
JOIN_NS = 800.0  # a join of all threads, without the wait for the last one
WAIT_NS = 100.0  # the time until a thread sees that a task of another thread has ended


@dataclass(frozen=True)
class Simulated:
    """A simulated run."""

    total_ns: float  # its time
    waiting_ns: tuple[float, ...]  # how long each thread waits
    # the waiting time, summed over threads, by the stage that waits and the stage that it waits for
    waits_ns: Mapping[tuple[int, int], float] = field(default_factory=dict)


def simulate_queues(queues: Queues, times_ns: Mapping[Task, float]) -> Simulated:
    """Return the simulated run of queues that don't wait for each other forever."""
    ends_ns: list[list[float]] = [[] for _ in queues]
    working_ns = [0.0] * len(queues)
    waits_ns: dict[tuple[int, int], float] = {}
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for q, queue in enumerate(queues):
            while len(ends_ns[q]) < len(queue):
                entry = queue[len(ends_ns[q])]
                if any(len(ends_ns[other]) < n for other, n in entry.waits):
                    break
                free_ns = ends_ns[q][-1] if ends_ns[q] else 0.0
                waits = [(ends_ns[other][n - 1] + WAIT_NS, queues[other][n - 1].task[0]) for other, n in entry.waits]
                begin_ns, stage = max([(free_ns, -1), *waits])
                if begin_ns > free_ns:
                    pair = entry.task[0], stage
                    waits_ns[pair] = waits_ns.get(pair, 0.0) + begin_ns - free_ns
                ends_ns[q].append(begin_ns + times_ns[entry.task])
                working_ns[q] += times_ns[entry.task]
                is_stuck = False
    total_ns = max((own[-1] for own in ends_ns if own), default=0.0) + JOIN_NS
    return Simulated(total_ns, tuple(total_ns - own for own in working_ns), waits_ns)
