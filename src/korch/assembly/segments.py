"""A model in segments -> plans of the whole, and what is proven of the best.

Survey all blocks in all interfaces; choose; search what was chosen to the end; choose again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from korch.assembly.assemble import Assembly, Choice
from korch.assembly.blocks import BlockSearch, Task, Tell
from korch.assembly.explore import scout
from korch.assembly.trace import Story, moving
from korch.candidate.candidate import Candidate
from korch.deadline import Deadline
from korch.explanation.counterfactual import Grouping, Groupings
from korch.explanation.savings import Savings, add_savings
from korch.measure.meter import AnyMeter
from korch.options import Options
from korch.partition.block import Partition
from korch.partition.join import Joined
from korch.program.problem import Certificate, Status
from korch.search.lazy import CONFIRM_SHARE, CONFIRMATIONS, Orchestration, Round

Steps = Mapping[tuple[int, int], tuple[Candidate, ...]]
"""What each block runs in an interface."""

REGROUP_SECONDS = 5.0
"""Longest for other groupings of the plans' kernels."""

CHOICES = 3
"""Most times that segments choose their interfaces anew."""


@dataclass(frozen=True)
class Outcome:
    """Plans of a whole model.

    Attributes:
        plans: by name; the first is the best that was found, the others are to hold it against.
        found: the result of the search.
        partition: what the report says of segments; None if the model is one.
        savings: what each rule saves.
        is_recalled: whether the model is one segment whose search an earlier run did.
        groupings: per plan and kernel, other groupings.
    """

    plans: dict[str, tuple[Candidate, ...]]
    found: Orchestration
    partition: dict[str, Any] | None = None
    savings: Savings = field(default_factory=dict)
    is_recalled: bool = False
    groupings: dict[str, Groupings] = field(default_factory=dict)


def search_segments(
    partition: Partition,
    joined: Joined,
    tasks: Sequence[Task],
    meter: AnyMeter,
    options: Options,
    deadline: Deadline,
    tell: Tell,
) -> Outcome:
    """Search a model block by block.

    Args:
        partition: its segments.
        joined: its graph.
        tasks: its blocks with their candidates.
        meter: costs.
        options: how to search.
        deadline: when to stop.
        tell: told of each round.

    Raises:
        InfeasibleError: a block has no plan.
    """
    assembly = Assembly(partition, joined, tasks, meter, options)
    story = Story(Counter(b for b, _ in _uses(assembly, assembly.plain_choice()).elements()))
    search = BlockSearch(tasks, meter, options, deadline.less(CONFIRM_SHARE), tell, story)

    def choose() -> Choice:
        chosen = assembly.choose(search.found)
        story.chose(_uses(assembly, chosen), search.found, chosen.objective_ns, chosen.bound_ns)
        return chosen

    has_time = not options.measure or scout(search, assembly)
    search.survey(is_hurried=not has_time)
    choice = choose()
    finished: set[tuple[int, int]] = set()
    for _ in range(CHOICES):
        used = _uses(assembly, choice)
        todo = {key: count for key, count in used.items() if key not in finished}
        if not todo:
            break
        search.finish(todo)
        finished |= todo.keys()
        search.tighten()
        choice = choose()
    for _ in range(CONFIRMATIONS):
        whole = assembly.steps(choice, lambda b, j: search.found[b, j].steps)
        if not search.confirm(_uses(assembly, choice), whole, deadline):
            break
        choice = choose()
    best: Steps = {key: one.steps for key, one in search.found.items()}
    made = {"optimal": (choice, best)}
    made |= _baselines(assembly, search)
    plans = {
        name: assembly.steps(chosen, lambda b, j, of=of: of[b, j])  # type: ignore[misc]
        for name, (chosen, of) in made.items()
    }
    found = _result(search, choice, tasks, sum(map(search.estimate_ns, plans["optimal"])))
    uses = _uses(assembly, choice)
    savings = add_savings([(search.savings(b, j), count) for (b, j), count in uses.items()])
    described = _describe(partition, tasks, search, choice, uses)
    end = deadline.until(time.monotonic() + REGROUP_SECONDS)
    groupings = {
        name: _groupings(assembly, search, chosen, of, plans[name], end)
        for name, (chosen, of) in made.items()
        if options.measure and not end.is_over
    }
    return Outcome(plans, found, described, savings, groupings=groupings)


