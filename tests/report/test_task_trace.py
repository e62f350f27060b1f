"""Runs as tasks: the critical path, computed by hand, and the trace of a real run."""

import itertools
import json
import platform
import re
from pathlib import Path

import pytest

from korch.cli import main
from korch.events.queues import QueuedTask
from korch.events.simulate import simulate_queues
from korch.report.explain import explain
from korch.report.task_spans import TaskRun, TaskSpan
from korch.report.threads import watch_threads
from korch.runtime.executable import Executable
from korch.runtime.report import Report
from tests.runtime.runtime_plans import tables_of
from tests.runtime.test_descheduled import artifact  # noqa: F401, a fixture

needs_gcc = pytest.mark.skipif(platform.system() != "Linux", reason="a library is preloaded, as on Linux")


TRIES = 10
"""How often runs are watched until some have all threads: while other processes have the cores, one thread runs all."""


def span(thread: int, task: int, begin_ns: int, end_ns: int, is_wait: bool = False) -> TaskSpan:
    return TaskSpan(is_wait, thread, task, 0, 0, 0, 1, begin_ns, end_ns)


def test_the_critical_path_goes_through_the_task_that_was_waited_for() -> None:
    run = TaskRun(
        (
            span(0, 0, 0, 10),
            span(0, 1, 10, 40),
            span(1, 2, 0, 20),
            span(1, 1, 20, 41, is_wait=True),
            span(1, 3, 41, 60),
            span(0, 4, 40, 50),
        )
    )
    assert [s.task for s in run.critical_path()] == [0, 1, 3]
    assert run.end_ns == 60
    assert [s.task for s in run.waits] == [1]
    assert TaskRun(()).critical_path() == []


def test_simulated_waits_are_of_the_stages_that_wait() -> None:
    times_ns = {(0, 0): 1000.0, (0, 1): 3000.0, (1, 0): 500.0, (1, 1): 500.0}
    queues = ((QueuedTask((0, 0)), QueuedTask((1, 0), ((1, 1),))), (QueuedTask((0, 1)), QueuedTask((1, 1))))
    assert simulate_queues(queues, times_ns).waits_ns == {(1, 0): 2100.0}


@needs_gcc
def test_a_real_run_has_tasks_waits_and_a_critical_path(artifact: Path, tmp_path: Path) -> None:  # noqa: F811
    for _ in range(TRIES):
        runs = watch_threads(artifact, 4, 5).task_runs
        assert len(runs) <= 5
        if any({s.thread for s in run.tasks.values()} == {0, 1, 2, 3} for run in runs):
            break
    else:
        pytest.skip("other processes had the cores in all runs, so that one thread ran all kernels")
    count = int(re.search(r"@tasks = private constant \[(\d+) x", tables_of(Executable.load(artifact).sources))[1])  # type: ignore[index]
    for run in runs:
        if {s.thread for s in run.tasks.values()} != {0, 1, 2, 3}:
            continue  # other processes had the cores, and one thread ran all kernels
        assert len(run.tasks) == count - 1
        for wait in run.waits:
            assert run.tasks[wait.task].end_ns <= wait.end_ns and run.tasks[wait.task].thread != wait.thread
        path = run.critical_path()
        assert path[-1].end_ns == run.end_ns
        assert all(a.end_ns <= b.end_ns for a, b in itertools.pairwise(path))
    out = tmp_path / "trace.json"
    events = []
    for _ in range(TRIES):
        assert main(["profile", str(artifact), "--rounds", "3", "--trace", str(out)]) == 0
        if events := [e for e in json.loads(out.read_text("utf-8"))["traceEvents"] if e["pid"] == 2]:
            break
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "critical path", **{n + 1: f"thread {n}" for n in range(4)}}
    waits = [e for e in events if e["ph"] == "X" and e["cat"] == "wait"]
    assert all(e["name"].startswith("wait for task ") and e["args"]["thread"] + 1 != e["tid"] for e in waits)


def test_explain_says_what_threads_wait_for(artifact: Path) -> None:  # noqa: F811
    executable = Executable.load(artifact)
    text = explain(executable.plan, Report())
    assert re.search(r"waiting: \d+\.\d % of the threads' time in a simulated run with tasks\n    \d+\.\d % ", text)
