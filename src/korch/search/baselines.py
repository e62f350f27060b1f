"""Baseline plans for comparison with the optimum: fewer groups, fewer layouts, or nothing computed twice.

A sum of isolated kernel times can mislead, so complete executables are timed, including these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from korch.binary_program.solve import Solver
from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.measure.meter import NEVER
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
    - by-rules: only groups that other engines fuse (`is_fused_by_rules`);
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
        PlanName.BY_RULES: [c for c in candidates if is_fused_by_rules(c)],
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


def is_fused_by_rules(candidate: Candidate) -> bool:
    """Return whether ONNX Runtime or Inductor could run a candidate's primitives as one kernel, by their rules.

    They fuse elementwise and layout primitives with reductions, and what follows a product or convolution with it, but
    nothing that is computed before it. Attention is one kernel.
    """
    body = candidate.group.body
    if len(body.linear) != 1:
        return not body.linear or candidate.provider == "attention"
    makers = {one.output: one for one in body.primitives}
    waiting = [makers[v] for v in body.linear[0].inputs if v in makers]
    while waiting:
        one = waiting.pop()
        if one.row.category not in UNCOUNTED:
            return False
        waiting += [makers[v] for v in one.inputs if v in makers]
    return True


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
