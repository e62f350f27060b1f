"""Plans -> the fastest executable with correct results.

The sum of kernel times is only a prediction, so complete plans are timed. Before that, the results of each
executable are compared with the reference on random inputs.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from korch.candidate.candidate import Refusal
from korch.errors import CompileError, InaccurateError, InfeasibleError, KorchError, UnprovidedError
from korch.measure.meter import AnyMeter
from korch.numerics import Differences, Standard
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.runtime.bind import PlanStep
from korch.runtime.runnable import PlanExecutable
from korch.system.deadline import Deadline
from korch.validation.plan import Make, PlanEntry, Result, Validation
from korch.validation.standard import GIVE_INPUTS, has_opaque
from korch.validation.timing import Until, time_all

logger = logging.getLogger("korch.validation")

BUILD_KERNELS = 10
"""The fixed part of the time to build a plan, as a number of kernels: it is added to the plan's own kernels."""

WEIGHTS_BYTES = 5e5
"""Packing or writing this many bytes of weights takes as long as building one kernel."""

HEAVY_BYTES = 512 << 20
"""Of plans with more weights than this, only two are in memory at a time."""


@dataclass(frozen=True)
class Trial:
    """The inputs and the reference with which plans are run."""

    graph: PrimitiveGraph  # the graph that the plans are for
    standard: Standard  # the inputs and the exact results for them
    # inputs of the plans that differ from the inputs of `standard`, by name
    given: Mapping[str, Array] = field(default_factory=dict)
    timed: Mapping[str, Array] = field(default_factory=dict)  # inputs of the timed runs that differ from those, by name
    # returns the part of a plan's results that is compared
    cut: Callable[[Sequence[Array]], Sequence[Array]] = lambda arrays: arrays


def validate_plans(
    trial: Trial, entries: Sequence[PlanEntry], meter: AnyMeter, make: Make, deadline: Deadline
) -> Validation:
    """Build, check and time plans.

    `entries`: the plans; the search predicts that the first one is the fastest. `deadline`: when to end; however, plans
    are built and run until one has correct results.

    Raises:
        InaccurateError: no plan is within the tolerance.
        InfeasibleError: no plan runs.
    """
    graph, standard = trial.graph, trial.standard
    given = {**standard.inputs, **trial.given}
    arrays = [given[name] for name, _ in graph.inputs]
    timed_arrays = [trial.timed.get(name, given[name]) for name, _ in graph.inputs]

    def attempt(entry: PlanEntry) -> Result:
        meter.tell(f"building and checking plan {str(entry.name)!r}")
        try:
            steps = steps_of(entry, meter)
            begun_s = time.monotonic()
            executable = make(steps)
            meter.pace.note("build", build_units(executable), time.monotonic() - begun_s)
            names = [tensor.name for tensor in executable.get_outputs()]
            errors, refused = standard.judge(dict(zip(names, trial.cut(executable(*arrays)), strict=True)))
        except KorchError as error_found:
            is_uncompiled = isinstance(error_found, CompileError)
            level, extra = logging.INFO, None
            if is_uncompiled:
                level, extra = logging.WARNING, {"uncompiled": True}
            logger.log(level, "plan %s is out: %s", entry.name, error_found, extra=extra)
            return Result(entry, None, refusal=str(error_found), is_uncompiled=is_uncompiled)
        return Result(entry, executable, errors=errors, refusal=_refusal(errors, refused, standard))

    def needed_s(entry: PlanEntry) -> float:
        """Return the seconds to compile the kernels that were not measured."""
        return meter.compile_s([c for c, (_, done) in zip(entry.steps, entry.costs, strict=True) if not done])

    until = Until(deadline, needed_s, meter.tell)
    distinct, same = _distinct(entries)
    timed = _validate_in_turn(distinct, attempt, timed_arrays, until)
    able = [result for result in timed if result.is_right and result.executable is not None]
    if not able:
        raise _no_plan(timed, graph, standard)
    won = min(able, key=lambda result: result.rank_ns)
    if won.executable is None:
        raise InfeasibleError("the winning plan has no executable")
    return Validation((*timed, *same), won.executable, won, standard.given, arrays, timed_arrays)


def build_units(executable: PlanExecutable) -> float:
    """Return the estimated effort to build a plan, in units of building one kernel."""
    return BUILD_KERNELS + len(executable.plan.steps) + executable.plan.weights_bytes / WEIGHTS_BYTES


