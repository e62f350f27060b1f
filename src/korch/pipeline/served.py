"""The candidates of a plan for a range of sizes -> candidates that are timed for one size as they will run for it.

A search measures kernels at one size. The measured kernels are then timed at a few other sizes, which needs no
compilation, together with other kernels for the groups of its plan (such as kernels for few rows). Each of these sizes
gets the best plan of them.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.measure.cpu import CpuMeter
from korch.measure.meter import AnyMeter
from korch.pipeline.results import SizedPlan
from korch.pipeline.run import Run
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.loop import LoopAttributes
from korch.ranges.filled import ends
from korch.ranges.form import Extent, Sizes
from korch.ranges.masked import Masked
from korch.ranges.needed import Conditions, Ends, Need, in_whole_vectors, needs_of_plan
from korch.ranges.plan import AtSizes, RangePlan
from korch.ranges.served import Served
from korch.search.ledger import Ledger
from korch.search.measure import measure_some
from korch.search.result import PlanName
from korch.segments.block_task import BlockTask
from korch.segments.join import Joined
from korch.segments.search import Outcome, Segmented, search_segments
from korch.system.deadline import Deadline

VARIANT_GAIN = 0.97  # a plan for another size is kept if its time there is at most this share of that of other plans

logger = logging.getLogger("korch.pipeline")

Steps = tuple[Candidate, ...]


def time_as_served(tasks: Sequence[BlockTask], joined: Joined, meter: AnyMeter, plan: RangePlan) -> list[BlockTask]:
    """Return the tasks with candidates whose kernels compute what a size needs, timed for a typical size of the plan.

    Which elements of a value are needed does not depend on the kernels that are chosen, so that they fit together.
    """
    if not isinstance(meter, CpuMeter):
        return [*tasks]
    graph = joined.graph
    found = ends(graph, plan)
    whole_vectors = in_whole_vectors(_in_all_segments(tasks, joined, found), meter.target.lanes)
    needs = needs_of_plan(graph, plan, whole_vectors)
    trips = _trips(graph, plan)
    return [_served(task, joined, needs, (whole_vectors, trips), plan.timed) for task in tasks]


def _trips(graph: PrimitiveGraph, plan: RangePlan) -> dict[int, Extent]:
    """Return how often loops are repeated, by the primitive's number."""
    conditions, found = Conditions(graph, plan.hidden), dict[int, Extent]()
    for p, primitive in enumerate(graph.primitives):
        if isinstance(primitive.attributes, LoopAttributes) and primitive.attributes.is_counted:
            extent = conditions.trips(primitive)
            found |= {} if extent is None else {p: extent}
    return found


def _in_all_segments(tasks: Sequence[BlockTask], joined: Joined, found: Mapping[int, Ends]) -> dict[int, Ends]:
    """Return where reductions end that do so in all segments that share a kernel."""
    common = dict[int, Ends]()
    for task in tasks:
        firsts = [joined.first_primitives[i] for i in task.block.instances]
        for p in range(len(task.block.graph.primitives)):
            each = [found.get(first + p, {}) for first in firsts]
            own = {axis: extent for axis, extent in each[0].items() if all(e.get(axis) == extent for e in each)}
            common |= {first + p: own for first in firsts if own}
    return common


def _served(
    task: BlockTask,
    joined: Joined,
    needs: Mapping[int, Need],
    counts: tuple[Mapping[int, Ends], Mapping[int, Extent]],
    timed: Sizes,
) -> BlockTask:
    """Return a block whose candidates compute the elements needed in any of its segments.

    `counts`: by the primitive's number, where reductions end, and how often loops are repeated.
    """
    found, repeated = counts
    values = [joined.values[i] for i in task.block.instances]
    firsts = [joined.first_primitives[i] for i in task.block.instances]
    known: dict[int, Need] = {}
    first = firsts[0]

    def need(value: int) -> Need:
        if value not in known:
            known[value] = _of_any([needs.get(own[value], {}) for own in values])
        return known[value]

    def served(candidate: Candidate) -> Candidate:
        if candidate.offer.is_in_place:
            return candidate
        own = tuple(need(value) for value in candidate.group.outputs)
        numbers = candidate.group.numbers_in(task.block.graph)
        ended = {i: found[first + p] for i, p in enumerate(numbers) if first + p in found}
        trips = {repeated[begin + p] for begin in firsts for p in numbers if begin + p in repeated}
        if not ended and not any(own) and not trips:
            return candidate
        return replace(candidate, served=Served(own, ended, timed, trips.pop() if len(trips) == 1 else None))

    return replace(task, candidates=tuple(map(served, task.candidates)))


