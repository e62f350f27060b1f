"""Times the optimization of transformers of several depths, each with a cold cache.

python -m benchmarks.depth [--depths 4 24] [--partition auto] [--budget S] [--output FILE]

Each depth is optimized in a separate process with an empty cache folder. The last line is the
ratio of the deepest to the shallowest model. Repeated blocks should not increase the time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import korch
from benchmarks.models.transformer_block import build_transformer_block
from benchmarks.solver import machine
from korch.limits import SearchLimits
from korch.segments.record import PartitionRecord


def run_one(depth: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Optimize one model in this process; return its row."""
    model = build_transformer_block(sequence=options.sequence, width=options.width, heads=options.heads, depth=depth)
    start_s = time.perf_counter()
    limits = SearchLimits(partition=options.partition)
    executable = korch.optimize(model, budget=options.budget, cache_folder=folder, search=limits)
    seconds = time.perf_counter() - start_s
    start_s = time.perf_counter()
    korch.optimize(model, budget=options.budget, cache_folder=folder, search=limits)
    report = executable.report
    partition = report.partition or PartitionRecord(segments=1, different=1, programs=1)
    return {
        "depth": depth,
        "seconds": round(seconds, 2),
        "again_s": round(time.perf_counter() - start_s, 2),
        "stages_s": {name: round(s, 2) for name, s in report.stages_s.items()},
        "primitives": report.primitives,
        "segments": partition.segments,
        "different": partition.different,
        "programs": partition.programs,
        "distinct_candidates": report.distinct_candidates,
        "measured_candidates": report.measured_candidates,
        "status": report.status,
        "gap": report.gap,
        "plan": report.plan,
        "measured_ms": report.measured_ms,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run_apart(depth: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the row of one depth, measured in a separate process."""
    with tempfile.TemporaryDirectory(prefix="korch-depth-") as folder:
        command = [sys.executable, "-m", "benchmarks.depth", *arguments]
        command += ["--only", str(depth), "--folder", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; print a line for each depth, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--sequence", type=int, default=128, help="tokens")
    parser.add_argument("--width", type=int, default=256, help="features of a token")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--partition", choices=("auto", "off"), default="auto", help="as of `SearchLimits`")
    parser.add_argument("--budget", type=float, help="seconds for each search")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.only is not None:
        print(json.dumps(run_one(options.only, options, options.folder)))
        return
    rows = []
    for depth in options.depths:
        rows.append(run_apart(depth, given))
        row = rows[-1]
        print(
            f"{depth:3} layers: {row['seconds']} s cold, {row['again_s']} s again; "
            f"{row['segments']} segments, {row['different']} different, "
            f"{row['programs']} programs, {row['distinct_candidates']} candidates, "
            f"{row['measured_candidates']} measured; {row['peak_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
    ratio = rows[-1]["seconds"] / rows[0]["seconds"]
    print(f"{rows[-1]['depth']} layers cost {ratio:.2f} times {rows[0]['depth']}")
    if options.output is not None:
        result = {"machine": machine(), "ratio": round(ratio, 3), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
