"""Binary linear program -> a proven lower bound, and by how much choosing each kernel raises it.

The linear relaxation is solved in floating point, but its result is not trusted: the dual values
are rounded to fixed-point integers, and the bound and the reduced costs are computed exactly from
these. Any dual values, even inaccurate ones, give a valid bound; accurate ones give a tight bound.

Source: Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear programming"
(2004).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from ortools.linear_solver import pywraplp
from ortools.linear_solver.linear_solver_pb2 import MPModelProto

from korch.binary_program.formulate import Formulation

# Fraction bits of the fixed-point dual values; fewer for very large costs, so that a column's sum fits 63 bits.
FRACTION_BITS = 20
_SUM_BITS = 61


@dataclass(frozen=True, slots=True)
class Relaxation:
    """What the relaxation proves."""

    bound_ns: int  # lower bound of all plans' costs
    # int64[variable]: a plan in which the variable is not 0 costs at least `bound_ns + slack_ns`
    slack_ns: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The rows of a program as arrays."""

    rows: npt.NDArray[np.int64]  # int64[entry]: the row of each coefficient that is not 0
    columns: npt.NDArray[np.int64]  # int64[entry]: its variable
    factors: npt.NDArray[np.int64]  # int64[entry]: the coefficient
    least: npt.NDArray[np.int64]  # int64[row]: the right-hand side
    is_equal: npt.NDArray[np.bool_]  # bool[row]: whether the row is an equation
    in_column: int  # the largest sum over a column of the coefficients' absolute values

    @staticmethod
    def of(program: Formulation) -> Matrix:
        """Return the matrix of a program."""
        entries = np.array([len(row.columns) for row in program.rows], np.int64)
        columns = _joined(row.columns for row in program.rows)
        factors = _joined(row.coefficients for row in program.rows)
        return Matrix(
            rows=np.repeat(np.arange(len(entries)), entries),
            columns=columns,
            factors=factors,
            least=np.array([row.least for row in program.rows], np.int64),
            is_equal=np.array([row.is_equal for row in program.rows], bool),
            in_column=int(np.bincount(columns, np.abs(factors)).max()) if columns.size else 1,
        )


def _joined(numbers: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(numbers), np.int64)


class Relaxer:
    """A program's relaxation: loaded into the LP solver once, then solved for changing costs."""

    def __init__(self, program: Formulation) -> None:
        self.program = program
        self.matrix = Matrix.of(program)
        self.solver = pywraplp.Solver.CreateSolver("CLP")
        self.solver.LoadModelFromProto(_model(program))
        self.variables = self.solver.variables()
        self.constraints: list[pywraplp.Constraint] = self.solver.constraints()
        self._costs_ns: list[int] = [0] * len(program.problem.kernels)
        self._forbidden: frozenset[int] = frozenset()
        self._last: Relaxation | None = None  # the optimal result for these costs and kernels

    def _load_new_rows(self) -> None:
        if len(self.program.rows) != len(self.matrix.least):
            self.matrix = Matrix.of(self.program)
            self._last = None
        infinity = self.solver.infinity()
        for row in self.program.rows[len(self.constraints) :]:
            most = row.least if row.is_equal else infinity
            constraint = self.solver.Constraint(row.least, most)
            for column, coefficient in zip(row.columns, row.coefficients, strict=True):
                constraint.SetCoefficient(self.variables[column], coefficient)
            self.constraints.append(constraint)

    def solve(self, costs_ns: Sequence[int], forbidden: Collection[int], seconds: float) -> Relaxation:
        """Solve for the given costs.

        `forbidden`: kernels that must not be used. `seconds`: time limit; if it is too short, the bound is valid but
        weaker.
        """
        self._load_new_rows()
        objective, forbidden = self.solver.Objective(), frozenset(forbidden)
        if self._last is not None and self._forbidden == forbidden and self._costs_ns == costs_ns:
            return self._last
        for k, (before_ns, cost_ns) in enumerate(zip(self._costs_ns, costs_ns, strict=True)):
            if before_ns != cost_ns:
                objective.SetCoefficient(self.variables[k], cost_ns)
        for k in self._forbidden ^ forbidden:
            self.variables[k].SetUb(0 if k in forbidden else 1)
        self._costs_ns, self._forbidden = list(costs_ns), forbidden
        objective.SetMinimization()
        self.solver.SetTimeLimit(max(1, int(1000 * seconds)))
        duals = np.zeros(len(self.constraints))
        status = self.solver.Solve()
        if status in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
            duals = np.array([constraint.dual_value() for constraint in self.constraints])
        found = safe_bound(self.program, costs_ns, forbidden, duals, self.matrix)
        self._last = found if status == pywraplp.Solver.OPTIMAL else None
        return found


def _model(program: Formulation) -> MPModelProto:
    """Return the program without costs as one message: adding rows and coefficients one by one is slow."""
    model = MPModelProto()
    for most in program.most:
        model.variable.add(lower_bound=0, upper_bound=most)
    for row in program.rows:
        limit = float(row.least) if row.is_equal else math.inf
        model.constraint.add(
            var_index=row.columns, coefficient=row.coefficients, lower_bound=row.least, upper_bound=limit
        )
    return model


def safe_bound(
    program: Formulation,
    costs_ns: Sequence[int],
    forbidden: Collection[int],
    duals: npt.NDArray[np.float64],
    matrix: Matrix | None = None,
) -> Relaxation:
    """Return the bound and slacks that follow from dual values; they are valid for any dual values.

    Args:
        program: has the rows and the variables' upper bounds.
        costs_ns: one per kernel.
        forbidden: kernels that must not be used.
        duals: float64[row].
        matrix: the matrix of the rows, if it is known.

    For y ≥ 0 on the inequalities, cost·x ≥ y·b + Σ_j min(0, r_j)·most_j with r = cost - Aᵀ·y. If
    x_j ≥ 1 and r_j > 0, the bound rises by r_j.
    """
    most = np.array(program.most, np.int64)
    if not np.isfinite(duals).all():
        return Relaxation(0, np.zeros(len(most), np.int64))
    most[list(forbidden)] = 0
    costs = np.zeros(len(most), np.int64)
    costs[: len(costs_ns)] = costs_ns
    matrix = matrix or Matrix.of(program)
    in_column = matrix.in_column
    largest = max(1, int(costs.max(initial=0)), int(np.abs(duals).max(initial=0)) + 1)
    bits = min(FRACTION_BITS, _SUM_BITS - (in_column + 1).bit_length() - largest.bit_length())
    if bits < 0:
        return Relaxation(0, np.zeros(len(most), np.int64))
    y = np.round(duals * (1 << bits)).astype(np.int64)
    y[(y < 0) & ~matrix.is_equal] = 0
    reduced = costs << bits
    np.subtract.at(reduced, matrix.columns, matrix.factors * y[matrix.rows])
    total = sum(int(y[i]) * int(matrix.least[i]) for i in np.flatnonzero(matrix.least))
    negative = np.flatnonzero(reduced < 0)
    total += sum(int(reduced[j]) * int(most[j]) for j in negative)
    bound_ns = -(-total >> bits)
    # The bound may be rounded up by less than 1 ns, or raised to 0 if it is negative: the slacks are reduced by that.
    slack_ns = (np.maximum(reduced, 0) >> bits) - 1 + max(min(0, bound_ns), -(1 << _SUM_BITS))
    return Relaxation(max(0, bound_ns), np.maximum(slack_ns, 0))
