"""Baseline plans for comparison with the optimum: fully split, greedily fused, and with plain layouts only.

A sum of isolated kernel times can mislead, so complete executables are timed, including these.
"""

from __future__ import annotations

from collections.abc import Sequence

from korch.binary_program.problem import Problem
from korch.binary_program.solve import Solver
from korch.binary_program.verify import ready_order
from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.search.result import PlanName


def baseline_plans(
    graph: PrimitiveGraph, candidates: Sequence[Candidate], ledger: Ledger, options: Options, seconds: float
) -> dict[str, tuple[Candidate, ...]]:
    """Return plans by name, each solved within `seconds`; an infeasible one is left out.

    - split: one primitive per kernel (with the broadcasts that it reads), at the least cost;
    - plain-layout: the least cost with every value in the plain layout;
    - greedy: going backwards from the outputs, always the kernel with the most primitives.
    """
    subsets = {
        PlanName.SPLIT: [c for c in candidates if kernel_size(c) <= 1],
        PlanName.PLAIN_LAYOUT: [c for c in candidates if has_layouts(c, "plain")],
    }
    plans: dict[str, tuple[Candidate, ...]] = {}
    for name, subset in subsets.items():
        problem = Instance(graph, subset).problem(ledger.cost_ns)
        costs_ns = [kernel.cost_ns for kernel in problem.kernels]
        try:
            solver = Solver(problem, limits=options.search)
            plan = ledger.solve(solver, costs_ns, seconds=min(seconds, options.search.solver_seconds))
        except InfeasibleError:
            continue
        if plan.kernels:
            plans[name] = tuple(subset[k] for k in plan.kernels)
    greedy = most_fused_plan(Instance(graph, candidates).problem(ledger.cost_ns), candidates)
    if greedy is not None:
        plans[PlanName.GREEDY] = tuple(candidates[k] for k in greedy)
    return plans


def most_fused_plan(problem: Problem, candidates: Sequence[Candidate]) -> tuple[int, ...] | None:
    """Return the plan that greedily fuses as much as possible, or None if this fails or leads to a cycle."""
    chosen: list[int] = []
    written: set[object] = set()
    owned: set[object] = set()
    waiting = list(problem.required)
    while waiting:
        port = waiting.pop()
        if port in written or problem.is_given(port):
            continue
        makers = [
            k
            for k in problem.producers.get(port, ())
            if not written.intersection(problem.kernels[k].outputs) and not owned.intersection(problem.kernels[k].owns)
        ]
        if not makers:
            return None
        best = max(makers, key=lambda k: (kernel_size(candidates[k]), -problem.kernels[k].cost_ns))
        chosen.append(best)
        written.update(problem.kernels[best].outputs)
        owned.update(problem.kernels[best].owns)
        waiting.extend(problem.needs(best))
    order, in_cycle = ready_order(problem, chosen)
    return None if in_cycle else order


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
