"""Loops of a model -> plans of their iterations.

An iteration is searched like a small model, with the same meter, and before the model itself: for the model, a loop is
one primitive that the provider of `korch.runtime.loop` runs with the plan that was found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from korch.candidate.candidate import Candidate, Refusal, make_group
from korch.candidate.layout import Layout
from korch.equivalence.rules import select_rules
from korch.equivalence.saturate import SaturationReport, saturate
from korch.errors import InfeasibleError, UnprovidedError
from korch.measure.cpu import CpuMeter
from korch.options import Options
from korch.pipeline.run import Run
from korch.primitive.graph import Constant, PrimitiveGraph
from korch.primitive.lowering import lower_products
from korch.primitive.op import Array
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.reference import body_of
from korch.primitive.types import ValueType
from korch.provider.provider import Kernel
from korch.provider.teams import team_refusal
from korch.runtime.bind import PlanStep, bind_steps
from korch.runtime.loop import LoopKey, LoopPlan, LoopProvider, loop_key
from korch.search.infeasible import where_of
from korch.search.ledger import Ledger
from korch.search.result import PlanName
from korch.segments.block import Partition, find_blocks
from korch.segments.block_task import prepare_all
from korch.segments.join import join
from korch.segments.search import Segmented, search_segments
from korch.segments.segment import whole_segment
from korch.system.deadline import Deadline

LEAST_WEIGHT = 16
"""The least elements of a constant that kernels may ask for in a layout of their own."""

MOST_EMBEDDED = 4096
"""The most elements of a constant of an iteration that is written in the source of the loop's kernel."""

Plans = dict[LoopKey, LoopPlan | Refusal]


def plan_loops(run: Run, partition: Partition, ledger: Ledger) -> None:
    """Search a plan for the iterations of each loop, and let the ledger's meter build loops from them.

    Raises:
        UnprovidedError: there is a loop, and the target is no CPU.
    """
    graphs = [block.graph for block in partition.blocks]
    loops = [
        (graph, i)
        for graph in graphs
        for i, p in enumerate(graph.primitives)
        if isinstance(p.attributes, LoopAttributes)
    ]
    if not loops:
        return
    if not isinstance(ledger.meter, CpuMeter):
        hint = "On a device the host runs it, without --dry-run; or use --target cpu"
        raise UnprovidedError("kernels of loops are generated for CPUs only", where_of(*loops[0]), hint=hint)
    plans: Plans = {}
    ledger.meter.add_provider(LoopProvider(plans))
    _add_plans(run, ledger, graphs, plans, run.deadline.shared(2))


def _add_plans(run: Run, ledger: Ledger, graphs: Sequence[PrimitiveGraph], plans: Plans, deadline: Deadline) -> None:
    """Add the plans for the loops of some graphs, which share the time."""
    keys = [key for key in dict.fromkeys(key for graph in graphs for key in _loops(graph)) if key not in plans]
    for i, (loop, fixed) in enumerate(keys):
        graph, weights = _iteration(loop, fixed)
        end = deadline.shared(len(keys) - i)
        _add_plans(run, ledger, [graph], plans, end.shared(2))
        plan = plans[loop, fixed] = _planned(run.options, ledger, graph, weights, end)
        found = f"none: {plan.reason}" if isinstance(plan, Refusal) else plan.text
        run.tell("candidates", f"plan of a loop of {loop.trips} iterations: {found}")


def _loops(graph: PrimitiveGraph) -> Iterator[LoopKey]:
    for p, primitive in enumerate(graph.primitives):
        if isinstance(primitive.attributes, LoopAttributes):
            key = loop_key(make_group(graph, (p,), (primitive.output,)))
            if not isinstance(key, Refusal):
                yield key


def _iteration(loop: LoopAttributes, fixed: frozenset[int]) -> tuple[PrimitiveGraph, dict[str, int]]:
    """Return the graph of one iteration, with random constants in the place of the loop's constants.

    A plan is for any constants of these types, so it must not depend on their elements. The other result has the
    position of the loop's input for the digest of each of these constants.
    """
    graph = lower_products(body_of(loop.body))
    whole = {v for p in graph.primitives if p.op == "opaque" for v in p.inputs}
    constants = {
        value: Constant.of(_random(graph.types[value], i))
        for i, (_, value) in enumerate(graph.inputs)
        if i in fixed and graph.types[value].size >= LEAST_WEIGHT and value not in whole
    }
    inputs = tuple(given for given in graph.inputs if given[1] not in constants)
    places = {c.digest: i for i, (_, v) in enumerate(graph.inputs) if (c := constants.get(v)) is not None}
    return replace(graph, inputs=inputs, constants={**graph.constants, **constants}), places


