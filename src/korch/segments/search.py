"""A model in segments -> plans of the whole model, and the certificate of the best one.

The search finds a first plan for each block and interface, chooses an interface for each segment, refines the
plans of the chosen interfaces, and chooses again. A small model is one block with one interface: the block's
plan is the model's plan.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from korch.binary_program.problem import Certificate, Status
from korch.candidate.candidate import Candidate
from korch.options import Options
from korch.report.alternatives.counterfactual import Grouping, Groupings
from korch.report.alternatives.savings import Savings, add_savings
from korch.search.ledger import Ledger
from korch.search.price import estimate_ns
from korch.search.result import Orchestration, PlanName
from korch.segments.assemble import Assembly, SegmentChoice
from korch.segments.block import Partition
from korch.segments.block_search import BlockInterface, BlockSearch, OnRound, unheard
from korch.segments.block_task import BlockTask
from korch.segments.explore import explore
from korch.segments.join import Joined
from korch.segments.record import BlockRecord, CutRecord, InterfaceRecord, PartitionRecord
from korch.segments.trace import SearchTrace, changed_rounds
from korch.system.deadline import Deadline

CONFIRMATIONS = 6  # how often the kernels of a plan are measured again, and a plan is chosen again
CONFIRM_SHARE = 0.06  # share of the budget that is reserved for these measurements
CHOICES = 3  # how often segments choose their interfaces
GROUPINGS_SECONDS = 5.0  # time of the solves for all groupings

Uses = Counter[BlockInterface]
"""How often a plan uses each block in each interface."""

Steps = Mapping[BlockInterface, Sequence[Candidate]]
"""The kernels of the plan of each block and interface."""


@dataclass(frozen=True)
class Outcome:
    """Plans of a whole model."""

    # plans by name; the first is the best plan, the others are compared with it
    plans: dict[str, tuple[Candidate, ...]]
    found: Orchestration  # the result of the search
    # the record of the segments for the report; None if the model is one segment
    partition: PartitionRecord | None = None
    savings: Savings = field(default_factory=dict)  # the time that each rule saves
    is_recalled: bool = False  # whether the model is one segment whose search was done by an earlier run
    groupings: dict[str, Groupings] = field(default_factory=dict)  # per plan and kernel, alternative groupings


@dataclass(frozen=True)
class Segmented:
    """A model to search."""

    partition: Partition  # its segments
    joined: Joined  # its graph
    tasks: Sequence[BlockTask]  # its blocks with their candidates


def search_segments(
    model: Segmented, ledger: Ledger, options: Options, deadline: Deadline, on_round: OnRound = unheard
) -> Outcome:
    """Search a model block by block.

    Raises:
        InfeasibleError: a block has no plan.
    """
    partition, tasks = model.partition, model.tasks
    assembly = Assembly(partition, model.joined, tasks, ledger, options)
    trace = SearchTrace(assembly.block_counts())
    search = BlockSearch(tasks, ledger, options, deadline.less(CONFIRM_SHARE), on_round, trace)
    choice = _search(assembly, search, deadline)
    uses = assembly.uses(choice, search.blocks)
    likely_ns = search.calibrate(uses, deadline)
    made: dict[str, tuple[SegmentChoice, Steps]] = {
        PlanName.SEARCHED: (choice, {one: one.result.steps for one in search.planned})
    }
    made |= _baselines(assembly, search, choice)
    if second := search.runner_up():
        made[PlanName.SECOND] = (choice, dict.fromkeys(uses, second))
    plans = {name: _steps(assembly, search, *plan) for name, plan in made.items()}
    found = _result(search, choice, plans[PlanName.SEARCHED])
    if likely_ns is not None and not search.is_whole:
        found = replace(found, certificate=replace(found.certificate, calibrated_ns=assembly.least_ns(likely_ns)))
    savings = add_savings([(search.savings(one), count) for one, count in uses.items()])
    described = None if partition.is_whole else _describe(partition, search, choice, uses)
    is_recalled = partition.is_whole and all(row.is_recalled for row in trace.searches)
    end = deadline.until(time.monotonic() + GROUPINGS_SECONDS)
    groupings = {
        name: _groupings(assembly, search, *plan, plans[name], end)
        for name, plan in made.items()
        if options.measure and not end.is_over
    }
    return Outcome(plans, found, described, savings, is_recalled, groupings)


def _search(assembly: Assembly, search: BlockSearch, deadline: Deadline) -> SegmentChoice:
    """Search all blocks; return the best choice of interfaces."""
    if search.is_whole:
        search.find_whole()
    else:
        has_time = not search.options.measure or explore(search, assembly)
        search.find_first(is_hurried=not has_time)
    choice = _choose(assembly, search)
    refined: set[BlockInterface] = set()
    for _ in range(0 if search.is_whole else CHOICES):
        used = assembly.uses(choice, search.blocks)
        todo = {one: count for one, count in used.items() if one not in refined}
        if not todo:
            break
        search.refine(todo)
        refined |= todo.keys()
        search.tighten()
        choice = _choose(assembly, search)
    for _ in range(CONFIRMATIONS):
        whole = _steps(assembly, search, choice, {one: one.result.steps for one in search.planned})
        if not search.confirm(assembly.uses(choice, search.blocks), whole, deadline):
            break
        choice = _choose(assembly, search)
    return choice


def _choose(assembly: Assembly, search: BlockSearch) -> SegmentChoice:
    """Choose the interfaces of all segments, and record the choice in the trace."""
    found = {one.key: one.result for one in search.planned}
    choice = assembly.choose({key: result.certificate for key, result in found.items()})
    uses = {one.key: count for one, count in assembly.uses(choice, search.blocks).items()}
    search.trace.record_choice(uses, found, choice.objective_ns, choice.bound_ns)
    return choice


def _steps(assembly: Assembly, search: BlockSearch, choice: SegmentChoice, steps: Steps) -> tuple[Candidate, ...]:
    """Return the kernels of the whole model."""
    return assembly.steps(choice, lambda b, j: steps[search.blocks[b][j]])


def _groupings(
    assembly: Assembly,
    search: BlockSearch,
    choice: SegmentChoice,
    steps: Steps,
    whole: Sequence[Candidate],
    deadline: Deadline,
) -> Groupings:
    """Return alternative groupings of a plan's kernels within their segments."""
    place = {_identity(step): n for n, step in enumerate(whole)}
    known = {one: search.groupings(one, steps[one], deadline) for one in assembly.uses(choice, search.blocks)}
    found: list[tuple[Grouping, ...]] = [()] * len(whole)
    for i, j in enumerate(choice.interfaces):
        if j < 0:
            continue
        one = search.blocks[assembly.block_of[i]][j]
        at = [place.get(_identity(assembly.joined.place(i, c))) for c in steps[one]]
        for n, rows in zip(at, known[one], strict=True):
            if n is not None:
                found[n] = tuple(filter(None, (row.moved(at) for row in rows)))
    return tuple(found)


