"""The faster one of a plan with joins and the same kernels as tasks is kept."""

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from korch.errors import CompileError
from korch.numerics import Difference
from korch.system.deadline import Deadline
from korch.validation import schedule
from korch.validation.plan import PlanEntry, Result, Validation
from korch.validation.schedule import with_fastest_schedule
from korch.validation.validate import HEAVY_BYTES

METER = SimpleNamespace(tell=lambda text: None, pace=SimpleNamespace(predict_s=lambda kind, units: 0.0))


class Plan:
    """An executable that says to take a time."""

    def __init__(self, time_ns, result=0.0, weights_bytes=0, waiting=None):
        self.time_ns, self.result = time_ns, result
        self.plan = SimpleNamespace(weights_bytes=weights_bytes, steps=(), waiting=waiting)

    def __call__(self):
        return (np.array([self.result, np.nan], np.float32),)

    def stopwatch(self, arrays):
        return lambda: self.time_ns


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(schedule, "steps_of", lambda entry, meter: [])


def validated(joins):
    won = Result(PlanEntry("searched", (), ()), joins, (1,), {"y": Difference()})
    return Validation((won,), joins, won, {}, (), ())


@pytest.mark.parametrize(("tasks_ns", "runs_tasks"), [(900_000, True), (995_000, False), (1_100_000, False)])
def test_the_faster_schedule_is_kept(tasks_ns, runs_tasks):
    joins, tasks = Plan(1_000_000), Plan(tasks_ns)
    found, times = with_fastest_schedule(validated(joins), METER, lambda steps: tasks, Deadline())
    assert found.winner is (tasks if runs_tasks else joins)
    assert (times.joins_ms, times.tasks_ms, times.runs_tasks) == (1.0, tasks_ns / 1e6, runs_tasks)
    assert found.won.median_ns == (tasks_ns if runs_tasks else 1)


def test_a_plan_with_other_results_as_tasks_keeps_joins(caplog):
    joins = Plan(1_000_000)
    found, times = with_fastest_schedule(validated(joins), METER, lambda steps: Plan(1, -0.0), Deadline())
    assert (found.winner, times) == (joins, None)
    assert "output 0: tasks and joins give different results" in caplog.text


def test_a_plan_whose_kernels_are_no_tasks_is_not_timed_twice():
    joins, same = Plan(1_000_000), Plan(1, waiting=SimpleNamespace(runs_tasks=False))
    found, times = with_fastest_schedule(validated(joins), METER, lambda steps: same, Deadline())
    assert (found.winner, times) == (joins, None)


def test_a_plan_that_is_large_or_late_or_does_not_compile_stays_as_it_is():
    def fails(steps):
        raise CompileError("no compiler")

    def is_not_called(steps):
        raise AssertionError

    over, soon = (Deadline.after(seconds, time.monotonic()) for seconds in (0.0, 60.0))
    slow = replace(validated(Plan(1)).won, times_ns=(5_000_000_000,))
    for joins, make, deadline in (
        (Plan(1, weights_bytes=HEAVY_BYTES + 1), is_not_called, Deadline()),
        (Plan(1), is_not_called, over),
        (Plan(1), fails, Deadline()),
    ):
        found, times = with_fastest_schedule(validated(joins), METER, make, deadline)
        assert (found.winner, times) == (joins, None)
    many = Plan(1)
    many.plan.steps = range(2000)
    found, times = with_fastest_schedule(validated(many), METER, is_not_called, soon)
    assert (found.winner, times) == (many, None)
    given = replace(validated(Plan(1)), won=slow)
    assert with_fastest_schedule(given, METER, is_not_called, soon) == (given, None)
