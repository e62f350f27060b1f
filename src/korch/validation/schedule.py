"""The winning plan, which joins threads after each kernel -> this plan or the same kernels as tasks, if faster."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from korch.errors import CompileError, InvalidGraphError, UnsupportedError
from korch.measure.meter import AnyMeter
from korch.primitive.op import Array
from korch.runtime.report import ScheduleTimes
from korch.system.deadline import Deadline
from korch.validation.plan import Make, Validation
from korch.validation.timing import LEAST_PLAN_ROUNDS, Until, time_all
from korch.validation.validate import HEAVY_BYTES, build_units, steps_of

TASKS_GAIN = 0.99  # a plan with tasks is kept if it takes at most this share of the time of the plan with joins

logger = logging.getLogger("korch.validation")

RUNS = 6
"""Runs for each round in which two plans are timed, including those that compare results; for a time estimate."""

PAIR_S = 1.4e-4
"""Seconds to compare what two kernels touch, for the events between their tasks and to check them."""


def with_fastest_schedule(
    validation: Validation, meter: AnyMeter, make_tasks: Make, deadline: Deadline
) -> tuple[Validation, ScheduleTimes | None]:
    """Build the kernels of the winning plan as tasks, compare the results, and time both plans interleaved.

    Returns:
        The validation with the faster plan, and the times. There are no times (None) if the plan has large
        weights or no tasks, if its results differ with tasks, or if there was no time to build it with tasks.
    """
    won = validation.won
    until = Until(deadline, lambda entry: 0.0, meter.tell)
    runs_s = RUNS * LEAST_PLAN_ROUNDS * won.median_ns / 1e9
    build_s = meter.pace.predict_s("build", build_units(validation.winner)) + runs_s
    build_s += PAIR_S * len(validation.winner.plan.steps) ** 2 / 2
    if validation.winner.plan.weights_bytes > HEAVY_BYTES or until.leaves_out(won.entry, build_s):
        return validation, None
    try:
        executable = make_tasks(steps_of(won.entry, meter))
        if executable.plan.waiting is not None and not executable.plan.waiting.runs_tasks:
            return validation, None
        _require_same(validation.winner(*validation.arrays), executable(*validation.arrays))
    except (CompileError, InvalidGraphError, UnsupportedError) as error:
        logger.warning("plan %s does not run as tasks: %s", won.entry.name, error)
        return validation, None
    pair = [replace(won, executable=validation.winner), replace(won, executable=executable)]
    joins, tasks = time_all(pair, validation.timed, until)
    is_faster = tasks.median_ns <= TASKS_GAIN * joins.median_ns
    times = ScheduleTimes(joins.median_ns / 1e6, tasks.median_ns / 1e6, is_faster)
    return (replace(validation, winner=executable, won=tasks) if is_faster else validation), times


def _require_same(expected: Sequence[Array], found: Sequence[Array]) -> None:
    """Raise an error if an output of two executables differs in a bit."""
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if _bits(a) != _bits(b):
            raise InvalidGraphError("tasks and joins give different results", where=f"output {i}")


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()
