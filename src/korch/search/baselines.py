"""Baseline plans for comparison with the optimum: fewer groups, fewer layouts, or nothing computed twice.

A sum of isolated kernel times can mislead, so complete executables are timed, including these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from korch.binary_program.solve import Solver
from korch.candidate.candidate import Candidate, Group
from korch.errors import InfeasibleError
from korch.measure.meter import NEVER
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.search.result import PlanName
from korch.system.deadline import Deadline

UNCOUNTED = (Category.BROADCAST, Category.LAYOUT)
"""Kinds of primitives that compute nothing, so that several kernels may read through one at no cost."""


def baseline_plans(
    instance: Instance, ledger: Ledger, seconds: float, searched: Sequence[Candidate], deadline: Deadline = NEVER
) -> dict[str, tuple[Candidate, ...]]:
    """Return plans of the least cost by name, each solved within `seconds`; an infeasible one is left out.

    Those for which no time is left before the deadline are left out, too.

    - split: one primitive per kernel (with the broadcasts that it reads);
    - plain-layout: every value in the plain layout;
    - by-rules: groups of a fusion by rules (`grown_by_rules`);
    - once: no two kernels compute the same.

    Kernels that were not timed cost what is estimated.
    """
    graph, candidates = instance.graph, instance.candidates
    computing = {p for p, one in enumerate(graph.primitives) if one.row.category not in UNCOUNTED}
    runs = Counter(p for c in searched for p in c.group.primitives)
    repeats = any(runs[p] > 1 for p in computing)
    subsets = {
        PlanName.SPLIT: [c for c in candidates if kernel_size(c) <= 1],
        PlanName.PLAIN_LAYOUT: [c for c in candidates if has_layouts(c, "plain")],
        PlanName.BY_RULES: grown_by_rules(graph, candidates),
        PlanName.ONCE: [c for c in candidates if ledger.is_measured(c)] if repeats else searched,
    }
    plans: dict[str, tuple[Candidate, ...]] = {}
    for name, subset in subsets.items():
        left_s = ledger.left_s(deadline)
        if left_s is not None and left_s <= 0:
            break
        problem = instance.of(subset).problem(ledger.cost_ns)
        costs_ns = [
            max(kernel.cost_ns, 0 if kernel.is_measured else guess_ns)
            for kernel, guess_ns in zip(problem.kernels, ledger.guesses_ns(subset), strict=True)
        ]
        try:
            once = frozenset(computing if name is PlanName.ONCE else ())
            solver = Solver(replace(problem, once=once), limits=ledger.limits)
            most_s = min(seconds, ledger.limits.solver_seconds, *(() if left_s is None else (left_s,)))
            plan = ledger.solve(solver, costs_ns, seconds=most_s)
        except InfeasibleError:
            continue
        if plan.kernels:
            plans[name] = tuple(subset[k] for k in plan.kernels)
    return plans


def grown_by_rules(graph: PrimitiveGraph, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates among which ONNX Runtime's and Inductor's fusion by rules would choose on a CPU.

    What is fused:

    - a product or convolution with elementwise primitives after it that have its shape, if each reads the only reader's
      value; nothing is computed before it in its kernel;
    - elementwise and layout primitives with each other and with reductions, if all of these reduce the same axes;
    - attention.

    A group grows whatever that costs: it stores a value only if the model returns it, or if some primitive that reads
    it can't be fused, or if no provider has a kernel for the larger group. Changes of layouts remain.
    """
    allowed = [c for c in candidates if is_fused_by_rules(c)]
    readers: dict[int, list[int]] = {}
    for p, primitive in enumerate(graph.primitives):
        for value in set(primitive.inputs):
            readers.setdefault(value, []).append(p)
    with_primitive: dict[int, set[int]] = {}
    for numbers in {c.group.primitives for c in allowed}:
        for p in numbers:
            with_primitive.setdefault(p, set()).add(_mask(numbers))
    returned = {value for _, value in graph.outputs}

    def reading(value: int) -> set[int]:
        found = set(readers.get(value, ()))
        for p in list(found):
            if graph.primitives[p].op == "broadcast":
                found = found - {p} | reading(graph.primitives[p].output)
        return found

    def grows(candidate: Candidate, value: int) -> bool:
        """Return whether each primitive that reads a value can be fused with the group that computes it."""
        group, after = candidate.group, reading(value) - {*candidate.group.primitives}
        own = _mask(group.primitives)
        return bool(own and after) and all(
            _can_join(group, value, graph, p, len(after))
            and any(mask & own == own and mask >> p & 1 for mask in with_primitive.get(p, ()))
            for p in after
        )

    known = {
        (c.group.primitives, c.group.outputs): any(grows(c, v) for v in c.group.outputs if v not in returned)
        for c in {(c.group.primitives, c.group.outputs): c for c in allowed}.values()
    }
    return [c for c in allowed if not known[c.group.primitives, c.group.outputs]]


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << p for p in numbers)


def _can_join(group: Group, value: int, graph: PrimitiveGraph, p: int, count: int) -> bool:
    """Return whether rules fuse a primitive that reads a value with the group that computes it.

    `count`: the number of primitives that read the value.
    """
    primitive, body = graph.primitives[p], group.body
    category = primitive.row.category
    if body.linear:
        is_alike = graph.types[primitive.output].shape == graph.types[value].shape
        return count == 1 and category is Category.ELEMENTWISE and is_alike
    if category is Category.REDUCE:
        own = (graph.types[primitive.inputs[0]].shape, primitive.attributes)
        return all(
            (body.types[one.inputs[0]].shape, one.attributes) == own
            for one in body.primitives
            if one.row.category is Category.REDUCE
        )
    return category in (Category.ELEMENTWISE, Category.LAYOUT)


def is_fused_by_rules(candidate: Candidate) -> bool:
    """Return whether the primitives of a candidate may be one kernel by the rules of `grown_by_rules`."""
    body = candidate.group.body
    if len(body.linear) != 1:
        return not body.linear or candidate.provider == "attention"
    makers = {one.output: one for one in body.primitives}
    before: set[int] = set()
    waiting = list(body.linear[0].inputs)
    while waiting:
        value = waiting.pop()
        if value in makers and value not in before:
            before.add(value)
            waiting += makers[value].inputs
    others = [one for one in body.primitives if one is not body.linear[0]]
    return all(
        one.row.category in UNCOUNTED if one.output in before else one.row.category is not Category.REDUCE
        for one in others
    )


def kernel_size(candidate: Candidate) -> int:
    """Return the number of primitives in a candidate, without broadcasts."""
    return sum(p.op != "broadcast" for p in candidate.group.body.primitives)


def has_layouts(candidate: Candidate, allowed: str) -> bool:
    """Return whether all values that a candidate reads and writes are in allowed layouts.

    `candidate`: the candidate; constants that it reads may be in any layout.
    """
    layouts = [layout for _, layout in (*candidate.input_ports, *candidate.output_ports)]
    if allowed == "plain":
        return all(layout.is_plain for layout in layouts)
    return allowed == "any" or not any(layout.blocks for layout in layouts)
