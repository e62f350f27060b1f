"""Plans to compare the optimum with: fully split, greedily fused, and in one layout only.

A sum of isolated kernel times can mislead, so whole executables are timed, these too.
"""

from __future__ import annotations

from collections.abc import Sequence

from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.program.problem import Problem
from korch.program.solve import Solver
from korch.program.verify import ready_order
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.search.result import PlanName


def baseline_plans(
    graph: PrimitiveGraph, candidates: Sequence[Candidate], ledger: Ledger, options: Options, seconds: float
) -> dict[str, tuple[Candidate, ...]]:
    """Return named plans, each solved within `seconds`; one that can't be had is left out.

    - split: one primitive a kernel (and the broadcasts that it reads), at the least cost;
    - plain-layout: the least cost with every value in the plain layout;
    - greedy: from the outputs backwards, always the kernel with the most primitives.
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
    """Return the plan that fuses as much as it can, or None if greed runs into a cycle."""
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
    """Return how many primitives a candidate runs, broadcasts left out."""
    return sum(p.op != "broadcast" for p in candidate.group.body.primitives)


def has_layouts(candidate: Candidate, allowed: str) -> bool:
    """Return whether all that a candidate reads and writes is in layouts that are allowed.

    Args:
        candidate: constants that it reads may be in any layout.
        allowed: as the option `layouts`.
    """
    layouts = [layout for _, layout in (*candidate.input_ports, *candidate.output_ports)]
    if allowed == "plain":
        return all(layout.is_plain for layout in layouts)
    return allowed == "any" or not any(layout.blocks for layout in layouts)
