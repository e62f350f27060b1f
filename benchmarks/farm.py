"""What a farm costs on one machine, and what it would gain on many.

    python -m benchmarks.farm cost [--models candy] [--kernels 240] [--rounds 3] [--output FILE.json]
    python -m benchmarks.farm simulate LEDGER... [--output FILE.json]

`cost` measures the same kernels, without a cache, alone and by a farm of one worker on this machine, in turns.
`simulate` reads ledgers that searches with a budget wrote (`korch optimize --ledger FILE`). Batches of kernels that the
search asked for together are distributed over 1 to 64 machines, and all else takes as long as it did; so it says how
much sooner the same search would end. It draws docs/assets/farm.svg (needs matplotlib).
"""

import argparse
import heapq
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.figures import ROOT
from benchmarks.models import build
from benchmarks.plot import saved
from benchmarks.rows import write_rows
from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline import Run, run_until

WORKERS = (1, 2, 4, 8, 16, 32, 64)

MEASURING = ("measure", "confirm")
"""The kinds of entries of a ledger that kernels are timed for."""

BETWEEN = ("time", "now", "machines", "compile", "build")
"""The kinds of entries between batches that a search asks for together."""


@contextmanager
def one_worker(folder: Path) -> Iterator[str]:
    """Start a scheduler, and a worker with an empty cache, on this machine; the address of the scheduler."""
    from distributed import LocalCluster

    worker = {"n_workers": 1, "threads_per_worker": 1, "env": {"KORCH_CACHE": str(folder)}}
    with LocalCluster(dashboard_address=None, **worker) as cluster:
        yield cluster.scheduler_address


def candidates_of(name: str, folder: Path, count: int) -> list[Candidate]:
    """Return the candidates of a model that are expected to be the fastest."""
    path = folder / f"{name}.onnx"
    path.write_bytes(build(name).SerializeToString())
    run = Run(Options(cache_folder=folder / "cache"), {}, lambda update: None, path)
    with run.resources:
        run_until(run, "candidates", skip=("reference",))
        found = [c for task in run.results["candidates"].tasks for c in task.candidates if not c.offer.is_in_place]
    with open_meter(Options(cache_folder=folder / "cache")) as meter:
        times = dict(zip((c.key for c in found), meter.predict(found), strict=True))
    return sorted({c.key: c for c in found}.values(), key=lambda c: times[c.key][0])[:count]


def seconds_of(candidates: Sequence[Candidate], options: Options) -> float:
    """Return the seconds in which candidates are compiled and timed."""
    with open_meter(options) as meter:
        begun_s = time.monotonic()
        records = meter.measure(candidates)
        taken_s = time.monotonic() - begun_s
    on_farm = sum(isinstance(record, Measured) and bool(record.machine) for record in records)
    if options.farm and on_farm < 0.9 * len(records):
        raise SystemExit(f"the farm has measured {on_farm} of {len(records)} kernels only")
    return taken_s


def cost(args: Any) -> dict[str, Any]:
    """Return by model the seconds of measuring without a farm and with a farm of one worker, of each round."""
    rows: dict[str, Any] = {}
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            candidates = candidates_of(name, folder, args.kernels)
            alone, farmed = [], []
            for turn in range(args.rounds):
                options = Options(cache_folder=folder / f"alone-{turn}")
                alone.append(seconds_of(candidates, options))
                own = folder / f"worker-{turn}"
                own.mkdir()
                with one_worker(own) as address:
                    options = replace(options, cache_folder=folder / f"farm-{turn}", farm=address)
                    farmed.append(seconds_of(candidates, options))
            rows[name] = {"kernels": len(candidates), "alone_s": alone, "farm_s": farmed}
            print(name, [round(b / a, 3) for a, b in zip(alone, farmed, strict=True)], flush=True)
    return rows


def batches(path: Path) -> tuple[float, list[list[float]]]:
    """Return the seconds of a recorded search, and those of the batches that it asked for together."""
    entries = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    left_s = [entry[2] for entry in entries if entry[0] == "time" and entry[2] is not None]
    if not left_s:
        raise SystemExit(f"{path}: the search had no budget, so that its ledger has no times")
    groups: list[list[float]] = [[]]
    for kind, _, _, seconds in entries:
        if kind in MEASURING:
            groups[-1].append(seconds)
        elif kind not in BETWEEN and groups[-1]:
            groups.append([])
    return left_s[0] - left_s[-1], [group for group in groups if group]


def makespan_s(seconds: Sequence[float], workers: int) -> float:
    """Return when the last of some batches ends if each is given to the first idle machine."""
    idle = [0.0] * workers
    for each in seconds:
        heapq.heappush(idle, heapq.heappop(idle) + each)
    return max(idle)


def simulate(args: Any) -> dict[str, Any]:
    """Return by ledger the seconds of its search on 1 to 64 machines."""
    rows = {}
    for path in args.ledgers:
        total_s, groups = batches(path)
        other_s = total_s - sum(map(sum, groups))
        taken = {n: other_s + sum(makespan_s(group, n) for group in groups) for n in WORKERS}
        rows[path.stem] = {
            "seconds": {str(n): round(s, 2) for n, s in taken.items()},
            "measuring": 1 - other_s / total_s,
        }
        print(path.stem, {n: f"{taken[1] / s:.2f}" for n, s in taken.items()}, f"{1 - other_s / total_s:.0%} measuring")
    return rows


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draw the speed-up of each search over the number of machines."""
    with saved(path, (5, 3.4)) as axes:
        for name, row in rows.items():
            taken = row["seconds"]
            axes.plot(WORKERS, [taken["1"] / taken[str(n)] for n in WORKERS], marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORKERS, list(map(str, WORKERS)))
        axes.set_xlabel("machines")
        axes.set_ylabel("speed-up of the search")
        axes.legend(frameon=False)


def main() -> int:
    """Measure the cost on this machine, or simulate more machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cost", "simulate"))
    parser.add_argument("ledgers", type=Path, nargs="*")
    parser.add_argument("--models", default="candy")
    parser.add_argument("--kernels", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = cost(args) if args.what == "cost" else simulate(args)
    write_rows(args.output or ROOT / "benchmarks" / "results" / f"farm-{args.what}.json", rows)
    if args.what == "simulate" and find_spec("matplotlib"):
        draw(rows, ROOT / "docs" / "assets" / "farm.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
