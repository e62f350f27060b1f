"""Compares runs of the same kernels with joins and as tasks: their results must be equal, and they are timed.

    python -m benchmarks.schedules [--models mobilenetv3,yolox] [--threads 1,2,8] [--budget 70] [--plans FOLDER]
                                   [--seconds 8] [--output FILE.json]

Each model is searched for two threads; plans that are in the folder are used. Kernels are rebuilt for more threads; on
one thread the plan for two threads runs. Results are compared bit by bit in several runs. Times are those of
interleaved runs. With more threads than cores times are meaningless and not measured, as with `--seconds 0`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plans import Plan, executable, for_threads, searched
from benchmarks.rows import known_rows, write_rows
from benchmarks.suite import MODELS
from korch.backend import TASK_PARTS
from korch.events.kernels import has_tasks
from korch.runtime.executable import Executable
from korch.runtime.runnable import random_feeds
from korch.system.cores import usable_cores

RUNS = 10
"""The number of runs in which results are compared."""


def main() -> None:
    """Compare, and print a line for each model and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(("mobilenetv3", *MODELS)))
    parser.add_argument("--threads", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--budget", type=float, default=70)
    parser.add_argument("--plans", type=Path, help="folder of plans; missing ones are written to it")
    parser.add_argument("--seconds", type=float, default=8, help="of interleaved runs")
    parser.add_argument("--output", type=Path, help="rows that it has are kept")
    args = parser.parse_args()
    rows = known_rows(args.output)
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            plan = searched(name, args.plans or Path(folder), args.budget)
        for threads in map(int, args.threads.split(",")):
            row = compare(plan, threads, args.seconds)
            rows.setdefault(name, {})[str(threads)] = row
            print(name, threads, "threads:", row, flush=True)
            write_rows(args.output, rows)


def compare(plan: Plan, threads: int, seconds: float) -> dict[str, Any]:
    """Return the number of runs with equal results, of kernels, and of kernels with tasks; and the times."""
    made = plan if threads <= 2 else for_threads(plan, threads)
    runs = {"joins": executable(made), "tasks": executable(made, TASK_PARTS)}
    if threads == 1:
        runs = {name: _on_one_thread(run) for name, run in runs.items()}
    run_kernels = [step.kernel for step in made[1] if step.kernel.symbol]
    arena_bytes = {name: run.plan.arena_bytes for name, run in runs.items()}
    row = {
        "kernels": len(run_kernels),
        "as_tasks": sum(map(has_tasks, run_kernels)),
        "runs_equal": _equal_runs(runs),
        "arena_bytes": arena_bytes,
    }
    return row | _times(runs, seconds) if seconds and threads <= usable_cores() else row


def _on_one_thread(run: Executable) -> Executable:
    return Executable(replace(run.artifact, plan=replace(run.plan, threads=1)))


def _equal_runs(runs: Mapping[str, Executable]) -> int:
    """Return the number of runs, after checking that both schedules had the same results, bit by bit, in each of them.

    Each run is the first of a new executable. In later runs of an executable one thread may run all kernels, if
    other processes occupy the cores.

    Raises:
        SystemExit: an output differs.
    """
    for seed in range(RUNS):
        arrays = list(random_feeds(runs["joins"].get_inputs(), seed).values())
        joins, tasks = (Executable(runs[name].artifact)(*arrays) for name in ("joins", "tasks"))
        for i, (expected, found) in enumerate(zip(joins, tasks, strict=True)):
            if expected.tobytes() != found.tobytes():
                raise SystemExit(f"output {i} differs with inputs {seed}")
    return RUNS


def _times(runs: Mapping[str, Executable], seconds: float) -> dict[str, Any]:
    """Return the median times of interleaved runs, and the percentiles of the quotients of adjacent runs."""
    arrays = list(random_feeds(runs["joins"].get_inputs(), 0).values())
    taken: dict[str, list[float]] = {name: [] for name in runs}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken["joins"]) < 5:
        for name, run in runs.items():
            begin = time.perf_counter()
            run(*arrays)
            taken[name].append(1e3 * (time.perf_counter() - begin))
    quotients = np.percentile(np.array(taken["joins"]) / np.array(taken["tasks"]), [10, 50, 90])
    medians = {name: round(float(np.median(times)), 3) for name, times in taken.items()}
    return {"times_ms": medians, "joins/tasks": [round(float(q), 3) for q in quotients]}


if __name__ == "__main__":
    main()
