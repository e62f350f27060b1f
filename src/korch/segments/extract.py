"""Choice of one alternative for each value before the kernels are chosen, as in optimizers that rewrite first.

In Korch it is a baseline (`Ablation(rewrites="first")`). It minimizes the sum of the costs that the primitives
would have as separate operators, as in Tensat (Yang et al., MLSys 2021). The orchestration can't change the
choice afterwards.
"""

from korch.binary_program.problem import Computation, Port, PricedKernel, Problem
from korch.binary_program.solve import solve
from korch.errors import InfeasibleError
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.segments.choose import estimated_cost

EXTRACT_SECONDS = 60.0  # time of the choice of one alternative per value


def extract(graph: PrimitiveGraph, options: Options) -> PrimitiveGraph:
    """Return a graph without alternatives.

    Raises:
        InfeasibleError: the solver found no choice within its time limit.
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
    plan = solve(problem, seconds=EXTRACT_SECONDS, limits=options.search)
    if not plan.kernels:
        raise InfeasibleError(
            "no choice of rewrites was found in time", hint="Choose them with the kernels (Ablation(rewrites='joint'))"
        )
    return graph.with_primitives(sorted(plan.kernels))