def _identity(step: Candidate) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return step.key, step.group.primitives, step.group.outputs


def _baselines(
    assembly: Assembly, search: BlockSearch, choice: SegmentChoice
) -> dict[str, tuple[SegmentChoice, Steps]]:
    """Return the baseline plans that every block has in its chosen interfaces, as the kernels of each block."""
    plans = {one: search.baselines(one) for one in assembly.uses(choice, search.blocks)}
    names = [name for name in next(iter(plans.values()), {}) if all(name in own for own in plans.values())]
    return {name: (choice, {one: own[name] for one, own in plans.items()}) for name in names}


def _result(search: BlockSearch, choice: SegmentChoice, steps: Sequence[Candidate]) -> Orchestration:
    """Return the result of the whole search. If there are several segments, its steps are empty: see `Outcome.plans`.

    The plan may cost less than the sum over its segments, since a step that two segments share runs once.
    """
    if search.is_whole:
        return search.blocks[0][0].result
    total_ns = sum(estimate_ns(search.ledger, step) for step in steps)
    # A block's result may be older than the last times of kernels that it shares with another block.
    is_known = all(search.ledger.cost_ns(step)[1] for step in steps)
    objective_ns = total_ns if is_known else min(total_ns, choice.objective_ns)
    bound_ns = min(choice.bound_ns, objective_ns)
    found = [one.result for one in search.planned]
    best = [next(one.result for one in block if one.found is not None) for block in search.blocks]
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
    end = replace(search.trace.rounds[-1], bound_ns=bound_ns, incumbent_ns=objective_ns, measured=measured)
    return Orchestration(
        steps=(),
        certificate=certificate,
        costs_ns=(),
        rounds=changed_rounds([*search.trace.rounds, end]),
        distinct_measured=measured,
        failed=sum(f.failed for f in best),
        stopped_by_budget=any(f.stopped_by_budget for f in found),
    )


def _describe(partition: Partition, search: BlockSearch, choice: SegmentChoice, uses: Uses) -> PartitionRecord:
    """Return the record of the segments for the report."""
    return PartitionRecord(
        segments=len(partition.instances),
        different=len(search.blocks),
        programs=len(search.planned),
        layout_changes=sum(map(len, choice.changes)),
        blocks=tuple(_describe_block(block, search, uses) for block in search.blocks),
        cuts=tuple(CutRecord(tuple(sorted(one.outputs)), one.price_bytes) for one in partition.instances),
    )


def _describe_block(block: Sequence[BlockInterface], search: BlockSearch, uses: Uses) -> BlockRecord:
    """Return the record of a block for the report."""
    b, task = block[0].key[0], block[0].task
    interfaces = []
    for one in block:
        if one.found is not None:
            proven = one.found.certificate
            layouts = str(one.interface) or "plain"
            interfaces.append(InterfaceRecord(layouts, uses[one], proven.objective_ns, proven.bound_ns, proven.status))
    return BlockRecord(
        instances=tuple(task.block.instances),
        primitives=len(task.block.graph.primitives),
        candidates=len(task.candidates),
        layouts=tuple(str(interface) or "plain" for interface in task.interfaces),
        interfaces=tuple(interfaces),
        searches=search.trace.of_block(b),
    )
