"""The linear program of an instance, and the questions that a search asks about it: the best plan and a lower bound.

Both depend on the costs that are given. The ledger stores each question with its answer, so that a search
can be replayed.
"""

import logging
from collections.abc import Collection
from dataclasses import replace

from korch.binary_program.problem import Plan, Problem, Status
from korch.binary_program.solve import Solver
from korch.errors import InfeasibleError
from korch.primitive.graph import PrimitiveGraph
from korch.search.infeasible import no_working_plan
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.search.price import Prices
from korch.system.deadline import Deadline

RELAX_SECONDS = 10.0  # time of one linear relaxation
FIRST_SECONDS = 10.0  # time of a solve that has found no plan yet, however little time remains
LAST_SECONDS = 0.5  # time of a later solve, if no time remains
ROUND_GAP = 0.002  # gap at which a round's solve ends
COMBINE_SECONDS = 3.0  # time of the solve over measured candidates only

logger = logging.getLogger("korch.orchestrate")


class Questions:
    """The questions that a search asks about one instance.

    Attributes:
        candidates: the candidates of the instance.
        solver: holds the instance's program.
        deadline: limits the time of the questions.
    """

    def __init__(self, instance: Instance, ledger: Ledger, deadline: Deadline, like: Problem | None) -> None:
        """Build the program; `like` is the problem of the same instance in another interface, if it exists."""
        self.graph, self.candidates = instance.graph, tuple(instance.candidates)
        self.ledger, self.limits, self.deadline = ledger, ledger.limits, deadline
        self._relaxed: tuple[list[int], int, dict[int, int]] | None = None
        ledger.look_up(self.candidates)
        if like is None:
            ledger.bounds_ns(self.candidates)  # one question for all
            problem = instance.problem(ledger.cost_ns)
        else:
            required, given = instance.interface.ports(instance.graph)
            problem = replace(like, required=required, given=given)
        self.solver = Solver(problem, describe=lambda value: _named(self.graph, value), like=like, limits=self.limits)

    def solve(
        self,
        costs_ns: list[int],
        is_measured: list[bool] | None,
        seconds: float,
        gap: float,
        *,
        hint: tuple[int, ...] | None,
        bound_ns: int = 0,
    ) -> Plan:
        """Return the best plan for the given costs.

        Args:
            costs_ns: the cost of each candidate.
            is_measured: whether each is measured; None if the costs are estimates.
            seconds: time limit, reduced if the budget has less left. While no plan is known, the solve may take longer.
            gap: the relative gap to the optimum at which the solver may stop.
            hint: a known plan to start from; None if there is none yet.
            bound_ns: a known lower bound of all plans' costs.

        Raises:
            InfeasibleError: no plan exists, or the solver found none in time.
        """
        left_s = self.ledger.left_s(self.deadline)
        if left_s is not None:
            seconds = max(min(LAST_SECONDS, seconds), min(seconds, left_s))
        try:
            plan = self.ledger.solve(
                self.solver,
                costs_ns,
                is_measured=is_measured,
                seconds=seconds,
                first_seconds=FIRST_SECONDS,
                hint=hint,
                lower_bound_ns=bound_ns,
                excluded=self._failed(),
                gap=gap,
            )
            if plan.certificate.status is Status.INFEASIBLE:
                raise InfeasibleError("the candidates that work do not make up a plan")
        except InfeasibleError as error:
            raise no_working_plan(self.graph, self.candidates, self.ledger.records, error) from error
        found = plan.certificate
        if found.status is Status.UNKNOWN:
            raise InfeasibleError(
                f"the solver found no plan within {max(seconds, FIRST_SECONDS):.0f} s",
                hint="give a larger budget, or lower SearchLimits.max_primitives",
            )
        logger.info(
            "solved: %s, %s ns, bound %s ns, %.1f s",
            found.status.value,
            found.objective_ns,
            found.bound_ns,
            found.seconds,
        )
        return plan

    def solve_some(self, prices: Prices, numbers: Collection[int], hint: tuple[int, ...] | None = None) -> Plan:
        """Return the best plan that uses only some of the candidates."""
        left_s, seconds = self.ledger.left_s(self.deadline), COMBINE_SECONDS
        return self.ledger.solve(
            self.solver,
            prices.costs_ns,
            seconds=seconds if left_s is None else max(LAST_SECONDS, min(seconds, left_s)),
            hint=hint,
            gap=ROUND_GAP,
            excluded=[k for k in range(len(self.candidates)) if k not in numbers],
        )

    def relax(self, costs_ns: list[int], least_s: float = 1.0) -> tuple[int, dict[int, int]]:
        """Return the lower bound that the relaxation gives for some costs, and the slack of each candidate."""
        left_s, most_s = self.ledger.left_s(self.deadline), RELAX_SECONDS
        seconds = most_s if left_s is None else max(least_s, min(most_s, left_s))
        return self.ledger.relax(self.solver, costs_ns, excluded=self._failed(), seconds=seconds)

    def relax_estimates(self, estimates: list[int]) -> tuple[int, dict[int, int]]:
        """Return `relax` for estimated costs; the last result is reused if the question is the same."""
        if self._relaxed is None or self._relaxed[0] != estimates:
            self._relaxed = (estimates, *self.relax(estimates))
        return self._relaxed[1:]

    def _failed(self) -> list[int]:
        return [k for k, c in enumerate(self.candidates) if self.ledger.has_failed(c)]


def _named(graph: PrimitiveGraph, value: int) -> str:
    """Return a value's name with the model node that it comes from."""
    makers = graph.producers[value]
    origin = graph.origins[makers[0]] if makers and graph.origins else ""
    return f"%{value} ({origin})" if origin else f"%{value}"
