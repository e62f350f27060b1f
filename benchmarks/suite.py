"""Optimizes each benchmark model, and compares it with other engines in one interleaved run.

    python -m benchmarks.suite [--models candy,bert] [--against onnxruntime,openvino,iree]
                               [--budget 200] [--rounds 15] [--output FILE.json] [--plot FILE.svg]
                               (also eager, tvm and benchmarks.peers:TVM_2000)

`--models` also takes models of transformers and torchvision, exported by PyTorch's exporters:
`mobilenetv2`, `segformer_b0:dynamo`, ... (`benchmarks/models/exported.py`).

The default is the five models of the paper, two vision models that PyTorch exports and, if PyTorch and
transformers are installed, four transformers. Each model is searched in a separate process with an empty
cache, so the reported search time is that of a complete search. Engines are timed
interleaved, and a quotient is the median over the rounds. If an engine can't run a model, the row
says why. The file records the CPU and the versions of all libraries.
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
import onnx

from benchmarks.models import PAPER, build
from benchmarks.models.exported import export_model, is_exported
from benchmarks.models.transformers import NAMES, TRANSFORMERS, export_transformer
from benchmarks.peers import full_name
from korch.api import optimize
from korch.cli.bench import bench
from korch.errors import KorchError
from korch.options import Options
from korch.records import plain
from korch.report.peers import get_peer
from korch.target import detect_target

MODELS = (*PAPER, *TRANSFORMERS, "mobilenetv2", "segformer_b0:script-slim")
AGAINST = "onnxruntime,openvino,inductor,iree"
"""The engines to compare with. An engine that is not installed is skipped."""
MODULE = "benchmarks.peers:TRANSFORMER"
"""The peer that compiles a transformer's module by Inductor; other models are translated from ONNX for Inductor."""
PACKAGES = (
    "onnxruntime",
    "openvino",
    "onednn-cpu-gomp",
    "ortools",
    "numpy",
    "onnx",
    "torch",
    "transformers",
    "iree-base-compiler",
    "iree-base-runtime",
    "apache-tvm",
)
KEPT = (
    "status",
    "predicted_ms",
    "expected_ms",
    "measured_ms",
    "lower_bound_ms",
    "gap",
    "primitives",
    "alternatives",
    "given_flop",
    "flop",
    "candidates",
    "distinct_candidates",
    "measured_candidates",
    "kernels",
    "max_error",
    "rms_error",
    "arena_bytes",
    "seconds",
    "plan",
    "plans",
)


def main() -> int:
    """Run all models; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument(
        "--against", default=AGAINST, help=f"those of them that are installed are compared (default: {AGAINST})"
    )
    parser.add_argument("--budget", type=float, help="seconds of search per model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--artifacts", type=Path, help="a folder to keep the artifacts in")
    parser.add_argument("--plot", type=Path, help="draw the results, too (needs matplotlib)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        try:
            measure(args.one, args.against.split(","), args.rounds, args.budget, args.output, args.artifacts)
        except KorchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    found = {name: get_peer(full_name(name)).is_available() for name in args.against.split(",")}
    for name, reason in found.items():
        if reason is not None:
            print(f"without {name}: {reason}")
    args.against = ",".join(name for name, reason in found.items() if reason is None)
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
            result = {"machine": machine(), "models": rows}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    if args.plot is not None and rows:
        from benchmarks.plot import draw

        draw(rows, args.plot)
    for name in failed:
        print(f"{name} failed")
    return int(bool(failed))


def _in_process(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.suite",
            "--one",
            name,
            "--against",
            args.against,
            "--rounds",
            str(args.rounds),
            "--output",
            str(output),
        ]
        if args.budget is not None:
            command += ["--budget", str(args.budget)]
        if args.artifacts is not None:
            args.artifacts.mkdir(parents=True, exist_ok=True)
            command += ["--artifacts", str(args.artifacts)]
        if subprocess.run(command, check=False).returncode:
            return None
        row: dict[str, Any] = json.loads(output.read_text("utf-8"))
        return row


def load(name: str) -> onnx.ModelProto:
    """Return the ONNX model with this name."""
    if is_exported(name):
        return export_model(name)
    return export_transformer(name).stored() if name in TRANSFORMERS else build(name)


def measure(
    name: str, against: list[str], rounds: int, budget_s: float | None, output: Path, artifacts: Path | None
) -> None:
    """Optimize one model with an empty cache and compare it; print the comparison and write the row to `output`."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{name}.onnx"
        artifact = (artifacts or Path(folder)) / f"{name}.korch"
        model.write_bytes(load(name).SerializeToString())
        executable: Any = optimize(model, cache_folder=Path(folder) / "cache", budget=budget_s)
        executable.save(artifact)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report = {key: plain(getattr(executable.report, key)) for key in KEPT}
        del executable  # frees its weights and threads, which are not part of the comparison
        engines = [MODULE if peer == "inductor" and name in TRANSFORMERS else full_name(peer) for peer in against]
        comparison = bench(artifact, engines, model, rounds, Options(), {})
    print(f"{name}\n{comparison.to_text()}\n", flush=True)
    row = {"comparison": comparison.to_json(), "report": report, "peak_mb": peak_mb}
    output.write_text(json.dumps(row))


