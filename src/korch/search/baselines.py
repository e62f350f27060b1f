"""Baseline plans for comparison with the optimum: fewer groups, fewer layouts, or nothing computed twice.

A sum of isolated kernel times can mislead, so complete executables are timed, including these.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from korch.binary_program.solve import Solver
from korch.candidate.candidate import Candidate, Group
from korch.errors import InfeasibleError
from korch.measure.meter import NEVER
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Attributes, Category
from korch.primitive.types import ValueType
from korch.primitive.walks import reached
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
    subsets: Mapping[str, Callable[[], Sequence[Candidate]]] = {
        PlanName.SPLIT: lambda: [c for c in candidates if kernel_size(c) <= 1],
        PlanName.PLAIN_LAYOUT: lambda: [c for c in candidates if has_layouts(c, "plain")],
        PlanName.BY_RULES: lambda: grown_by_rules(graph, candidates),
        PlanName.ONCE: lambda: [c for c in candidates if ledger.is_measured(c)] if repeats else searched,
    }
    plans: dict[str, tuple[Candidate, ...]] = {}
    for name, of_name in subsets.items():
        left_s = ledger.left_s(deadline)
        if left_s is not None and left_s <= 0:
            break
        subset = of_name()
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

    - a product or convolution with elementwise primitives of its shape after it, if nothing else reads the values
      between them; nothing is computed before it in its kernel;
    - elementwise and layout primitives with each other and with reductions, if all of these reduce the same axes;
    - attention.

    A group grows whatever that costs: it stores a value only if the model returns it, or if some primitive that reads
    it can't be fused, or if no provider has a kernel for the larger group, or if there is no plan otherwise.
    Changes of layouts remain.
    """
    allowed = [c for c in candidates if is_fused_by_rules(c)]
    of_primitive: dict[int, set[int]] = {}
    for numbers in {c.group.primitives for c in allowed}:
        for p in numbers:
            of_primitive.setdefault(p, set()).add(_mask(numbers))
    returned = {value for _, value in graph.outputs}

    def grows(group: Group, value: int) -> bool:
        """Return whether each primitive that reads a value can be fused with the group that computes it."""
        own, after = _mask(group.primitives), _reading(graph, value) - {*group.primitives}
        count = len({graph.primitives[p].output for p in after})
        return bool(own and after) and all(
            _can_join(group, value, graph, p, count)
            and any(mask & own == own and mask >> p & 1 for mask in of_primitive.get(p, ()))
            for p in after
        )

    found = {(c.group.primitives, c.group.outputs): c.group for c in allowed}
    grown = {key: any(grows(g, v) for v in g.outputs if v not in returned) for key, g in found.items()}
    kept = [c for c in allowed if not grown[c.group.primitives, c.group.outputs]]
    left = [c for c in allowed if grown[c.group.primitives, c.group.outputs]]
    while True:
        written = _written(graph, kept)
        missing = {v for c in kept for v in c.group.inputs} - written
        more = [c for c in left if not missing.isdisjoint(c.group.outputs)]
        if returned <= written or not more:
            return kept
        kept += more
        left = [c for c in left if missing.isdisjoint(c.group.outputs)]


def _written(graph: PrimitiveGraph, candidates: Sequence[Candidate]) -> set[int]:
    """Return the values that a plan of some candidates can have: inputs, constants, and what follows from these."""
    found = {*graph.constants, *(value for _, value in graph.inputs)}
    groups = {(c.group.inputs, c.group.outputs) for c in candidates}
    while more := {key for key in groups if found.issuperset(key[0])}:
        groups -= more
        found.update(v for _, outputs in more for v in outputs)
    return found


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << p for p in numbers)


def _reading(graph: PrimitiveGraph, value: int) -> set[int]:
    """Return the primitives that read a value; in place of a broadcast, those that read its result."""
    found: set[int] = set()
    for p in graph.consumers[value]:
        primitive = graph.primitives[p]
        found |= _reading(graph, primitive.output) if primitive.op == "broadcast" else {p}
    return found


def _can_join(group: Group, value: int, graph: PrimitiveGraph, p: int, count: int) -> bool:
    """Return whether rules fuse a primitive that reads a value with the group that computes it.

    `count`: the number of values that are computed from the value.
    """
    primitive, body = graph.primitives[p], group.body
    category = primitive.row.category
    if body.linear:
        is_alike = graph.types[primitive.output].shape == graph.types[value].shape
        return count == 1 and category is Category.ELEMENTWISE and is_alike
    if category is Category.REDUCE:
        return _reduced(body.types, body.primitives) <= _reduced(graph.types, [primitive])
    return category in (Category.ELEMENTWISE, Category.LAYOUT)


def _reduced(types: Sequence[ValueType], primitives: Iterable[Primitive]) -> set[tuple[tuple[int, ...], Attributes]]:
    """Return what reductions reduce: the shape, and the axes."""
    return {(types[p.inputs[0]].shape, p.attributes) for p in primitives if p.row.category is Category.REDUCE}


def is_fused_by_rules(candidate: Candidate) -> bool:
    """Return whether the primitives of a candidate may be one kernel by the rules of `grown_by_rules`."""
    body = candidate.group.body
    if not body.linear:
        return len(_reduced(body.types, body.primitives)) <= 1
    if len(body.linear) != 1:
        return candidate.provider == "attention"
    makers = {one.output: one for one in body.primitives}
    before = reached(body.linear[0].inputs, lambda value: makers[value].inputs if value in makers else ())
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
