"""The benchmark models: optimize each, and compare it with other engines in one interleaved run.

    python -m benchmarks.suite [--models candy,transformer_block] [--against onnxruntime,openvino]
                               [--rounds 15] [--output FILE.json]

Each model has a process of its own, and an empty cache: what is reported of the search is its whole
cost. Times are medians of one run in which the engines take turns; the quotient of two engines is
that of the medians, its spread that of rounds. The file records the CPU and the versions of all
libraries.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import PAPER, build
from korch.api import optimize
from korch.options import Options
from korch.report.bench import bench

MODELS = (*PAPER, "transformer_block")
PACKAGES = ("onnxruntime", "openvino", "onednn-cpu-gomp", "ortools", "numpy", "onnx", "torch")
KEPT = (
    "status", "predicted_ms", "measured_ms", "lower_bound_ms", "gap", "primitives", "alternatives",
    "given_flop", "flop", "candidates", "distinct_candidates", "measured_candidates", "kernels",
    "max_error", "arena_bytes", "seconds", "plan", "contest",
)  # fmt: skip


def main() -> int:
    """Run all models; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--against", default="onnxruntime,openvino")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one, args.against.split(","), args.rounds, args.output)
        return 0
    rows: dict[str, Any] = {}
    failed = []
    for name in args.models.split(","):
        row = _in_process(name, args)
        if row is None:
            failed.append(name)
            continue
        rows[name] = row
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            found = {"machine": machine(), "models": rows}
            args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(rows))
    for name in failed:
        print(f"{name} failed")
    return int(bool(failed))


def _in_process(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.suite", "--one", name, "--against",
                   args.against, "--rounds", str(args.rounds), "--output", str(output)]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            return None
        row: dict[str, Any] = json.loads(output.read_text())
        return row


def measure(name: str, against: list[str], rounds: int, output: Path) -> None:
    """Optimize one model with an empty cache and compare it; print the table, write the row."""
    with tempfile.TemporaryDirectory() as folder:
        model, artifact = Path(folder) / f"{name}.onnx", Path(folder) / f"{name}.korch"
        model.write_bytes(build(name).SerializeToString())
        executable: Any = optimize(model, cache_folder=Path(folder) / "cache")
        executable.save(artifact)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report = {key: executable.report[key] for key in KEPT}
        del executable  # its weights and threads are not part of the comparison
        comparison = bench(artifact, against, model, rounds, Options(), {})
    print(f"{name}\n{comparison.to_text()}\n", flush=True)
    row = {"comparison": comparison.to_json(), "report": report, "peak_mb": peak_mb}
    output.write_text(json.dumps(row))


def table(rows: dict[str, Any]) -> str:
    """Return the results as a table in Markdown.

    A quotient is the median of those of the rounds, with their 10th and 90th percentile.
    """
    peers = [row["name"] for row in next(iter(rows.values()))["comparison"]["rows"][1:]]
    lines = [
        "| model | " + " | ".join(f"{peer} / Korch" for peer in peers)
        + " | FLOP given / executed | gap | search (cold) | memory of the search |",
        "|---|" + "---:|" * (len(peers) + 4),
    ]  # fmt: skip
    best = []
    for name, row in rows.items():
        times = {r["name"]: np.array(r["times_ns"], float) for r in row["comparison"]["rows"]}
        own, report, cells = times.pop("korch"), row["report"], []
        for peer in peers:
            # Round by round, as both meet the same spells of a busy machine.
            low, quotient, high = np.percentile(times[peer] / own, [10, 50, 90])
            cells.append(f"{quotient:.2f} ({low:.2f}–{high:.2f})")
        best.append(min(float(np.median(t / own)) for t in times.values()))
        cells += [
            f"{report['given_flop'] / report['flop']:.2f}", f"{100 * (report['gap'] or 0):.0f} %",
            f"{report['seconds']:.0f} s", f"{row['peak_mb'] / 1024:.1f} GB",
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    mean = statistics.geometric_mean(best)
    lines.append(f"\nGeometric mean over the best other engine per model: {mean:.2f}x")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return the CPU's model and the versions of what took part."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "cores": len(names),
            "python": platform.python_version(), "versions": versions}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