def _groupings(
    assembly: Assembly,
    search: BlockSearch,
    choice: Choice,
    of_block: Steps,
    whole: Sequence[Candidate],
    deadline: Deadline,
) -> Groupings:
    """Return the other groupings of a plan's kernels within their segments."""
    place = {_identity(step): n for n, step in enumerate(whole)}
    known = {key: search.groupings(*key, of_block[key], deadline) for key in _uses(assembly, choice)}
    found: list[tuple[Grouping, ...]] = [()] * len(whole)
    for i, j in enumerate(choice.interfaces):
        if j < 0:
            continue
        key = assembly.block_of[i], j
        at = [place.get(_identity(assembly.joined.place(i, c))) for c in of_block[key]]
        for n, rows in zip(at, known[key], strict=True):
            if n is not None:
                found[n] = tuple(filter(None, (row.moved(at) for row in rows)))
    return tuple(found)


def _identity(step: Candidate) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return step.key, step.group.primitives, step.group.outputs


def _uses(assembly: Assembly, choice: Choice) -> Counter[tuple[int, int]]:
    """Return how often a choice has each block in each interface."""
    return Counter((assembly.block_of[i], j) for i, j in enumerate(choice.interfaces) if j >= 0)


def _baselines(assembly: Assembly, search: BlockSearch) -> dict[str, tuple[Choice, Steps]]:
    """Return the plans that all blocks have, as a choice and what each block runs."""
    choice = assembly.plain_choice()
    of_block = {key: search.baselines(key[0]) for key in _uses(assembly, choice)}
    names = [n for n in next(iter(of_block.values()), {}) if all(n in p for p in of_block.values())]
    return {n: (choice, {key: plans[n] for key, plans in of_block.items()}) for n in names}


def _result(search: BlockSearch, choice: Choice, tasks: Sequence[Task], total_ns: int) -> Orchestration:
    """Return the whole search as one result; its steps are in the plans.

    The plan may cost less than the sum over its segments, as what two of them do is done once.
    """
    objective_ns = min(total_ns, choice.objective_ns)
    bound_ns = min(choice.bound_ns, objective_ns)
    found = list(search.found.values())
    best = [search.found[min(key for key in search.found if key[0] == b)] for b in range(len(tasks))]
    certificate = Certificate(
        status=Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE,
        objective_ns=objective_ns,
        bound_ns=bound_ns,
        kernels=sum(f.certificate.kernels for f in best),
        measured=sum(f.certificate.measured for f in best),
        is_measured=all(f.certificate.is_measured for f in best),
        seconds=sum(f.certificate.seconds for f in found),
    )
    measured = sum(f.distinct_measured for f in best)
    end = Round(bound_ns, objective_ns, measured, search.story.seconds)
    return Orchestration(
        steps=(),
        certificate=certificate,
        costs_ns=(),
        rounds=moving([*search.story.rounds, end]),
        measured=measured,
        distinct_measured=measured,
        failed=sum(f.failed for f in best),
        stopped_by_budget=any(f.stopped_by_budget for f in found),
    )


def _describe(
    partition: Partition, tasks: Sequence[Task], search: BlockSearch, choice: Choice, uses: Counter[tuple[int, int]]
) -> dict[str, Any]:
    """Return what the report says of segments."""
    blocks = [
        {
            "instances": list(task.block.instances),
            "primitives": len(task.block.graph.primitives),
            "candidates": len(task.candidates),
            "interfaces": [
                {
                    "layouts": str(interface) or "plain",
                    "used": uses[b, j],
                    "objective_ns": one.certificate.objective_ns,
                    "bound_ns": one.certificate.bound_ns,
                    "status": one.certificate.status.value,
                }
                for j, interface in enumerate(task.interfaces)
                if (one := search.found.get((b, j))) is not None
            ],
            "searches": [
                {**one, "layouts": str(task.interfaces[one["interface"]]) or "plain"}
                for one in search.story.of_block(b)
            ],
        }
        for b, task in enumerate(tasks)
    ]
    cuts = [
        {
            "values": sorted(instance.segment.values[value] for _, value in instance.segment.graph.outputs),
            "price_bytes": instance.segment.price_bytes,
        }
        for instance in partition.instances
    ]
    return {
        "segments": len(partition.instances),
        "different": len(tasks),
        "programs": len(search.found),
        "layout_changes": sum(map(len, choice.changes)),
        "bound_holds_for": "plans in which no kernel crosses a cut, values at cuts are in the "
        "layouts considered, and each segment changes the layouts of what it reads by itself",
        "blocks": blocks,
        "cuts": cuts,
    }
