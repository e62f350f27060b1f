"""Blocks of a model -> a plan for each -> plans for the whole.

Each block is searched once, whatever the number of its instances. A plan of the whole runs the
segments one after the other, each by its block's plan; its cost is the sum, and the sum of the
bounds holds for all plans whose kernels don't cross a cut.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import EnumerationReport, enumerate_groups
from korch.measure.meter import CandidateMeter
from korch.options import Options
from korch.orchestrate.baselines import baseline_plans
from korch.orchestrate.instance import check_every_primitive_runs, collect_candidates
from korch.orchestrate.lazy import FREE_MEASUREMENTS, LazyLoop, Orchestration, Round
from korch.orchestrate.problem import Certificate, Status
from korch.orchestrate.recall import Solved, keep_solved, recall_solved
from korch.partition.block import Block, Partition
from korch.partition.join import Joined

logger = logging.getLogger("korch.orchestrate")

LEAST_FREE = 150
"""Measurements that each block may have at least, of those that a model has for free."""


@dataclass(frozen=True)
class Task:
    """A block with what may run it."""

    block: Block
    candidates: tuple[Candidate, ...]
    enumeration: EnumerationReport

    @property
    def count(self) -> int:
        """How often the block is in the model."""
        return len(self.block.instances)


def prepare(block: Block, meter: CandidateMeter, options: Options) -> Task:
    """Return a block's candidates.

    Raises:
        InfeasibleError: a primitive is in no candidate.
    """
    groups, enumeration = enumerate_groups(block.graph, options)
    candidates, refusals = collect_candidates(block.graph, groups, meter.providers, meter.target)
    check_every_primitive_runs(block.graph, candidates, refusals)
    return Task(block, candidates, enumeration)


def search_blocks(
    tasks: Sequence[Task], meter: CandidateMeter, options: Options, deadline_s: float | None,
    tell: Callable[[int, Round], None],
) -> list[Solved]:  # fmt: skip
    """Search every block; what was searched before is recalled.

    Args:
        tasks: the blocks.
        meter: costs.
        options: how to search; the budget is what `deadline_s` leaves of it.
        deadline_s: when to stop, on the monotonic clock.
        tell: told of each round, with the block's position.
    """
    primitives = [len(task.block.graph.primitives) for task in tasks]
    weights = [n * task.count for n, task in zip(primitives, tasks, strict=True)]
    found = []
    for i, task in enumerate(tasks):
        free = FREE_MEASUREMENTS
        if len(tasks) > 1:
            free = max(LEAST_FREE, free * primitives[i] // sum(primitives))
        solved = recall_solved(meter.database, task.candidates, options, free)
        if solved is None:
            until_s = _share(deadline_s, weights[i:])
            solved = _search(task, meter, options, until_s, free, partial(tell, i))
        found.append(solved)
    return found


def _share(deadline_s: float | None, weights: Sequence[int]) -> float | None:
    """Return when the first of several blocks must end, by their weights."""
    if deadline_s is None:
        return None
    now_s = time.monotonic()
    return now_s + max(0.0, deadline_s - now_s) * weights[0] / max(1, sum(weights))


def _search(
    task: Task, meter: CandidateMeter, options: Options, deadline_s: float | None, free: int,
    tell: Callable[[Round], None],
) -> Solved:  # fmt: skip
    loop = LazyLoop(task.block.graph, task.candidates, meter, options, deadline_s, tell, free)
    found = loop.run()
    plans = {"optimal": found.steps}
    plans |= baseline_plans(task.block.graph, loop.usable, loop.cost_ns, options)
    solved = Solved(found, plans)
    keep_solved(meter.database, task.candidates, options, solved, free)
    return solved


def whole_plans(
    partition: Partition, joined: Joined, solved: Sequence[Solved]
) -> dict[str, tuple[Candidate, ...]]:
    """Return the plans of the whole model; one that some block lacks is left out."""
    block_of = {i: b for b, block in enumerate(partition.blocks) for i in block.instances}
    names = [n for n in solved[0].plans if all(n in other.plans for other in solved)]
    return {
        name: tuple(
            joined.place(i, candidate)
            for i in range(len(partition.instances))
            for candidate in solved[block_of[i]].plans[name]
        )
        for name in names
    }


def whole_result(tasks: Sequence[Task], solved: Sequence[Solved]) -> Orchestration:
    """Return the sum of the blocks' results, each as often as it is in the model."""
    if len(tasks) == 1 and tasks[0].count == 1:
        return solved[0].found
    found = [s.found for s in solved]
    certificates = [f.certificate for f in found]
    counts = [task.count for task in tasks]
    objective_ns = sum((c.objective_ns or 0) * n for c, n in zip(certificates, counts, strict=True))
    bound_ns = sum(c.bound_ns * n for c, n in zip(certificates, counts, strict=True))
    certificate = Certificate(
        status=Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE,
        objective_ns=objective_ns, bound_ns=bound_ns,
        kernels=sum(c.kernels for c in certificates),
        measured=sum(c.measured for c in certificates),
        is_measured=all(c.is_measured for c in certificates),
        seconds=sum(c.seconds for c in certificates),
    )  # fmt: skip
    return Orchestration(
        steps=(), certificate=certificate, costs_ns=(), rounds=_total_rounds(counts, found),
        measured=sum(f.measured for f in found),
        distinct_measured=sum(f.distinct_measured for f in found),
        failed=sum(f.failed for f in found),
        stopped_by_budget=any(f.stopped_by_budget for f in found),
    )  # fmt: skip


def _total_rounds(counts: Sequence[int], found: Sequence[Orchestration]) -> tuple[Round, ...]:
    """Return the rounds of all blocks: bounds and costs of what has been searched so far."""
    rounds: list[Round] = []
    bound_ns = cost_ns = measured = 0
    seconds = 0.0
    for count, one in zip(counts, found, strict=True):
        for entry in one.rounds:
            incumbent_ns = None
            if entry.incumbent_ns is not None:
                incumbent_ns = cost_ns + count * entry.incumbent_ns
            rounds.append(replace(
                entry, bound_ns=bound_ns + count * entry.bound_ns, incumbent_ns=incumbent_ns,
                measured=measured + entry.measured, seconds=seconds + entry.seconds,
            ))  # fmt: skip
        bound_ns += count * one.certificate.bound_ns
        cost_ns += count * (one.certificate.objective_ns or 0)
        measured += one.distinct_measured
        seconds += one.rounds[-1].seconds if one.rounds else 0.0
    return tuple(rounds)
