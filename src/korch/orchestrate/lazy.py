"""Candidates -> plan, measuring only what matters.

Every candidate first has an admissible lower bound. Solve; measure the candidates that the solution
uses; solve again, until all that it uses is measured. Costs only rise from bounds to measurements,
so the last solution is the optimum over *all* candidates, measured or not. At any moment there is a
lower bound for the cost of every plan, and, once all of one solution is measured, a best plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.orchestrate.instance import make_problem
from korch.orchestrate.problem import Certificate, Plan, Problem, Status
from korch.orchestrate.solve import solve
from korch.orchestrate.verify import verify_plan
from korch.primitive.graph import PrimitiveGraph

logger = logging.getLogger("korch.orchestrate")


class Meter(Protocol):
    """Costs of candidates."""

    def bound_ns(self, candidate: Candidate) -> int:
        """Return an admissible lower bound."""
        ...

    def known(self, candidate: Candidate) -> Measured | Failed | None:
        """Return what the database says of a candidate."""
        ...

    def measure(self, candidates: Sequence[Candidate]) -> list[Measured | Failed]:
        """Build and time candidates."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the loop.

    Attributes:
        bound_ns: no plan costs less.
        incumbent_ns: the best plan whose kernels are all measured; None if there is none yet.
        measured: candidates measured so far, in this run or before.
        seconds: since the start.
    """

    bound_ns: int
    incumbent_ns: int | None
    measured: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Orchestration:
    """The result: the chosen candidates in order, what is proven of them, and how it came about."""

    steps: tuple[Candidate, ...]
    certificate: Certificate
    costs_ns: tuple[int, ...]
    rounds: tuple[Round, ...]
    measured: int
    distinct_measured: int
    failed: int
    stopped_by_budget: bool


class LazyLoop:
    """The loop's state: which candidates are measured, and the best plan so far."""

    def __init__(self, graph: PrimitiveGraph, candidates: Sequence[Candidate], meter: Meter,
                 options: Options, deadline_s: float | None = None,
                 progress: Callable[[Round], None] | None = None) -> None:  # fmt: skip
        self.graph = graph
        self.meter = meter
        self.options = options
        self.deadline_s = deadline_s
        self.progress = progress
        self.start_s = time.monotonic()
        self.records: dict[str, Measured | Failed] = {}
        for candidate in candidates:
            record = meter.known(candidate)
            if record is not None:
                self.records[candidate.key] = record
        self.candidates = list(candidates)
        self.failed = 0
        self._drop_failed()
        self.rounds: list[Round] = []
        self.best: tuple[int, tuple[Candidate, ...]] | None = None
        self.bound_ns = 0

    def run(self) -> Orchestration:
        """Solve and measure until the plan's costs are all measured, or the budget is spent.

        Raises:
            InfeasibleError: no plan exists.
        """
        stopped = False
        while True:
            plan, problem = self._solve(self.candidates)
            self.bound_ns = max(self.bound_ns, plan.certificate.bound_ns)
            chosen = [self.candidates[k] for k in plan.kernels]
            unknown = [c for c in chosen if c.key not in self.records]
            if not unknown:
                self._keep(plan.certificate.objective_ns or 0, chosen)
                self._report()
                if plan.certificate.status is Status.OPTIMAL or not self._time_left():
                    break
                logger.warning("the solver stopped with a gap of %.2f %%",
                               100 * (plan.certificate.gap or 0))  # fmt: skip
                break
            self._measure(unknown)
            self._try_incumbent(chosen)
            self._report()
            if not self._time_left():
                stopped = True
                break
        if self.best is None:
            self._fall_back()
        return self._result(stopped)

    def _solve(self, candidates: Sequence[Candidate]) -> tuple[Plan, Problem]:
        problem = make_problem(self.graph, candidates, self.cost_ns)
        hint = None
        if self.best is not None:
            number = {c.key + str(c.group.primitives): k for k, c in enumerate(candidates)}
            keys = [c.key + str(c.group.primitives) for c in self.best[1]]
            hint = [number[key] for key in keys if key in number]
        seconds = self.options.solver_seconds
        left = self._seconds_left()
        if left is not None:
            seconds = max(1.0, min(seconds, left))
        plan = solve(
            problem, seconds=seconds, workers=self.options.solver_workers,
            seed=self.options.seed, hint=hint,
        )  # fmt: skip
        if not plan.kernels and problem.required:
            raise InfeasibleError(
                f"the solver found no plan within {seconds:.0f} s",
                hint="Give it longer (--solver-seconds) or fewer candidates (--max-primitives)",
            )
        verify_plan(problem, plan)
        return plan, problem

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        """Return a candidate's measured time, or its bound."""
        record = self.records.get(candidate.key)
        bound = self.meter.bound_ns(candidate)
        # A measurement below the bound says that the bound is off for it: it counts as the bound,
        # or costs would not only rise and the last solution would prove nothing.
        return (
            (max(record.time_ns, bound), True) if isinstance(record, Measured) else (bound, False)
        )

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        unique = list({c.key: c for c in candidates if c.key not in self.records}.values())
        for candidate, record in zip(unique, self.meter.measure(unique), strict=True):
            self.records[candidate.key] = record
        self._drop_failed()

    def _drop_failed(self) -> None:
        kept = [c for c in self.candidates if not isinstance(self.records.get(c.key), Failed)]
        self.failed += len(self.candidates) - len(kept)
        self.candidates = kept

    def _try_incumbent(self, chosen: Sequence[Candidate]) -> None:
        costs = [self.cost_ns(c) for c in chosen]
        alive = not any(isinstance(self.records.get(c.key), Failed) for c in chosen)
        if alive and all(measured for _, measured in costs):
            self._keep(sum(cost for cost, _ in costs), chosen)

    def _keep(self, cost_ns: int, chosen: Sequence[Candidate]) -> None:
        if self.best is None or cost_ns < self.best[0]:
            self.best = (cost_ns, tuple(chosen))

    def _fall_back(self) -> None:
        """Without a measured plan when time is up: measure what the next solutions use anyway."""
        while self.best is None:
            plan, _ = self._solve(self.candidates)
            chosen = [self.candidates[k] for k in plan.kernels]
            self._measure(chosen)
            self._try_incumbent(chosen)

    def _seconds_left(self) -> float | None:
        if self.deadline_s is None:
            return None
        return self.deadline_s - time.monotonic()

    def _time_left(self) -> bool:
        left = self._seconds_left()
        return left is None or left > 0

    def _report(self) -> None:
        entry = Round(self.bound_ns, self.best[0] if self.best else None, self._count_measured(),
                      time.monotonic() - self.start_s)  # fmt: skip
        self.rounds.append(entry)
        if self.progress is not None:
            self.progress(entry)

    def _count_measured(self) -> int:
        return sum(isinstance(self.records.get(c.key), Measured) for c in self.candidates)

    def _result(self, stopped: bool) -> Orchestration:
        if self.best is None:
            raise InfeasibleError("no plan could be measured")
        objective_ns, steps = self.best
        bound_ns = min(self.bound_ns, objective_ns)
        certificate = Certificate(
            status=Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE,
            objective_ns=objective_ns, bound_ns=bound_ns, kernels=len(self.candidates),
            measured=self._count_measured(), is_measured=True,
            seconds=time.monotonic() - self.start_s,
        )  # fmt: skip
        return Orchestration(
            steps=steps, certificate=certificate,
            costs_ns=tuple(self.cost_ns(c)[0] for c in steps), rounds=tuple(self.rounds),
            measured=certificate.measured,
            distinct_measured=sum(isinstance(r, Measured) for r in self.records.values()),
            failed=self.failed, stopped_by_budget=stopped,
        )  # fmt: skip
