"""Plans -> executables, timed interleaved and checked; the fastest one that is right wins.

Sums of isolated kernel times can mislead, so the optimum must also win as a whole. Every executable
is compared with the reference interpreter on random inputs before it may win.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from korch.candidate.candidate import Candidate, Refusal
from korch.deadline import Deadline
from korch.errors import CompileError, InaccurateError, InfeasibleError, KorchError, UnprovidedError
from korch.measure.absence import Absence
from korch.measure.expect import Expected
from korch.measure.meter import AnyMeter
from korch.measure.record import summarize
from korch.numerics import Difference, Differences, Standard, worst
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.runtime.executable import TensorInfo
from korch.runtime.program import Step
from korch.runtime.record import PlanRecord

logger = logging.getLogger("korch.contest")

ROUNDS = 11
SECONDS = 4.0
BUILD_KERNELS = 10
"""Building a plan takes as long as this many kernels, besides its own kernels."""

WEIGHTS_BYTES = 4e6
"""Packing or writing this many bytes of weights takes as long as building a kernel."""

LEAST_ROUNDS = 3
DISTURBED_ROUNDS, DISTURBED_SECONDS = 3 * ROUNDS, 3 * SECONDS
"""Most rounds, and their longest time, while too few runs are undisturbed."""

SAFETY = 1.5
"""Another plan is validated only if this many times its predicted duration is left."""

HEAVY_BYTES = 512 << 20
"""Of plans with more weights than this, only two are in memory at a time."""


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
class Contest:
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


def standard_of(model: PrimitiveGraph, planned: PrimitiveGraph, options: Options) -> tuple[dict[str, Array], Standard]:
    """Return random inputs, and what is right for them: a model may be refused before its search.

    Args:
        model: the model as given.
        planned: the graph that plans are for, with the same inputs and outputs.
        options: tolerance and seed.

    Raises:
        UnprovidedError: the reference of an opaque operator does not take the inputs.
    """
    inputs = random_inputs(model, options.search.seed)
    try:
        return inputs, Standard(model, inputs, planned, options.tolerance, options.search.seed)
    except Exception as error:
        if not _has_opaque(model):
            raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnprovidedError(f"the reference of an opaque operator fails on random inputs: {text[:200]}") from error


def hold_contest(
    graph: PrimitiveGraph,
    entries: Sequence[Entry],
    meter: AnyMeter,
    make: Make,
    inputs: Mapping[str, Array],
    standard: Standard,
    deadline: Deadline,
) -> Contest:
    """Build, check and time plans.

    Args:
        graph: the graph that the plans are for.
        entries: the plans; the first one is the one that the search expects most of.
        meter: builds kernels.
        make: builds an executable.
        inputs: what to feed it, by name.
        standard: what is right for them.
        deadline: when to end; the first plan that is right is built and run in any case.

    Raises:
        InaccurateError: no plan is within the tolerance.
        InfeasibleError: no plan runs.
    """
    arrays = [inputs[name] for name, _ in graph.inputs]

    def attempt(entry: Entry) -> Result:
        meter.tell(f"building and checking plan {entry.name!r}")
        try:
            steps = _steps(entry, meter)
            begun_s = time.monotonic()
            executable = make(steps)
            units = BUILD_KERNELS + len(steps) + executable.plan.weights_bytes / WEIGHTS_BYTES
            meter.pace.note("build", units, time.monotonic() - begun_s)
            names = [tensor.name for tensor in executable.get_outputs()]
            errors, refused = standard.judge(dict(zip(names, executable(*arrays), strict=True)))
        except KorchError as error_found:
            is_uncompiled = isinstance(error_found, CompileError)
            level, extra = logging.INFO, None
            if is_uncompiled:
                level, extra = logging.WARNING, {"uncompiled": True}
            logger.log(level, "plan %s is out: %s", entry.name, error_found, extra=extra)
            return Result(entry, None, refusal=str(error_found), is_uncompiled=is_uncompiled)
        return Result(entry, executable, errors=errors, refusal=_refusal(errors, refused, standard))

    def needed_s(entry: Entry) -> float:
        """Return what it takes to compile what was not measured."""
        return meter.compile_s([c for c, (_, done) in zip(entry.steps, entry.costs, strict=True) if not done])

    timed = _hold(_distinct(entries), attempt, arrays, Until(deadline, needed_s, meter.tell))
    able = [result for result in timed if result.is_right and result.executable is not None]
    if not able:
        # What is opaque may refuse random inputs that contradict each other.
        is_computed = any(r.error is not None for r in timed)
        kind = InaccurateError if is_computed else InfeasibleError
        raise (UnprovidedError if _has_opaque(graph) else kind)(
            "no plan computes what the reference does: " + "; ".join(f"{r.entry.name}: {r.refusal}" for r in timed),
            hint="Set --tolerance above what the model needs, or report this with the model",
        )
    won = min(able, key=lambda result: result.rank_ns)
    if won.executable is None:
        raise InfeasibleError("the winning plan has no executable")
    return Contest(tuple(timed), won.executable, won, standard.given, arrays)


def _refusal(errors: Differences, names: Sequence[str], standard: Standard) -> str:
    """Return why a plan is refused that has too large errors in some outputs; "" if in none."""
    if not names:
        return ""
    name = max(names, key=lambda n: errors[n].of_largest - standard.allowed(n))
    own = (
        ""
        if standard.user is not None
        else (f", where the model in its own types errs by up to {standard.own[name].of_largest:.1e}")
    )
    return (
        f"its error is {errors[name].of_largest:.2e} of the largest element of output {name!r}, "
        f"more than {standard.allowed(name):.1e}{own}"
    )


@dataclass(frozen=True)
class Until:
    """When no more plans are built and run.

    Attributes:
        deadline: the time.
        needed_s: what must be compiled for a plan takes so long.
        tell: told what is done.
    """

    deadline: Deadline = field(default_factory=Deadline)
    needed_s: Callable[[Entry], float] = lambda entry: 0.0
    tell: Callable[[str], None] = lambda text: None

    def leaves_out(self, entry: Entry, build_s: float) -> bool:
        """Return whether there is no time for a plan if building one takes so long."""
        left_s = self.deadline.left_s
        return left_s is not None and left_s < SAFETY * (build_s + self.needed_s(entry))


def _hold(
    entries: Sequence[Entry], attempt: Callable[[Entry], Result], arrays: Sequence[Array], until: Until
) -> list[Result]:
    """Build and time all plans in turn, or, if they are too large for memory, two at a time.

    Then each has to beat the best so far, and only the better one of the two is kept.
    """
    begun_s = time.monotonic()
    results = [attempt(entry) for entry in entries[:1]]
    build_s = time.monotonic() - begun_s

    def attempt_in_time(entry: Entry) -> Result:
        if any(result.is_right for result in results) and until.leaves_out(entry, build_s):
            return Result(entry, None, refusal="the budget left no time to build it")
        return attempt(entry)

    if not any(_weights_bytes(result) > HEAVY_BYTES for result in results):
        for entry in entries[1:]:
            results.append(attempt_in_time(entry))
        return _time_all(results, arrays, until)
    results = _time_all(results, arrays, until)
    best = 0
    for entry in entries[1:]:
        results[best], other = _challenge(results[best], attempt_in_time(entry), arrays, until)
        results.append(other)
        best = best if other.executable is None else len(results) - 1
    return results


def _challenge(best: Result, challenger: Result, arrays: Sequence[Array], until: Until) -> tuple[Result, Result]:
    """Return both with their times, the worse one without its executable."""
    if challenger.executable is None:
        return best, challenger
    first, second = _time_all([best, challenger], arrays, until)
    if second.is_right and not (first.is_right and first.rank_ns <= second.rank_ns):
        return replace(first, executable=None), second
    return first, replace(second, executable=None)


def _weights_bytes(result: Result) -> int:
    return 0 if result.executable is None else result.executable.plan.weights_bytes


def _has_opaque(graph: PrimitiveGraph) -> bool:
    return any(p.row.category is Category.OPAQUE for p in graph.primitives)


def random_inputs(graph: PrimitiveGraph, seed: int) -> dict[str, Array]:
    """Return seeded inputs: floats of a standard normal distribution, integers 0 and 1."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, value in graph.inputs:
        type_ = graph.types[value]
        drawn: Array = rng.integers(0, 2, type_.shape)
        if type_.dtype.is_float:
            drawn = rng.standard_normal(type_.shape, np.float32)
        arrays[name] = np.asarray(drawn).astype(type_.dtype.numpy)
    return arrays


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], Entry] = {}
    for entry in entries:
        found.setdefault(tuple((c.key, c.group.outputs) for c in entry.steps), entry)
    return list(found.values())


