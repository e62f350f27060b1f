"""Instance -> plan with a certificate.

1. Drop the kernels that no plan can use (`presolve`), and build the program (`formulate`).
2. Solve the linear relaxation (`relax`). It gives a proven bound L, and for each kernel its slack: the
   amount by which choosing it raises the bound.
3. Look for a good plan among the kernels of least slack and those of the best plan so far.
4. Solve the program over the kernels with a slack of at most δ, with CP-SAT. A plan with any other
   kernel costs at least L + δ, so an optimum of at most L + δ is the optimum over all kernels. Otherwise
   L + δ is a lower bound: take a larger δ and solve again.
5. If a solution has a cycle of kernels that wait for each other, add its loop rows, and repeat.
6. Verify the plan without the solver.

All bounds are exact integers of nanoseconds. The status is OPTIMAL only if the bound equals the objective.
With several workers CP-SAT may return another plan of the same cost in another run.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from korch.binary_program.cp_sat import MOST, CpSatModel, CpStatus
from korch.binary_program.formulate import Formulation, formulate, loop_row
from korch.binary_program.presolve import Describe, diagnose, dominated_kernels, greedy_plan, useful_kernels
from korch.binary_program.problem import Certificate, Plan, Port, Problem, Status
from korch.binary_program.relax import Matrix, Relaxation, Relaxer
from korch.binary_program.verify import check_problem, ready_order, verify_kernels, verify_plan
from korch.errors import InvalidGraphError
from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.primitive.component import strong_components

FIRST_KERNELS = 500  # least number of kernels in the first restricted program
GROWTH = 3  # each further restricted program has this many times the kernels of the last one
IMPROVE_SHARE = 0.2  # share of the remaining time for a heuristic solve before each exact one

_EVERYTHING_NS = 1 << 61
"""More than any plan costs."""


def solve(
    problem: Problem,
    *,
    seconds: float = 60.0,
    limits: SearchLimits = DEFAULT_LIMITS,
    hint: Sequence[int] | None = None,
    lower_bound_ns: int = 0,
    describe: Describe | None = None,
) -> Plan:
    """Return the cheapest plan of an instance.

    Args:
        problem: the instance.
        seconds: time limit. When it is reached, the best plan so far is returned as FEASIBLE with a gap.
        limits: the threads and the seed of CP-SAT, and limits of the solver.
        hint: kernels of a plan to start from, in any order; a hint that is not a plan is ignored.
        lower_bound_ns: a bound that is known to hold, such as that of the same instance before costs
            rose or kernels were dropped.
        describe: returns the name of a value for messages.

    Returns:
        A verified plan; without kernels if its status is INFEASIBLE (proven) or UNKNOWN.

    Raises:
        InfeasibleError: a required port can't be written by any choice of kernels.
        InvalidGraphError: the instance breaks a rule, or its costs exceed CP-SAT's integers.
    """
    solver = Solver(problem, limits=limits, describe=describe)
    return solver.solve(seconds=seconds, hint=hint, lower_bound_ns=lower_bound_ns)


class Solver:
    """An instance that is solved many times with changing costs.

    The program and its relaxation are built once; loop rows that one solve adds remain for later solves.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        describe: Describe | None = None,
        like: Problem | None = None,
        limits: SearchLimits = DEFAULT_LIMITS,
    ) -> None:
        """Build the program.

        `like`: an instance that was checked before. If `problem` has the same kernels and the same given values, in
        whatever layouts, it is not checked again. `limits`: the threads and the seed of CP-SAT, and limits of the
        solver.

        Raises:
            InvalidGraphError: the instance breaks a rule.
            InfeasibleError: a required port can't be written by any choice of kernels.
        """
        is_same = like is not None and like.kernels is problem.kernels
        if like is None or not is_same or like.given_values != problem.given_values:
            check_problem(problem)
        diagnose(problem, describe)
        self.problem = problem
        self.limits = limits
        self.describe = describe
        useful = frozenset(useful_kernels(problem))
        gone = [k for k in range(len(problem.kernels)) if k not in useful]
        self.reduced, self.kept = problem.without(gone)
        self.number = {k: i for i, k in enumerate(self.kept)}
        self.program = formulate(self.reduced)
        self.relaxer = Relaxer(self.program)
        self._dominated: tuple[list[int], frozenset[int], frozenset[int]] = ([], frozenset(), frozenset())

    def dominated(self, costs_ns: list[int], excluded: frozenset[int]) -> frozenset[int]:
        """Return `dominated_kernels`; a solve and a relaxation with the same costs share the result."""
        if self._dominated[:2] != (costs_ns, excluded):
            self._dominated = costs_ns, excluded, dominated_kernels(self.reduced, costs_ns, excluded)
        return self._dominated[2]

    def solve(
        self,
        costs_ns: Sequence[int] | None = None,
        is_measured: Sequence[bool] | None = None,
        *,
        seconds: float = 60.0,
        first_seconds: float = 0.0,
        hint: Sequence[int] | None = None,
        lower_bound_ns: int = 0,
        excluded: Collection[int] = (),
        gap: float = 0.0,
    ) -> Plan:
        """Return the cheapest plan for the given costs.

        Args:
            costs_ns: the cost of each kernel; the instance's if not given.
            is_measured: whether each is measured; the instance's if not given.
            seconds: time limit.
            first_seconds: time limit while no plan is known, if it is larger.
            hint: kernels of a plan to start from.
            lower_bound_ns: a bound that is known to hold.
            excluded: kernels that must not be used, such as kernels that crashed.
            gap: the search may end when the bound is below the plan's cost by at most this fraction.

        Returns:
            A verified plan, as from the function `solve`.

        Raises:
            InfeasibleError: without the excluded kernels a required port can't be written.
        """
        start_s = time.monotonic()
        problem = self.problem
        if costs_ns is not None or is_measured is not None:
            costs = costs_ns or [kernel.cost_ns for kernel in problem.kernels]
            problem = problem.with_costs(costs, is_measured)
        if excluded:
            diagnose(problem.without(excluded)[0], self.describe)
        search = _Search(
            self,
            [problem.kernels[k].cost_ns for k in self.kept],
            frozenset(self.number[k] for k in excluded if k in self.number),
            (start_s + seconds, start_s + max(seconds, first_seconds)),
            lower_bound_ns,
            gap,
        )
        search.run([self.number[k] for k in hint or () if k in self.number])
        chosen = None if search.best is None else tuple(self.kept[i] for i in search.best)
        return self._certify(problem, chosen, search, time.monotonic() - start_s)

    def relax(
        self, costs_ns: Sequence[int], *, seconds: float = 60.0, excluded: Collection[int] = ()
    ) -> tuple[int, dict[int, int]]:
        """Return a lower bound, and for each kernel the least amount by which a plan with it exceeds the bound.

        `seconds`: time limit; if it is too short, the result is valid but weaker. `excluded`: kernels that must not be
        used.

        Returns:
            The bound, and nanoseconds per kernel; kernels that no plan can use are left out.
        """
        costs = [costs_ns[k] for k in self.kept]
        forbidden = frozenset(self.number[k] for k in excluded if k in self.number)
        # Without dominated kernels the relaxation takes a tenth of the time. The reduced cost of a dominated kernel
        # is still a valid slack: all other dominated kernels of a plan with it can be replaced.
        found = self.relaxer.solve(costs, forbidden | self.dominated(costs, forbidden), seconds)
        slack_ns = {k: int(found.slack_ns[i]) for i, k in enumerate(self.kept) if i not in forbidden}
        return found.bound_ns, slack_ns

    def _certify(self, problem: Problem, chosen: tuple[int, ...] | None, search: _Search, seconds: float) -> Plan:
        """Return the plan with its certificate, verified."""
        flags = [kernel.is_measured for kernel in problem.kernels]
        if chosen is None:
            status = Status.INFEASIBLE if search.is_infeasible else Status.UNKNOWN
            return Plan((), Certificate(status, None, search.bound_ns, len(flags), sum(flags), False, seconds))
        objective_ns = sum(problem.kernels[k].cost_ns for k in chosen)
        certificate = Certificate.of(objective_ns, search.bound_ns, flags, chosen, seconds)
        return Plan(verify_plan(problem, Plan(chosen, certificate)), certificate)


