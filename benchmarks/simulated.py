"""Compares the simulator of joins and tasks with measured runs, and prints its predictions for more threads.

    python -m benchmarks.simulated [--models mobilenetv3,yolox] [--threads 2,4] [--predict 2,4,8] [--budget 70]
                                   [--plans FOLDER] [--seconds 8] [--output FILE.json] [--plot FILE.svg]

Each model is searched for two threads; plans that are in the folder are used. Kernels are timed on one thread, within
runs. From these times the simulator (`korch.events.simulate`) predicts runs on more threads. A task takes a share of
its kernel's time in proportion to the bytes that it writes, plus the time for bytes that it fetches from the caches of
other cores. The speed of memory and the size of shared caches are assumed to grow with the number of threads. For each
number of threads the kernels are rebuilt, if their provider offers the same kernel. The time of a kernel without a tile
program is extrapolated from its times on one and two threads. The time that a run on one thread needs outside of its
kernels is added unchanged. The costs of joins, waits and bytes of other cores are measured on this machine
(`benchmarks.core_costs`). The runs on one thread, and with joins and with tasks on the given numbers of threads, are
interleaved. Each turn has one untimed run, which wakes the threads, and some timed runs. Before, the results of joins
and of tasks are compared bit by bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cached_lines import CachedLines
from benchmarks.core_costs import measure_costs
from benchmarks.plans import Plan, executable, for_threads, run_times_ns, searched
from benchmarks.rows import known_rows, write_rows
from korch.backend import TASK_PARTS
from korch.events.graph import Touched
from korch.events.kernels import has_tasks, segments_of
from korch.events.schedule import schedule_segment
from korch.events.simulate import DEFAULT_COSTS, CoreCosts
from korch.runtime.bind import bind_steps
from korch.runtime.build import uses_of
from korch.runtime.executable import Executable
from korch.runtime.runnable import random_feeds

SCHEDULES = ("joins", "tasks")
RUNS = 3
"""The number of timed runs in a turn."""
COMPARED = 10
"""The number of inputs for which results are compared."""


def main() -> None:
    """Measure, predict, and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mobilenetv3,yolox,efficientvit,segformer,candy,bert,gpt2,vit,llama")
    parser.add_argument("--threads", default="2", help="that runs are measured on, beside one; two come first")
    parser.add_argument("--predict", default="1,2,4,8,16,32,64", help="numbers of threads; only measures if empty")
    parser.add_argument("--budget", type=float, default=70)
    parser.add_argument("--plans", type=Path, help="folder of plans; missing ones are written to it")
    parser.add_argument("--seconds", type=float, default=8, help="of interleaved runs of a model")
    parser.add_argument("--output", type=Path, help="measured times that it has are used again")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = known_rows(args.output)
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            plan = searched(name, args.plans or Path(folder), args.budget)
        row = rows.setdefault(name, {})
        if "measured_ms" not in row:
            row |= measure(plan, [int(count) for count in args.threads.split(",")], args.seconds)
        if args.predict:
            row["predicted_ms"] = predict(plan, list(map(int, args.predict.split(","))), row)
            print(line(name, row), flush=True)
        write_rows(args.output, rows)
    if args.plot:
        draw(rows, args.plot)