def quotients(row: dict[str, Any]) -> dict[str, Any]:
    """Return each engine's time divided by Korch's, for each round."""
    times = {r["name"]: np.array(r["times_ns"], float) for r in row["comparison"]["rows"]}
    own = times.pop("korch")
    return {name: taken / own for name, taken in times.items()}


def table(rows: dict[str, Any]) -> str:
    """Return the results as a table in Markdown.

    A quotient is the median over the rounds, with the 10th and 90th percentile. The memory is that of
    Korch's process and of ONNX Runtime's process, without the engines' libraries.
    """
    if not rows:
        return "no model was measured"
    peers = list(dict.fromkeys(name for row in rows.values() for name in quotients(row)))
    lines = [
        "| model | "
        + " | ".join(f"{peer} / Korch" for peer in peers)
        + " | expected, sum of kernels: of measured | gap | candidates measured | search "
        "| its memory | memory, ONNX Runtime's |",
        "|---|" + "---:|" * (len(peers) + 6),
    ]
    for name, row in rows.items():
        found, report = quotients(row), row["report"]
        cells = []
        for peer in peers:
            if peer not in found:
                cells.append("–")
                continue
            low, middle, high = np.percentile(found[peer], [10, 50, 90])
            cells.append(f"{middle:.2f} ({low:.2f}–{high:.2f})")
        share = report["measured_candidates"] / max(1, report["distinct_candidates"])
        won = next(c for c in report["plans"] if c["plan"] == report["plan"])
        whole = next(r for r in row["comparison"]["rows"] if r["name"] == "korch")
        memory = {r["name"]: r.get("memory_bytes") for r in row["comparison"]["rows"]}
        cells += [
            " / ".join(
                f"{won[name] / whole['median_ms']:.2f}" if won.get(name) else "–"
                for name in ("expected_ms", "predicted_ms")
            ),
            f"{100 * (report['gap'] or 0):.0f} %",
            f"{100 * share:.0f} %",
            f"{report['seconds']:.0f} s",
            f"{row['peak_mb'] / 1024:.1f} GB",
            ", ".join(_megabytes(memory.get(engine)) for engine in ("korch", "onnxruntime")),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for title, names in (("the paper's models", PAPER), ("transformers", NAMES)):
        best = [
            min(float(np.median(q)) for q in quotients(rows[name]).values())
            for name in names
            if name in rows and quotients(rows[name])
        ]
        if best:
            mean = statistics.geometric_mean(best)
            lines.append(
                f"\nAgainst the best other engine for each of {title}: {mean:.2f}x "
                f"(geometric mean; least {min(best):.2f}x)"
            )
    return "\n".join(lines)


def _megabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e6:.0f} MB"


def machine() -> dict[str, Any]:
    """Return the CPU's model, its cores and instruction set, and the versions of Python and of installed packages."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(names),
        "isa": detect_target(1, "").isa,
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    sys.exit(main())
