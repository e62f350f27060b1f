"""The candidates of a plan for a range of sizes -> candidates that are timed for a size as they will run for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from korch.assembly.task import Task
from korch.candidate.candidate import Candidate, Group, Offer
from korch.measure.cpu import CpuMeter
from korch.partition.join import Joined
from korch.pipeline.run import Run
from korch.provider.provider import Kernel
from korch.ranges.endings import Ending, endings_of, read
from korch.ranges.filled import ends
from korch.ranges.form import RangePlan
from korch.ranges.needed import Ends, Need
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
    graph = run.joined.graph
    found = ends(graph, range(len(graph.primitives)), plan)
    ended = read(found, [(p, axis) for p, own in found.items() for axis in own], target.lanes)
    needs = likely_needs(graph, plan, ended)
    run.tasks = [_served(task, run.joined, needs, found, plan) for task in run.tasks]


def _served(task: Task, joined: Joined, needs: dict[int, Need], found: Mapping[int, Ends], plan: RangePlan) -> Task:
    """Return a block whose candidates say what is needed of them in some segment, and what they read."""
    values = [joined.values[i] for i in task.block.instances]
    inputs = tuple(sorted(plan.size_inputs.items()))
    known: dict[int, Need] = {}
    ending: dict[tuple[int, ...], tuple[Ending, ...]] = {}

    def need(value: int) -> Need:
        if value not in known:
            known[value] = _of_any([needs.get(own[value], {}) for own in values])
        return known[value]

    def endings(group: Group) -> tuple[Ending, ...]:
        if group.primitives not in ending:
            placed = [joined.place(i, Candidate(group, "", Offer((), ()))).group for i in task.block.instances]
            each = [endings_of(joined.graph, own.primitives, own.inputs, found) for own in placed]
            ending[group.primitives] = each[0] if len({tuple(map(str, own)) for own in each}) == 1 else ()
        return ending[group.primitives]

    def served(candidate: Candidate) -> Candidate:
        if candidate.offer.is_in_place:
            return candidate
        own, some = tuple(need(value) for value in candidate.group.outputs), endings(candidate.group)
        if not some and not any(own):
            return candidate
        return replace(candidate, served=Served(own, plan.timed, inputs, some))

    return replace(task, candidates=tuple(map(served, task.candidates)))


def _of_any(needs: list[Need]) -> Need:
    """Return what is needed if any of some needs is."""
    axes = set(needs[0]).intersection(*needs[1:])
    return {axis: frozenset().union(*(need[axis] for need in needs)) for axis in axes}