def _no_plan(results: Sequence[Result], graph: PrimitiveGraph, standard: Standard) -> KorchError:
    """Return the error for the case that no plan has correct results."""
    kind: type[KorchError] = InfeasibleError
    if all(r.is_uncompiled for r in results):
        return CompileError(results[0].refusal, hint="`korch doctor` checks the compiler")
    if has_opaque(graph):  # opaque operators may refuse inconsistent random inputs
        kind = UnprovidedError
    elif any(r.error is not None for r in results):
        kind = InaccurateError
    return kind(
        "no plan computes what the reference does: " + "; ".join(f"{r.entry.name}: {r.refusal}" for r in results),
        hint=GIVE_INPUTS
        if standard.overflows
        else "Set --tolerance above what the model needs, or report this with the model",
    )


def _refusal(errors: Differences, names: Sequence[str], standard: Standard) -> str:
    """Return the reason to reject a plan for its errors in the named outputs; "" if there are no names."""
    if not names:
        return ""
    name = max(names, key=lambda n: errors[n].of_largest - standard.allowed(n))
    own = f"errs by up to {standard.own[name].of_largest:.1e}"
    if standard.overflows:
        own = "gives infinities or NaN"
    own = "" if standard.user is not None else f", where the model in its own types {own}"
    return (
        f"its error is {errors[name].of_largest:.2e} of the largest element of output {name!r}, "
        f"more than {standard.allowed(name):.1e}{own}"
    )


def _validate_in_turn(
    entries: Sequence[PlanEntry], attempt: Callable[[PlanEntry], Result], arrays: Sequence[Array], until: Until
) -> list[Result]:
    """Build and time all plans in turn; plans with large weights are compared two at a time.

    Of two such plans, only the better one is kept in memory.
    """
    begun_s = time.monotonic()
    results = [attempt(entry) for entry in entries[:1]]
    build_s = time.monotonic() - begun_s

    def attempt_in_time(entry: PlanEntry) -> Result:
        if any(result.is_right for result in results) and until.leaves_out(entry, build_s):
            return Result(entry, None, refusal="the budget left no time to build it")
        return attempt(entry)

    if not any(_weights_bytes(result) > HEAVY_BYTES for result in results):
        for entry in entries[1:]:
            results.append(attempt_in_time(entry))
        return time_all(results, arrays, until)
    results = time_all(results, arrays, until)
    best = 0
    for entry in entries[1:]:
        results[best], other = _challenge(results[best], attempt_in_time(entry), arrays, until)
        results.append(other)
        best = best if other.executable is None else len(results) - 1
    return results


def _challenge(best: Result, challenger: Result, arrays: Sequence[Array], until: Until) -> tuple[Result, Result]:
    """Time two plans; return both results, the worse one without its executable."""
    if challenger.executable is None:
        return best, challenger
    first, second = time_all([best, challenger], arrays, until)
    if second.is_right and not (first.is_right and first.rank_ns <= second.rank_ns):
        return replace(first, executable=None), second
    return first, replace(second, executable=None)


def _weights_bytes(result: Result) -> int:
    return 0 if result.executable is None else result.executable.plan.weights_bytes


def _distinct(entries: Sequence[PlanEntry]) -> tuple[list[PlanEntry], list[Result]]:
    """Return the plans with different kernels, and a result without times for each of the others."""
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], PlanEntry] = {}
    same = []
    for entry in entries:
        first = found.setdefault(tuple((c.key, c.group.outputs) for c in entry.steps), entry)
        if first is not entry:
            same.append(Result(entry, None, refusal=f"it has the kernels of plan {str(first.name)!r}"))
    return list(found.values()), same


def steps_of(entry: PlanEntry, meter: AnyMeter) -> list[PlanStep[Any]]:
    """Return the kernels of a plan.

    Raises:
        InfeasibleError: a provider refuses a kernel.
    """
    steps = []
    meter.prepare(entry.steps)
    for candidate, (cost_ns, is_measured) in zip(entry.steps, entry.costs, strict=True):
        kernel = meter.kernel(candidate)
        if isinstance(kernel, Refusal):
            raise InfeasibleError(f"{candidate.provider} refuses a kernel: {kernel.reason}")
        steps.append(PlanStep(candidate, kernel, cost_ns, meter.bound_ns(candidate), is_measured))
    return steps