def _of_any(needs: list[Need]) -> Need:
    """Return the union of some needs: the elements that at least one of them includes."""
    axes = set(needs[0]).intersection(*needs[1:])
    return {axis: frozenset().union(*(need[axis] for need in needs)) for axis in axes}


def search_sizes(run: Run, model: Segmented, ledger: Ledger, outcome: Outcome, masked: Masked) -> list[SizedPlan]:
    """Return the best plan, and plans for other sizes that are faster there than it and than those found before.

    First, the kernels of the best plan that were chosen by estimates are measured. A search is left out if less time
    is left than the first search took until it had a plan.
    """
    best, rounds = outcome.plans[PlanName.SEARCHED], outcome.found.rounds
    needed_s = rounds[0].seconds if rounds else outcome.found.certificate.seconds
    unknown = list({c.key: c for c in best if not (ledger.cost_ns(c)[1] or c.offer.is_in_place)}.values())
    measure_some(ledger, unknown, run.build_deadline, needed=len(unknown))
    found, others = [(masked.plan.timed, best)], masked.others
    searched = {masked.plan.timed: (best, outcome.found.certificate.bound_ns)}
    options = replace(run.options, ablation=replace(run.options.ablation, baselines=False))
    groups = frozenset(candidate.group.key for candidate in best)
    for i, sizes in enumerate(others):
        end = run.build_deadline.shared(len(others) - i)
        left_s = ledger.left_s(end)
        if left_s is not None and left_s < needed_s:
            break
        run.tell("orchestrate", f"the best plan of what was measured at size {'x'.join(map(str, sizes))}")
        tasks = [_timed_at(task, sizes, ledger, groups) for task in model.tasks]
        known = [_all_at(plan, sizes) for _, plan in found]
        ledger.measure([c for plan in known for c in plan], end)
        try:
            outcome = search_segments(replace(model, tasks=tasks), ledger, options, end)
        except InfeasibleError as error:
            logger.info("there is no plan for size %s: %s", sizes, error)
            continue
        steps = outcome.plans[PlanName.SEARCHED]
        searched[sizes] = steps, outcome.found.certificate.bound_ns
        least_ns = min(_cost_ns(plan, ledger) for plan in known)
        if _cost_ns(steps, ledger) <= VARIANT_GAIN * least_ns:
            found.append((sizes, steps))
    return _with_sums(found, searched, ledger, run.build_deadline)


def _with_sums(
    plans: Sequence[tuple[Sizes, Steps]],
    searched: Mapping[Sizes, tuple[Steps, int]],
    ledger: Ledger,
    deadline: Deadline,
) -> list[SizedPlan]:
    """Return plans with the sums of their kernels at all sizes at which all of them are measured.

    `plans`: the plans, each with the sizes for which it was searched. `searched`: by size, the best plan found there,
    and the lower bound of all plans.
    """
    rows: list[list[AtSizes]] = [[] for _ in plans]
    for sizes, (steps, bound_ns) in searched.items():
        found = [_all_at(own, sizes) for _, own in plans]
        ledger.measure([c for own in found for c in own], deadline)
        if all(ledger.cost_ns(c)[1] or c.offer.is_in_place for own in (*found, steps) for c in own):
            sums = [_cost_ns(own, ledger) for own in found]
            best_ns = min(*sums, _cost_ns(steps, ledger))
            for row, sum_ns in zip(rows, sums, strict=True):
                row.append(AtSizes(sizes, sum_ns, best_ns, min(bound_ns, best_ns)))
    return [SizedPlan(sizes, own, tuple(row)) for (sizes, own), row in zip(plans, rows, strict=True)]


def _timed_at(task: BlockTask, sizes: Sizes, ledger: Ledger, groups: frozenset[str]) -> BlockTask:
    """Return a block with the candidates of some groups and all measured candidates, to be timed at other sizes."""
    own = (c for c in task.candidates if c.offer.is_in_place or c.group.key in groups or ledger.is_measured(c))
    return replace(task, candidates=_all_at(own, sizes))


def _all_at(candidates: Iterable[Candidate], sizes: Sizes) -> Steps:
    return tuple(c if c.served is None else replace(c, served=replace(c.served, sizes=sizes)) for c in candidates)


def _cost_ns(steps: Steps, ledger: Ledger) -> int:
    return sum(ledger.cost_ns(c)[0] for c in steps)
