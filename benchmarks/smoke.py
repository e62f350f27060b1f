"""Tests every benchmark model end to end: builds, optimizes, checks, runs and compares it.

    python -m benchmarks.smoke [--models candy,yolox] [--budget 60] [--no-measure]

Each model is optimized in a separate process. Its executable must agree with the reference interpreter
in float64, and on random inputs with ONNX Runtime (PyTorch modules with PyTorch). The tolerance is
`TOLERANCE`, relative to the largest element of an output. The transformers of
`benchmarks.models.transformers` are included if PyTorch and transformers are installed. The exit code is
1 if a model fails.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.models import PAPER, build
from korch.api import optimize
from korch.runtime.report import Report

TOLERANCE = 1e-3
"""Winograd convolutions have errors of about 1e-5 per layer; the deepest model has a hundred layers."""

COLUMNS = ("model", "operators", "primitives", "candidates", "status", "gap", "error", "to ORT", "seconds", "MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="names, separated by commas; all by default")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of search per model")
    parser.add_argument("--no-measure", action="store_true", help="plan by bounds only")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(check(args.one, args.budget, not args.no_measure)))
        return 0
    if not args.models:
        args.models = ",".join((*PAPER, *_transformers()))
    if not _transformers():
        print("without the transformers: `make test-torch` installs PyTorch and transformers")
    print(" ".join(f"{name:>13}" for name in COLUMNS))
    rows = [_in_process(name, args) for name in args.models.split(",")]
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("failure" in row for row in rows))


def _transformers() -> tuple[str, ...]:
    if find_spec("torch") is None or find_spec("transformers") is None:
        return ()
    from benchmarks.models.transformers import TRANSFORMERS

    return tuple(TRANSFORMERS)


def _in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.smoke",
        "--one",
        name,
        "--budget",
        str(args.budget),
        *(["--no-measure"] * args.no_measure),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        row: dict[str, Any] = {"model": name, "failure": reason}
        print(f"{name:>13} FAILED: {reason}", flush=True)
        return row
    row = json.loads(done.stdout.splitlines()[-1])
    if max(row["error"], row["to ORT"]) > TOLERANCE:
        row["failure"] = f"an error above {TOLERANCE:g}"
    print(" ".join(f"{_text(row[column]):>13}" for column in COLUMNS), row.get("failure", ""), flush=True)
    return row


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def check(name: str, budget_s: float, measure: bool) -> dict[str, Any]:
    """Optimize and check one model; return its row."""
    begun_s = time.monotonic()
    if name in PAPER:
        row = _check_onnx(name, budget_s, measure)
    else:
        row = _check_module(name, budget_s, measure)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"model": name, **row, "seconds": round(time.monotonic() - begun_s, 1), "MB": peak_kb // 1024}


def _check_onnx(name: str, budget_s: float, measure: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        model = build(name)
        path.write_bytes(model.SerializeToString())
        executable: Any = optimize(path, budget=budget_s, measure=measure)
        feeds = _feeds(executable.get_inputs())
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        expected = session.run(None, feeds)
    found = executable.run(None, feeds)
    return _row(executable.report, len(model.graph.node), _distance(found, expected))


def _check_module(name: str, budget_s: float, measure: bool) -> dict[str, Any]:
    """Optimize a PyTorch module, and compare its executable with PyTorch."""
    import torch

    from benchmarks.models.transformers import TRANSFORMERS

    module, inputs = TRANSFORMERS[name].build()
    executable: Any = optimize(module, inputs, budget=budget_s, measure=measure)
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(**inputs))
    found = torch.utils._pytree.tree_leaves(executable(**inputs))
    pairs = [[t.numpy() for t in side if isinstance(t, torch.Tensor)] for side in (found, expected)]
    return _row(executable.flat.report, 0, _distance(*pairs))


def _row(report: Report, operators: int, distance: float) -> dict[str, Any]:
    return {
        "operators": operators,
        "primitives": report.primitives,
        "candidates": report.distinct_candidates,
        "status": report.status.split()[0],
        "gap": report.gap,
        "error": report.max_error,
        "to ORT": distance,
    }


def _feeds(inputs: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {i.name: rng.standard_normal(i.shape).astype(i.dtype) for i in inputs}


def _distance(found: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest element of an output."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        size = float(np.abs(b).max(initial=1e-30))
        worst = max(worst, float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) / size)
    return worst


if __name__ == "__main__":
    sys.exit(main())