def _random(type_: ValueType, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    array = rng.standard_normal(type_.shape) if type_.dtype.is_float else rng.integers(0, 2, type_.shape)
    return array.astype(type_.dtype.numpy)


def _planned(
    options: Options, ledger: Ledger, graph: PrimitiveGraph, weights: Mapping[str, int], deadline: Deadline
) -> LoopPlan | Refusal:
    """Return the plan of one iteration, or why there is none; `weights` is as for `_iteration`."""
    options = replace(options, error=0.0, calibrate=None, ablation=replace(options.ablation, baselines=False))
    partition = find_blocks(graph, (whole_segment(graph),), _rewriting(options, graph, deadline.less(0.75)))
    joined = join(partition)
    try:
        tasks = prepare_all(partition, joined, ledger.meter, options, deadline.shared(2))
        steps = _searched(ledger, options, Segmented(partition, joined, tasks), deadline)
    except (InfeasibleError, UnprovidedError) as error:
        return Refusal(f"{error.what} in an iteration")
    if isinstance(steps, Refusal):
        return steps
    return _bound(joined.graph, steps, weights, ledger.meter.target.threads)


def _rewriting(
    options: Options, given: PrimitiveGraph, deadline: Deadline
) -> Callable[[PrimitiveGraph], tuple[PrimitiveGraph, SaturationReport]]:
    """Return a function that adds the alternatives which read no constants other than the given ones.

    Other constants would be computed from those that are random here.
    """
    known = {constant.digest for constant in given.constants.values()}

    def rewrite(graph: PrimitiveGraph) -> tuple[PrimitiveGraph, SaturationReport]:
        found, report = saturate(
            graph, strict=options.strict, rules=select_rules(options.ablation.rules), deadline=deadline
        )
        new = {v for v, c in found.constants.items() if not c.is_uniform and c.digest not in known}
        kept = [i for i, p in enumerate(found.primitives) if new.isdisjoint(p.inputs)]
        return found.with_primitives(kept), report

    return rewrite


def _searched(
    ledger: Ledger, options: Options, model: Segmented, deadline: Deadline
) -> tuple[PlanStep[Kernel], ...] | Refusal:
    """Return the kernels of an iteration; if possible, only kernels that have no threads of their own."""

    def search(model: Segmented, deadline: Deadline) -> tuple[PlanStep[Kernel], ...] | Refusal:
        found = search_segments(model, ledger, options, deadline)
        steps = []
        for candidate in found.plans[PlanName.SEARCHED]:
            kernel = ledger.meter.kernel(candidate)
            if isinstance(kernel, Refusal):
                return kernel
            cost_ns, is_measured = ledger.cost_ns(candidate)
            steps.append(PlanStep(candidate, kernel, cost_ns, is_measured=is_measured))
        return tuple(steps)

    steps = search(model, deadline.shared(2))
    apart = () if isinstance(steps, Refusal) else {s.candidate.provider for s in steps if team_refusal(s.kernel)}
    if not apart:
        return steps

    def is_kept(candidate: Candidate) -> bool:
        return candidate.provider not in apart

    fewer = [replace(task, candidates=tuple(filter(is_kept, task.candidates))) for task in model.tasks]
    try:
        return search(replace(model, tasks=fewer), deadline)
    except InfeasibleError:
        return steps


def _bound(
    graph: PrimitiveGraph, steps: Sequence[PlanStep[Kernel]], weights: Mapping[str, int], threads: int
) -> LoopPlan | Refusal:
    """Return the plan of an iteration with the places of its buffers."""
    program = bind_steps(graph, steps, threads)
    layouts: dict[int, Layout] = {}
    constants: list[int | Array] = []
    for value, layout in program.constants:
        constant = graph.constants[value]
        place = weights.get(constant.digest)
        if place is None and constant.array.size > MOST_EMBEDDED:
            return Refusal("an iteration reads a large uniform constant")
        if place is not None and layouts.setdefault(place, layout) != layout:
            return Refusal("an iteration reads a constant in two layouts")
        constants.append(layout.pack(constant.array) if place is None else place)
    inputs = tuple(int(name.removeprefix("i")) for name, _ in program.inputs)
    text = " + ".join(f"{step.candidate.provider} {step.candidate.offer.variant}".strip() for step in steps)
    flop = sum(max(s.candidate.linear_flop, s.candidate.offer.work_flop) for s in steps)
    return LoopPlan(program, inputs, tuple(constants), layouts, flop, text)
