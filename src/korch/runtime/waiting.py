"""Kernels of a plan, and task queues -> the share of the threads' time spent waiting in a simulated run, and for what.

The time of a task is its kernel's cost divided over the grid points. A kernel of which only the cost is known (a
library's) counts as work of all threads.
"""

from collections.abc import Sequence

from korch.events.kernels import Use
from korch.events.schedule import TaskSegment
from korch.events.simulate import JOIN_NS
from korch.provider.provider import Threading
from korch.runtime.record import WaitingRecord, WaitRecord
from korch.target import Target
from korch.tile.ir.bind import largest

MOST_WAITS = 8
"""The number of waits that are recorded: those with the largest shares."""


def waiting_of(uses: Sequence[Use], segments: Sequence[TaskSegment], target: Target) -> WaitingRecord | None:
    """Return the waits of a simulated run; None for one thread.

    `segments`: the kernels that run as tasks; after all other kernels, threads join.
    """
    if target.threads == 1:
        return None
    waits_ns: dict[tuple[int, int], float] = {}
    total_ns, waiting_ns, tasked = 0.0, 0.0, set[int]()
    for segment in segments:
        tasked |= set(range(*segment.steps))
        total_ns += segment.simulated.total_ns
        waiting_ns += sum(segment.simulated.waiting_ns)
        steps = [stage.use.step for stage in segment.stages]
        for (stage, waited), time_ns in segment.simulated.waits_ns.items():
            pair = steps[stage], steps[waited]
            waits_ns[pair] = waits_ns.get(pair, 0.0) + time_ns
    for use in uses:
        if use.step in tasked or not use.kernel.symbol:
            continue
        idle = _idle_share(use, target)
        total_ns += use.cost_ns
        waits_ns[use.step, use.step] = idle * use.cost_ns * target.threads
        waiting_ns += waits_ns[use.step, use.step] + JOIN_NS * target.threads * (use.kernel.threading is Threading.TEAM)
    all_ns = max(1.0, total_ns * target.threads)
    longest = sorted(waits_ns.items(), key=lambda item: -item[1])[:MOST_WAITS]
    records = (WaitRecord(step, waited, time_ns / all_ns) for (step, waited), time_ns in longest if time_ns)
    return WaitingRecord(min(1.0, waiting_ns / all_ns), bool(segments), tuple(records))


def _idle_share(use: Use, target: Target) -> float:
    """Return the share of the threads' time in a kernel that they spend waiting for its last thread."""
    program, threads = use.kernel.program, target.threads
    if use.kernel.threading is Threading.CALLER:
        return 1 - 1 / threads
    if program is None or use.kernel.threading is not Threading.TEAM:
        return 0.0
    works = [(stage.work, stage.tasks) for stage in largest(program).stages]
    all_work = sum(work for work, _ in works)
    busy = sum(work * tasks / (-(-tasks // threads) * threads) for work, tasks in works if tasks)
    return 1 - busy / all_work if all_work else 0.0
