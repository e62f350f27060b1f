"""Consecutive kernels -> queues of threads, made by list scheduling from measured times.

Each thread has the tasks that a parallel loop would give it, so that it reads data that it has written itself. The
order comes from a simulation: a free thread takes, of its tasks that can begin first, one of the earliest stage, and
there the one with the longest path to the end. A task may begin before tasks of earlier kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.events.check import check_queues
from korch.events.derive import derive_waits
from korch.events.graph import Task, Waits
from korch.events.kernels import Splitter, TaskStage, Use
from korch.events.queues import Queues, make_queues
from korch.events.simulate import WAIT_NS, Simulated, simulate_queues
from korch.target import Target


@dataclass(frozen=True)
class TaskSegment:
    """Kernels that run as tasks."""

    stages: tuple[TaskStage, ...]  # the stages of the kernels, in order
    queues: Queues  # the tasks of each thread
    simulated: Simulated  # the simulated time of the queues

    @property
    def steps(self) -> tuple[int, int]:
        """The number of the first step, and the one after the last."""
        return self.stages[0].use.step, self.stages[-1].use.step + 1


def schedule_segment(uses: Sequence[Use], target: Target, parts: int = 1) -> TaskSegment:
    """Return the queues of some kernels.

    Args:
        uses: the kernels in order; all can run as tasks.
        target: the threads.
        parts: into how many tasks the grid points of each thread are divided.
    """
    splitter = Splitter(target, parts)
    stages: list[TaskStage] = []
    load_ns = [0.0] * target.threads
    for use in uses:
        own = splitter.stages(use, load_ns.index(min(load_ns)))
        for stage in own:
            for part, time_ns in zip(stage.parts, stage.times_ns, strict=True):
                load_ns[part.thread] += time_ns
        stages += own
    footprints = [stage.footprints for stage in stages]
    waits = derive_waits(footprints)
    times_ns = {(s, i): time_ns for s, stage in enumerate(stages) for i, time_ns in enumerate(stage.times_ns)}
    threads = {(s, i): part.thread for s, stage in enumerate(stages) for i, part in enumerate(stage.parts)}
    queues = make_queues(waits, list_orders(waits, times_ns, threads, target.threads))
    check_queues(queues, footprints)
    return TaskSegment(tuple(stages), queues, simulate_queues(queues, times_ns))


def list_orders(
    producers: Waits, times_ns: dict[Task, float], threads: dict[Task, int], count: int
) -> list[list[Task]]:
    """Return the order in which each thread runs its tasks."""
    paths_ns = path_times(producers, times_ns)
    consumers: dict[Task, list[Task]] = {task: [] for task in producers}
    for task, before in producers.items():
        for producer in before:
            consumers[producer].append(task)
    missing = {task: len(before) for task, before in producers.items()}
    ends_ns: dict[Task, float] = {}
    free_ns = [0.0] * count
    ready: list[list[Task]] = [[] for _ in range(count)]
    orders: list[list[Task]] = [[] for _ in range(count)]
    for task in (task for task, n in missing.items() if n == 0):
        ready[threads[task]].append(task)

    def begin_ns(task: Task) -> float:
        own = threads[task]
        return max([free_ns[own], *(ends_ns[p] + WAIT_NS * (threads[p] != own) for p in producers[task])])

    while any(ready):
        choices = ((begin_ns(task), task[0], -paths_ns[task], task) for own in ready for task in own)
        start_ns, _, _, task = min(choices)
        own = threads[task]
        ready[own].remove(task)
        orders[own].append(task)
        free_ns[own] = ends_ns[task] = start_ns + times_ns[task]
        for after in consumers[task]:
            missing[after] -= 1
            if missing[after] == 0:
                ready[threads[after]].append(after)
    return orders


def path_times(producers: Waits, times_ns: dict[Task, float]) -> dict[Task, float]:
    """Return the time from the beginning of each task to the end of the longest path of dependent tasks."""
    found = dict.fromkeys(producers, 0.0)
    for task in reversed(producers):  # tasks are in the order of the plan
        found[task] += times_ns[task]
        for producer in producers[task]:
            found[producer] = max(found[producer], found[task])
    return found
