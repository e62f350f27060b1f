"""The records of a validation: plans, their results, and the plan that won."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from korch.candidate.candidate import Candidate
from korch.measure.expect import Expected
from korch.numerics import Difference, Differences, worst
from korch.primitive.op import Array
from korch.runtime.executable import TensorInfo
from korch.runtime.program import Step
from korch.runtime.record import PlanRecord


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan to validate.

    Attributes:
        name: what it is called.
        steps: its kernels in order.
        costs: the cost of each in nanoseconds, and whether it is measured.
        expected: the expected time of a run; None if a kernel was not measured.
    """

    name: str
    steps: tuple[Candidate, ...]
    costs: tuple[tuple[int, bool], ...]
    expected: Expected | None = None

    @property
    def predicted_ns(self) -> int:
        """The sum of the costs."""
        return sum(cost for cost, _ in self.costs)


class Runnable(Protocol):
    """An executable of any target."""

    report: dict[str, Any]

    @property
    def plan(self) -> PlanRecord:
        """What it runs."""
        ...

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the model on arrays."""
        ...

    def get_outputs(self) -> list[TensorInfo]:
        """Describe the outputs."""
        ...

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the model once and gives its nanoseconds."""
        ...


Make = Callable[[Sequence[Step[Any]]], Runnable]
"""Builds an executable of chosen kernels in order."""


@dataclass(frozen=True)
class Result:
    """What became of an entry: times of whole runs and the error, or why it is out.

    `disturbed` counts the runs that were dropped, as a thread had no core for a part of them. If
    too few are left, the times are of all, each less that part, and `is_disturbed` says so.
    """

    entry: Entry
    executable: Runnable | None
    times_ns: tuple[int, ...] = ()
    errors: Differences | None = None
    refusal: str = ""
    is_uncompiled: bool = False
    disturbed: int = 0
    is_disturbed: bool = False

    @property
    def error(self) -> Difference | None:
        """The worst over its outputs, None if the plan is out before it ran."""
        return None if self.errors is None else worst(self.errors)

    @property
    def max_error(self) -> float | None:
        """The largest difference from the reference, None if the plan is out before it ran."""
        return None if self.error is None else self.error.of_largest

    @property
    def median_ns(self) -> float:
        """The median time of a run."""
        return float(np.median(self.times_ns)) if self.times_ns else float("inf")

    @property
    def rank_ns(self) -> float:
        """What plans are compared by: what disturbed runs say counts half, the prediction half."""
        if not self.is_disturbed:
            return self.median_ns
        return math.sqrt(self.median_ns * max(1, self.entry.predicted_ns))

    @property
    def is_right(self) -> bool:
        """Whether it may win."""
        return self.errors is not None and not self.refusal

    def as_record(self) -> dict[str, Any]:
        """Return it as plain data."""
        times = np.array(self.times_ns) / 1e6
        low, high = np.percentile(times, [10, 90]) if len(times) else (None, None)
        expected = self.entry.expected
        return {
            "plan": self.entry.name,
            "kernels": sum(not step.offer.is_in_place for step in self.entry.steps),
            "predicted_ms": self.entry.predicted_ns / 1e6,
            "expected_ms": expected and expected.median_ns / 1e6,
            "expected_p10_ms": expected and expected.p10_ns / 1e6,
            "expected_p90_ms": expected and expected.p90_ns / 1e6,
            "is_measured": all(is_measured for _, is_measured in self.entry.costs),
            "measured_ms": self.median_ns / 1e6 if len(times) else None,
            "p10_ms": low,
            "p90_ms": high,
            "max_error": self.max_error,
            "refusal": self.refusal,
            "disturbed": self.disturbed,
            "is_disturbed": self.is_disturbed,
        }


@dataclass(frozen=True)
class Validation:
    """All results; the winner is the fastest that is right.

    Attributes:
        results: of all plans.
        winner: the executable that is kept.
        won: its result.
        given: the errors, by output, of the model as given, without rewrites, operator by operator
            in its own types.
        arrays: the inputs of all runs.
    """

    results: tuple[Result, ...]
    winner: Any
    won: Result
    given: Differences
    arrays: Sequence[Array]

    def uncompiled(self) -> list[dict[str, str]]:
        """Return the plans that do not compile, as rows of the report."""
        return [
            {"candidate": f"plan {r.entry.name!r}", "message": r.refusal, "file": ""}
            for r in self.results
            if r.is_uncompiled
        ]

    def report(self) -> dict[str, Any]:
        """Return the report's entry on the end-to-end validation."""
        given, expected = worst(self.given), self.won.entry.expected
        return {
            "plan": self.won.entry.name,
            "measured_ms": self.won.median_ns / 1e6,
            "expected_ms": expected and expected.median_ns / 1e6,
            "max_error": self.won.max_error,
            "rms_error": self.won.error.of_rms if self.won.error else None,
            "given_error": given.of_largest,
            "given_rms_error": given.of_rms,
            "output_errors": [
                {"output": name, **asdict(error), "given": asdict(self.given[name])}
                for name, error in (self.won.errors or {}).items()
            ],
            "contest": [result.as_record() for result in self.results],
        }
