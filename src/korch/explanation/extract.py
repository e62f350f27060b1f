"""One alternative for each value, chosen before the kernels: what optimizers do that rewrite first.

Here it is a baseline (`Ablation(rewrites="first")`): the sum of what each primitive would take as
an operator of its own is least, as in Tensat (Yang et al., MLSys 2021), and the orchestration
then has no say.
"""

from __future__ import annotations

from korch.errors import InfeasibleError
from korch.options import Options
from korch.partition.choose import estimated_cost
from korch.primitive.graph import PrimitiveGraph
from korch.program.problem import Computation, Port, PricedKernel, Problem
from korch.program.solve import solve


def extract(graph: PrimitiveGraph, options: Options) -> PrimitiveGraph:
    """Return a graph without alternatives.

    Args:
        graph: a graph with alternatives.
        options: of the solver.

    Raises:
        InfeasibleError: the solver found no choice in its time.
    """
    if not graph.alternatives:
        return graph

    def port(value: int) -> Port:
        return Port(value, "")

    problem = Problem(
        steps=tuple(Computation(p.output, p.inputs) for p in graph.primitives),
        kernels=tuple(
            PricedKernel(
                frozenset({i}),
                tuple(port(v) for v in dict.fromkeys(p.inputs) if v not in graph.constants),
                (port(p.output),),
                estimated_cost(graph, i),
            )
            for i, p in enumerate(graph.primitives)
        ),
        required=tuple(dict.fromkeys(port(v) for _, v in graph.outputs if v not in graph.given)),
        given=frozenset(port(v) for _, v in graph.inputs),
        constants=frozenset(graph.constants),
    )
    if not problem.required:
        return graph
    plan = solve(problem, seconds=options.search.extract_seconds, limits=options.search)
    if not plan.kernels:
        raise InfeasibleError(
            "no choice of rewrites was found in time", hint="Choose them with the kernels (Ablation(rewrites='joint'))"
        )
    return graph.with_primitives(sorted(plan.kernels))