def _steps(entry: Entry, meter: AnyMeter) -> list[Step[Any]]:
    steps = []
    for candidate, (cost_ns, is_measured) in zip(entry.steps, entry.costs, strict=True):
        kernel = meter.kernel(candidate)
        if isinstance(kernel, Refusal):
            raise InfeasibleError(f"{candidate.provider} refuses a kernel: {kernel.reason}")
        steps.append(Step(candidate, kernel, cost_ns, meter.bound_ns(candidate), is_measured))
    return steps


def _time_all(results: Sequence[Result], arrays: Sequence[Array], until: Until) -> list[Result]:
    """Time the executables in turn, round by round, so that all meet the same neighbours.

    Runs in which a thread had no core for some time are dropped and taken again.
    """
    runners = {i: r.executable.stopwatch(arrays) for i, r in enumerate(results) if r.executable is not None}
    until.tell(f"comparing {len(runners)} plans" if len(runners) > 1 else "timing the plan")
    times: dict[int, list[tuple[int, int]]] = {i: [] for i in runners}
    for run in runners.values():
        run()
    begun = time.monotonic()
    for turn in range(DISTURBED_ROUNDS):
        seconds, is_hurried = time.monotonic() - begun, until.deadline.is_over
        if turn >= LEAST_ROUNDS and (seconds > DISTURBED_SECONDS or is_hurried):
            break
        is_clear = all(not summarize(*zip(*own, strict=True)).is_disturbed for own in times.values() if own)
        if turn >= LEAST_ROUNDS and is_clear and (turn >= ROUNDS or seconds > SECONDS):
            break
        for i, run in runners.items():
            if not is_hurried or turn == 0:
                run()  # the first run after another plan finds its caches cold
            absence = Absence()
            taken_ns = run()
            times[i].append((taken_ns, absence.away_ns()))
    return [_timed(result, times.get(i, [])) for i, result in enumerate(results)]


def _timed(result: Result, runs: Sequence[tuple[int, int]]) -> Result:
    """Return a result with the times of runs, each with the time for which a thread was away."""
    if not runs:
        return result
    found = summarize(*zip(*runs, strict=True))
    return replace(result, times_ns=found.samples_ns, disturbed=found.disturbed, is_disturbed=found.is_disturbed)
