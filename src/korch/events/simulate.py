"""Queues, or stages with a join after each, and the time of each task -> the time of a run, and the waiting time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from korch.events.graph import Task, TaskGraph
from korch.events.queues import Queues


@dataclass(frozen=True)
class CoreCosts:
    """The costs of communication between threads, measured on two cores of an Intel Xeon."""

    join_ns: float = 800.0  # a join of all threads, without the wait for the last one
    wait_ns: float = 100.0  # the time until a thread sees that a task of another thread has ended
    # the extra time for a byte from another core's cache, compared with the thread's own cache
    fetch_ns_per_byte: float = 0.06


DEFAULT_COSTS = CoreCosts()


@dataclass(frozen=True)
class Simulated:
    """A simulated run."""

    total_ns: float  # its time
    waiting_ns: tuple[float, ...]  # how long each thread waits
    # the waiting time, summed over threads, by the stage that waits and the stage that it waits for. At a join, a stage
    # waits for itself.
    waits_ns: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @property
    def share_waiting(self) -> float:
        """The part of all threads' time in which they wait."""
        return sum(self.waiting_ns) / max(1.0, self.total_ns * len(self.waiting_ns))


def simulate_queues(queues: Queues, times_ns: Mapping[Task, float], costs: CoreCosts = DEFAULT_COSTS) -> Simulated:
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
                waits = [
                    (ends_ns[other][n - 1] + costs.wait_ns, queues[other][n - 1].task[0]) for other, n in entry.waits
                ]
                begin_ns, stage = max([(free_ns, -1), *waits])
                if begin_ns > free_ns:
                    pair = entry.task[0], stage
                    waits_ns[pair] = waits_ns.get(pair, 0.0) + begin_ns - free_ns
                ends_ns[q].append(begin_ns + times_ns[entry.task])
                working_ns[q] += times_ns[entry.task]
                is_stuck = False
    total_ns = max((own[-1] for own in ends_ns if own), default=0.0) + costs.join_ns
    return Simulated(total_ns, tuple(total_ns - own for own in working_ns), waits_ns)


def simulate_joins(
    graph: TaskGraph,
    times_ns: Mapping[Task, float],
    threads: Mapping[Task, int],
    count: int,
    costs: CoreCosts = DEFAULT_COSTS,
) -> Simulated:
    """Return the simulated run of stages one after another, with a join after each stage of several tasks."""
    total_ns, working_ns = 0.0, [0.0] * count
    waits_ns: dict[tuple[int, int], float] = {}
    for s, stage in enumerate(graph.stages):
        own_ns = [0.0] * count
        for i in range(stage.tasks):
            own_ns[threads[s, i]] += times_ns[s, i]
        total_ns += max(own_ns) + costs.join_ns * (stage.tasks > 1)
        working_ns = [a + b for a, b in zip(working_ns, own_ns, strict=True)]
        waits_ns[s, s] = sum(max(own_ns) - own for own in own_ns)
    return Simulated(total_ns, tuple(total_ns - own for own in working_ns), waits_ns)