def measure(plan: Plan, counts: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the times of interleaved runs by threads, of kernels on one and two threads, and the core costs."""
    graph, steps, target = plan
    runs = {("1", "joins"): executable((graph, steps, replace(target, threads=1)))}
    for count in counts:
        made = plan if count == 2 else for_threads(plan, count)
        for schedule, parts in zip(SCHEDULES, (0, TASK_PARTS), strict=True):
            runs[str(count), schedule] = executable(made, parts)
    for count in counts:
        _require_equal(*(runs[str(count), schedule] for schedule in SCHEDULES))
    arrays = list(random_feeds(runs["1", "joins"].get_inputs(), 0).values())
    taken: dict[tuple[str, str], list[float]] = {way: [] for way in runs}
    kernels: list[list[tuple[int, ...]]] = [[], []]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken["1", "joins"]) < 5 * RUNS:
        for way, run in runs.items():
            taken[way] += [1e-6 * ns for ns in run.hooked(arrays, partial(run_times_ns, runs=1 + RUNS))[1:]]
        for own, threads in zip(kernels, ("1", "2"), strict=True):
            own += runs[threads, "joins"].time(arrays, RUNS).kernel_ns
    measured: dict[str, dict[str, float]] = {}
    for (threads, schedule), times in taken.items():
        measured.setdefault(threads, {})[schedule] = float(np.median(times))
    return {
        "measured_ms": measured,
        "joins/tasks": {
            str(n): np.percentile(np.divide(taken[str(n), "joins"], taken[str(n), "tasks"]), [10, 50, 90]).tolist()
            for n in counts
        },
        "kernels_ns": [np.median(np.array(own), axis=0).tolist() for own in kernels],
        "costs": {str(n): asdict(measure_costs(n, target.isa)) for n in counts},
    }


def _require_equal(joins: Executable, tasks: Executable) -> None:
    """Compare the results of both schedules for several inputs.

    Each run is the first of a new executable. In later runs of an executable one thread may run all kernels, if
    other processes occupy the cores.

    Raises:
        SystemExit: an output differs.
    """
    for seed in range(COMPARED):
        arrays = list(random_feeds(joins.get_inputs(), seed).values())
        results = [Executable(run.artifact)(*arrays) for run in (joins, tasks)]
        for i, (expected, found) in enumerate(zip(*results, strict=True)):
            if expected.tobytes() != found.tobytes():
                raise SystemExit(f"output {i} differs with inputs {seed}")


def predict(plan: Plan, counts: Sequence[int], measured: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the times of runs, in milliseconds, by the number of threads and the schedule.

    Args:
        plan: the plan whose kernels run.
        counts: the numbers of threads.
        measured: the result of `measure`.
    """
    found = {}
    kernels_ns, known = measured["kernels_ns"], measured.get("costs", {})
    outside_ms = max(0.0, measured["measured_ms"]["1"]["joins"] - sum(kernels_ns[0]) / 1e6)
    for threads in counts:
        graph, steps, target = plan if threads <= 2 else for_threads(plan, threads)
        target = replace(target, threads=threads)
        uses = [
            replace(use, cost_ns=_scaled(one_ns, two_ns, threads), alone_ns=one_ns)
            for use, one_ns, two_ns in zip(uses_of(bind_steps(graph, steps), steps), *kernels_ns, strict=True)
        ]
        times = dict.fromkeys(("joins", "tasks"), sum(use.cost_ns for use in uses if use.kernel.symbol))
        segments = segments_of(uses)
        tasked = {use.step for own in segments for use in own}
        segments += [[use] for use in uses if has_tasks(use.kernel) and use.step not in tasked]
        nearest = min(known, key=lambda n: abs(int(n) - threads), default=None)
        costs = CoreCosts(**known[nearest]) if nearest else DEFAULT_COSTS
        parts = TASK_PARTS if threads <= 8 else 1
        cached = CachedLines(threads * target.l2_bytes)

        def fetch_ns(touched: Touched, thread: int, cached: CachedLines = cached, costs: CoreCosts = costs) -> float:
            return costs.fetch_ns_per_byte * cached.fetch(touched, thread)

        for own in sorted(segments, key=lambda own: own[0].step) if threads > 1 else []:
            segment = schedule_segment(own, target, parts, fetch_ns, costs)
            replaced_ns = sum(use.cost_ns for use in own)
            times["joins"] += segment.joined.total_ns - replaced_ns
            times["tasks"] += segment.simulated.total_ns - replaced_ns
        found[str(threads)] = {name: outside_ms + time_ns / 1e6 for name, time_ns in times.items()}
    return found


def _scaled(one_ns: float, two_ns: float, threads: int) -> float:
    """Return a kernel's time on `threads` threads, extrapolated from its times on one and two threads."""
    return float(one_ns * min(1.0, two_ns / max(1.0, one_ns)) ** log2(threads))


def line(name: str, row: dict[str, Any]) -> str:
    """Return a line with the predicted and measured times of a model, and the prediction errors."""
    predicted = row["predicted_ms"]
    texts = [
        f"{threads} {way} {predicted[threads][way]:.2f} ({measured_ms:.2f}, "
        f"{100 * (predicted[threads][way] / measured_ms - 1):+.1f} %)"
        for threads, ways in row["measured_ms"].items()
        for way, measured_ms in ways.items()
        if threads in predicted
    ]
    more = [f"{n}: {predicted[n]['joins'] / predicted[n]['tasks']:.2f}" for n in predicted]
    return f"{name}: predicted (measured) ms {'; '.join(texts)}; predicted joins/tasks {', '.join(more)}"


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draw the predicted speed-ups of joins and of tasks over one thread, and the measured speed-up of joins."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "korch"  # makes files with equal results equal
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(rows), figsize=(2.6 * len(rows), 2.8), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (name, row) in zip(all_axes[0], rows.items(), strict=True):
        alone = row["predicted_ms"]["1"]["joins"]
        counts = [int(n) for n in row["predicted_ms"]]
        for way, style in (("joins", "s--"), ("tasks", "o-")):
            axes.plot(
                counts, [alone / row["predicted_ms"][str(n)][way] for n in counts], style, label=way, markersize=3
            )
        measured = {int(n): ways["joins"] for n, ways in row["measured_ms"].items()}
        axes.plot(list(measured), [measured[1] / ms for ms in measured.values()], "kx", label="measured, joins")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(counts, counts)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("threads")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].set_ylabel("time on one thread / time")
    all_axes[0][0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
