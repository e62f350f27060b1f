"""The records of a validation: plans, their results, and the plan that won."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from korch.candidate.candidate import Candidate
from korch.measure.expect import Expected
from korch.measure.uncompiled import Uncompiled
from korch.numerics import Difference, Differences, worst
from korch.primitive.op import Array
from korch.runtime.bind import PlanStep
from korch.runtime.report import OutputError, PlanResult, Report
from korch.runtime.runnable import PlanExecutable
from korch.search.result import PlanName


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan to validate."""

    name: str  # its name
    steps: tuple[Candidate, ...]  # its kernels in order
    costs: tuple[tuple[int, bool], ...]  # the cost of each kernel in nanoseconds, and whether it was measured
    expected: Expected | None = None  # the expected time of a run; None if a kernel was not measured

    @property
    def predicted_ns(self) -> int:
        """The sum of the costs."""
        return sum(cost for cost, _ in self.costs)


Make = Callable[[Sequence[PlanStep[Any]]], PlanExecutable]
"""A function that builds an executable from the chosen kernels in order."""


@dataclass(frozen=True)
class Result:
    """The result of a plan: the times of complete runs and the errors, or why it is rejected.

    `disturbed` is the number of runs that were dropped because a thread had no core for some time.
    If too few runs remain, `is_disturbed` is true, and the times are those of all runs, each
    minus the time without a core.
    """

    entry: PlanEntry
    executable: PlanExecutable | None
    times_ns: tuple[int, ...] = ()
    errors: Differences | None = None
    refusal: str = ""
    is_uncompiled: bool = False
    disturbed: int = 0
    is_disturbed: bool = False

    @property
    def error(self) -> Difference | None:
        """The largest errors over all outputs; None if the plan did not run."""
        return None if self.errors is None else worst(self.errors)

    @property
    def max_error(self) -> float | None:
        """The largest error relative to the largest element; None if the plan did not run."""
        return None if self.error is None else self.error.of_largest

    @property
    def median_ns(self) -> float:
        """The median time of a run."""
        return float(np.median(self.times_ns)) if self.times_ns else float("inf")

    @property
    def rank_ns(self) -> float:
        """The time by which plans are compared: the median or, if disturbed, its geometric mean with the prediction."""
        if not self.is_disturbed:
            return self.median_ns
        return math.sqrt(self.median_ns * max(1, self.entry.predicted_ns))

    @property
    def is_right(self) -> bool:
        """Whether the plan ran and its results are correct, so that it may win."""
        return self.errors is not None and not self.refusal

    def to_record(self) -> PlanResult:
        """Return the record of the result for the report."""
        low_ms = high_ms = None
        if self.times_ns:
            low_ms, high_ms = (float(ns) / 1e6 for ns in np.percentile(self.times_ns, [10, 90]))
        expected = self.entry.expected
        expected_ms: tuple[float | None, ...] = (None, None, None)
        if expected is not None:
            expected_ms = (expected.median_ns / 1e6, expected.p10_ns / 1e6, expected.p90_ns / 1e6)
        return PlanResult(
            plan=PlanName(self.entry.name),
            kernels=sum(not step.offer.is_in_place for step in self.entry.steps),
            predicted_ms=self.entry.predicted_ns / 1e6,
            measured_ms=self.median_ns / 1e6 if self.times_ns else None,
            p10_ms=low_ms,
            p90_ms=high_ms,
            max_error=self.max_error,
            refusal=self.refusal,
            expected_ms=expected_ms[0],
            expected_p10_ms=expected_ms[1],
            expected_p90_ms=expected_ms[2],
            is_measured=all(is_measured for _, is_measured in self.entry.costs),
            disturbed=self.disturbed,
            is_disturbed=self.is_disturbed,
        )


@dataclass(frozen=True)
class Validation:
    """The results of all plans; the winner is the fastest plan with correct results."""

    results: tuple[Result, ...]  # the results of all plans
    winner: PlanExecutable  # the executable that is kept
    won: Result  # the winner's result
    # the errors, by output, of the model as given, run without rewrites, operator by operator in its own types
    given: Differences
    arrays: Sequence[Array]  # the inputs with which results were compared
    timed: Sequence[Array]  # the inputs of the runs that were timed

    def uncompiled(self) -> list[Uncompiled]:
        """Return the plans that did not compile."""
        return [Uncompiled(f"plan {r.entry.name!r}", r.refusal) for r in self.results if r.is_uncompiled]

    def described(self, report: Report) -> Report:
        """Return a report with the results of the validation."""
        given, error = worst(self.given), self.won.error or Difference()
        expected, errors = self.won.entry.expected, self.won.errors or {}
        return replace(
            report,
            plan=PlanName(self.won.entry.name),
            plans=tuple(result.to_record() for result in self.results),
            measured_ms=self.won.median_ns / 1e6,
            expected_ms=None if expected is None else expected.median_ns / 1e6,
            max_error=error.of_largest,
            rms_error=error.of_rms,
            given_error=given.of_largest,
            given_rms_error=given.of_rms,
            output_errors=tuple(OutputError(name, found, self.given[name]) for name, found in errors.items()),
        )
