"""Linear constraints and rectangles -> what CP-SAT finds.

OR-Tools' own interface for Python imports pandas, which takes several times as long as a small solve. This one writes
the model that both pass to the solver.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

MOST = (1 << 63) - 1
"""The largest number that CP-SAT takes."""


class CpStatus(Enum):
    """What is known when a solve ends."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    INVALID = "model_invalid"


@dataclass(frozen=True, slots=True)
class CpResult:
    """The result of a solve."""

    status: CpStatus  # what is known
    bound: float  # a lower bound of the objective
    values: tuple[int, ...]  # the value of each variable; empty without a solution


class CpSatModel:
    """A model over integer variables, which are numbered from 0."""

    def __init__(self) -> None:
        """Begin without variables. CP-SAT is loaded here, which takes a fifth of a second."""
        from ortools.sat.python import cp_model_helper

        self._ortools: Any = cp_model_helper
        self._proto: Any = cp_model_helper.CpModelProto()
        self._variables, self._constraints = 0, 0

    def variable(self, low: int, high: int) -> int:
        """Return a new variable with a value from `low` to `high`."""
        self._proto.variables.add().domain.extend((low, high))
        self._variables += 1
        return self._variables - 1

    def add(self, variables: Sequence[int], factors: Sequence[int], low: int, high: int = MOST) -> None:
        """Demand that a weighted sum of variables is from `low` to `high`."""
        linear = self._constraint().linear
        linear.vars.extend(variables)
        linear.coeffs.extend(factors)
        linear.domain.extend((low, high))

    def apart(self, rectangles: Iterable[tuple[int, int, int, int]]) -> None:
        """Demand that rectangles do not overlap.

        `rectangles`: the first place and the length on a fixed axis; the variable of the first place on the other axis,
        and the length there.
        """
        pairs = []
        for begin, length, variable, height in rectangles:
            fixed, place = self._constraints, self._constraints + 1
            interval = self._constraint().interval
            interval.start.offset, interval.size.offset, interval.end.offset = begin, length, begin + length
            interval = self._constraint().interval
            for end, offset in ((interval.start, 0), (interval.end, height)):
                end.vars.append(variable)
                end.coeffs.append(1)
                end.offset = offset
            interval.size.offset = height
            pairs.append((fixed, place))
        both = self._constraint().no_overlap_2d
        both.x_intervals.extend(x for x, _ in pairs)
        both.y_intervals.extend(y for _, y in pairs)

    def minimize(self, variables: Sequence[int], factors: Sequence[int]) -> None:
        """Look for a solution with the least weighted sum of variables."""
        self._proto.objective.vars.extend(variables)
        self._proto.objective.coeffs.extend(factors)

    def hint(self, variable: int, value: int) -> None:
        """Begin the search with a value of a variable."""
        self._proto.solution_hint.vars.append(variable)
        self._proto.solution_hint.values.append(value)

    def solve(self, seconds: float, parameters: Mapping[str, float]) -> CpResult:
        """Solve for some seconds. `parameters`: those of CP-SAT, by name."""
        settings = self._ortools.SatParameters()
        # CP-SAT's own handler would end the process at the next Ctrl-C, without a message.
        own = {"max_time_in_seconds": max(0.01, seconds), "catch_sigint_signal": False}
        for name, value in {**own, **parameters}.items():
            setattr(settings, name, value)
        solver = self._ortools.SolveWrapper()
        solver.set_parameters(settings)
        found = solver.solve(self._proto)
        status = CpStatus(found.status.name.lower())
        return CpResult(status, float(found.best_objective_bound), tuple(found.solution))

    def _constraint(self) -> Any:
        self._constraints += 1
        return self._proto.constraints.add()