def _level(levels_ns: npt.NDArray[np.int64], size: int) -> int:
    """Return the δ of rank `size` in the sorted slacks, or one that admits all kernels."""
    return int(levels_ns[size]) if size < len(levels_ns) else _EVERYTHING_NS


@dataclass(frozen=True, slots=True)
class _Answer:
    """CP-SAT's result for a restricted program: a solution, and a lower bound of all its solutions."""

    chosen: tuple[int, ...] | None
    bound_ns: int
    is_infeasible: bool


class _Search:
    """One solve: the best plan and the bound so far."""

    def __init__(
        self,
        owner: Solver,
        costs_ns: list[int],
        excluded: frozenset[int],
        deadlines_s: tuple[float, float],
        bound_ns: int,
        gap: float,
    ) -> None:
        """Begin; `deadlines_s` are the deadline once there is a plan, and the deadline while there is none."""
        self.owner = owner
        self.limits = owner.limits
        self.problem = owner.reduced
        self.costs_ns = costs_ns
        self.excluded = excluded
        self.deadlines_s = deadlines_s
        self.bound_ns = bound_ns
        self.gap = gap
        self.best: tuple[int, ...] | None = None
        self.best_ns = 0
        self.is_infeasible = False

    def run(self, hint: Sequence[int]) -> None:
        """Search until the plan is proven or time is up."""
        self._offer(hint)
        self._offer(tuple(greedy_plan(self.problem, self.costs_ns, self._not_excluded())))
        if any(kernel.error for kernel in self.problem.kernels):  # the greedy plan may exceed the error budget
            exact = [k for k in self._not_excluded() if not self.problem.kernels[k].error]
            self._offer(tuple(greedy_plan(self.problem, self.costs_ns, exact)))
        forbidden = self.excluded | self.owner.dominated(self.costs_ns, self.excluded)
        relaxation = self.owner.relaxer.solve(self.costs_ns, forbidden, self._seconds_left())
        self.bound_ns = max(self.bound_ns, relaxation.bound_ns)
        slack_ns = relaxation.slack_ns
        usable = np.ones(len(slack_ns), bool)
        usable[list(forbidden)] = False
        kernels = np.flatnonzero(usable[: len(self.costs_ns)])
        levels_ns = np.sort(slack_ns[kernels])
        size = max(FIRST_KERNELS, 2 * len(self.problem.steps))
        delta_ns = _level(levels_ns, size)
        while not self._is_done():
            self._improve(usable & (slack_ns <= delta_ns))
            if self._is_done():
                return
            answer, delta_ns = self._restricted(relaxation, usable, delta_ns)
            everything = bool((slack_ns[usable] <= delta_ns).all())
            outside_ns = relaxation.bound_ns + delta_ns
            if answer.is_infeasible and everything:
                if self.best is None:
                    self.is_infeasible = True
                else:
                    self.bound_ns = self.best_ns
                return
            inside_ns = outside_ns if answer.is_infeasible else answer.bound_ns
            self.bound_ns = max(self.bound_ns, inside_ns if everything else min(inside_ns, outside_ns))
            if self._seconds_left() <= 0:
                return
            size = GROWTH * max(size, int(np.searchsorted(levels_ns, delta_ns, "right")))
            grown_ns = max(delta_ns + 1, _level(levels_ns, size))
            enough_ns = self.best_ns - relaxation.bound_ns if self.best is not None else grown_ns
            delta_ns = max(delta_ns + 1, min(grown_ns, enough_ns))

    def _is_done(self) -> bool:
        return self.best is not None and (1 - self.gap) * self.best_ns <= self.bound_ns

    def _not_excluded(self) -> list[int]:
        return [k for k in range(len(self.costs_ns)) if k not in self.excluded]

    def _seconds_left(self) -> float:
        return max(0.0, self.deadlines_s[self.best is None] - time.monotonic())

    def _offer(self, kernels: Sequence[int]) -> None:
        """Keep some kernels as the best plan if they form a plan that is cheaper than the best so far."""
        chosen = tuple(dict.fromkeys(kernels))
        cost_ns = sum(self.costs_ns[k] for k in chosen)
        if self.best is not None and cost_ns >= self.best_ns:
            return
        try:
            verify_kernels(self.problem, chosen)
        except InvalidGraphError:
            return
        if self.excluded.isdisjoint(chosen):
            self.best, self.best_ns = chosen, cost_ns

    def _improve(self, alive: npt.NDArray[np.bool_]) -> None:
        """Look for a better plan among some kernels and those of the best plan; the bound is not updated."""
        if self.best is None or alive[list(self.best)].all():
            return
        alive = alive.copy()
        alive[list(self.best)] = True
        alive[len(self.costs_ns) :] = True
        self._without_cycles(alive, IMPROVE_SHARE * self._seconds_left())

    def _restricted(self, relaxation: Relaxation, usable: npt.NDArray[np.bool_], delta_ns: int) -> tuple[_Answer, int]:
        """Solve over the variables with a slack of at most δ; return also the δ used, reduced to what a proof needs."""
        if self.best is not None:
            delta_ns = min(delta_ns, max(0, self.best_ns - relaxation.bound_ns))
        alive = usable & (relaxation.slack_ns <= delta_ns)
        return self._without_cycles(alive, self._seconds_left()), delta_ns

    def _without_cycles(self, alive: npt.NDArray[np.bool_], seconds: float) -> _Answer:
        """Solve over some variables, adding loop rows until the solution has no cycle."""
        end_s = time.monotonic() + seconds
        while True:
            answer = self._cp_sat(alive, end_s - time.monotonic())
            if answer.chosen is None:
                return answer
            waiting = ready_order(self.problem, answer.chosen)[1]
            if not waiting:
                self._offer(answer.chosen)
                return answer
            self._forbid_cycle(waiting)
            if time.monotonic() >= end_s:
                return _Answer(None, answer.bound_ns, False)

    def _forbid_cycle(self, waiting: Sequence[int]) -> None:
        """Add the loop rows of the ports in a cycle."""
        program = self.owner.program
        for component in _cycles(self.problem, waiting):
            ports = frozenset(component)
            program.rows.extend(loop_row(program, port, ports) for port in sorted(ports))

    def _cp_sat(self, alive: npt.NDArray[np.bool_], seconds: float) -> _Answer:
        """Solve the program over some variables; the others are 0."""
        model, kept = _load(self.owner.program, alive, self.owner.relaxer.matrix)
        kernels = kept[: np.searchsorted(kept, len(self.costs_ns))].tolist()
        model.minimize(range(len(kernels)), [self.costs_ns[k] for k in kernels])
        if self.best is not None:
            hinted = set(self.best)
            if hinted.issubset(kernels):
                for variable, k in enumerate(kernels):
                    model.hint(variable, k in hinted)
        parameters = {
            "num_workers": self.limits.solver_workers,
            "random_seed": self.limits.seed,
            "linearization_level": 2,
            "relative_gap_limit": self.gap,
        }
        found = model.solve(seconds, parameters)
        if found.status is CpStatus.INFEASIBLE:
            return _Answer(None, 0, True)
        if found.status is CpStatus.INVALID:
            raise InvalidGraphError("CP-SAT refuses the program: the costs are too large")
        bound_ns = max(0, int(np.ceil(found.bound - 1e-6)))
        if not found.values:
            return _Answer(None, bound_ns, False)
        chosen = tuple(k for k, value in zip(kernels, found.values, strict=False) if value)
        if found.status is CpStatus.OPTIMAL and not self.gap:
            bound_ns = sum(self.costs_ns[k] for k in chosen)
        return _Answer(chosen, bound_ns, False)


