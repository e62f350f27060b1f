"""The candidates of a plan for a range of sizes -> candidates that are timed for a size as they will run for it."""

from __future__ import annotations

from dataclasses import replace

from korch.assembly.task import Task
from korch.candidate.candidate import Candidate
from korch.measure.cpu import CpuMeter
from korch.partition.join import Joined
from korch.pipeline.run import Run
from korch.provider.provider import Kernel
from korch.ranges.form import RangePlan
from korch.ranges.needed import Need
from korch.ranges.served import Served, likely_needs
from korch.runtime.trim import sized


def time_as_served(run: Run, plan: RangePlan) -> None:
    """Let the meter time kernels that leave out what a typical size of the plan does not need."""
    meter = run.meter
    if not isinstance(meter, CpuMeter):
        return
    target = meter.target

    def as_served(candidate: Candidate, kernel: Kernel) -> Kernel:
        return sized(kernel, candidate, plan, target)

    meter.sized = as_served
    needs = likely_needs(run.joined.graph, plan)
    run.tasks = [_served(task, run.joined, needs, plan) for task in run.tasks]


def _served(task: Task, joined: Joined, needs: dict[int, Need], plan: RangePlan) -> Task:
    """Return a block whose candidates say what is needed of them in some segment."""
    values = [joined.values[i] for i in task.block.instances]
    inputs = tuple(sorted(plan.size_inputs.items()))
    known: dict[int, Need] = {}

    def need(value: int) -> Need:
        if value not in known:
            known[value] = _of_any([needs.get(own[value], {}) for own in values])
        return known[value]

    def served(candidate: Candidate) -> Candidate:
        if candidate.offer.is_in_place:
            return candidate
        own = tuple(need(value) for value in candidate.group.outputs)
        return replace(candidate, served=Served(own, plan.timed, inputs)) if any(own) else candidate

    return replace(task, candidates=tuple(map(served, task.candidates)))


def _of_any(needs: list[Need]) -> Need:
    """Return what is needed if any of some needs is."""
    axes = set(needs[0]).intersection(*needs[1:])
    return {axis: frozenset().union(*(need[axis] for need in needs)) for axis in axes}