def _load(
    program: Formulation, alive: npt.NDArray[np.bool_], matrix: Matrix
) -> tuple[CpSatModel, npt.NDArray[np.int64]]:
    """Return the program over some of its variables as a CP-SAT model, and these variables in order.

    `alive`: bool[variable]: the variables to load; the others are 0. `matrix`: the program's rows, or the first ones.
    """
    if len(matrix.least) != len(program.rows):
        matrix = Matrix.of(program)
    model, kept, count = CpSatModel(), np.flatnonzero(alive), len(program.rows)
    number = np.cumsum(alive) - 1
    for j in kept.tolist():
        model.variable(0, program.most[j])
    inside = alive[matrix.columns]
    rows, factors = matrix.rows[inside], matrix.factors[inside]
    ends = np.cumsum(np.bincount(rows, minlength=count))
    begins = np.concatenate([[0], ends[:-1]])
    # A row that holds whatever the variables are is left out, also the row 0 = 0.
    is_open = np.bincount(rows, factors < 0, count) > 0
    has_effect = np.where(matrix.is_equal, (ends > begins) | (matrix.least != 0), (matrix.least > 0) | is_open)
    columns, numbers = number[matrix.columns[inside]].tolist(), factors.tolist()
    for i in np.flatnonzero(has_effect).tolist():
        begin, end, row = begins[i], ends[i], program.rows[i]
        model.add(columns[begin:end], numbers[begin:end], row.least, row.least if row.is_equal else MOST)
    return model, kept


def _cycles(problem: Problem, waiting: Sequence[int]) -> list[list[Port]]:
    """Return the cycles of ports among kernels that wait for each other."""
    after: dict[Port, list[Port]] = {}
    for k in waiting:
        for port in problem.kernels[k].outputs:
            after.setdefault(port, [])
    for k in waiting:
        for need in problem.needs(k):
            if need in after:
                after[need].extend(problem.kernels[k].outputs)
    return [c for c in strong_components(after) if len(c) > 1 or c[0] in after[c[0]]]
