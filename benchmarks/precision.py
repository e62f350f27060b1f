"""Compares plans with an error budget with float32 plans, for the float32 transformers of the suite.

    python -m benchmarks.precision [--models bert,vit] [--error 1e-2] [--budget 90] [--budget-with-error 140]
                                   [--rounds 25] [--artifacts FOLDER] [--output FILE.json]

Each model is searched twice, with the error budget `--error` and without; artifacts in the folder are used. In each
round both executables are timed; a time is the lesser of two runs after an untimed one. The reported quotient is the
median over the rounds. Errors are measured on 20 inputs whose seeds differ from those of the calibration, relative to
the largest element of each output.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import artifact_of, artifacts_of, known_rows, options_of, write_rows
from benchmarks.suite import TRANSFORMERS, load
from korch.inputs import random_inputs
from korch.loading import load as load_artifact
from korch.numerics import max_error

UNSEEN = range(1000, 1020)
"""Seeds of the inputs on which errors are measured."""

GOAL = 2.0


def main() -> int:
    """Compare; return 1 if a median quotient is below `GOAL` or an error is larger than the budget."""
    parser = options_of(__doc__, TRANSFORMERS, budget_s=90.0, rounds=25)
    parser.add_argument("--error", type=float, default=1e-2)
    parser.add_argument("--budget-with-error", type=float, default=140.0)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.models.split(","):
        with artifacts_of(args) as folder:
            rows[name] = measure(name, folder, args)
        print(f"{name}: {text(rows[name])}", flush=True)
        write_rows(args.output, known_rows(args.output) | rows)
    return int(any(np.median(row["quotients"]) < GOAL or max(row["errors"]) > args.error for row in rows.values()))


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the quotients of a model's two plans, and the errors of the plan with an error budget."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        path.write_bytes(load(name).SerializeToString())
    exact = load_artifact(artifact_of(path, folder / f"{name}.korch", budget=args.budget))
    artifact = folder / f"{name}-{args.error:g}.korch"
    near = load_artifact(artifact_of(path, artifact, budget=args.budget_with_error, error=args.error))
    errors = []
    for seed in UNSEEN:
        feeds = random_inputs(path, seed)
        expected, found = (plan.run(None, feeds) for plan in (exact, near))
        errors.append(max_error(found, expected))
    feeds, times = random_inputs(path), []
    for _ in range(args.rounds + 2):
        times.append([_turn(plan, feeds) for plan in (exact, near)])
    quotients = [a / b for a, b in times[2:]]
    return {
        "quotients": quotients,
        "exact_ms": float(np.median([a for a, _ in times[2:]])) * 1e3,
        "ms": float(np.median([b for _, b in times[2:]])) * 1e3,
        "errors": errors,
    }


def text(row: dict[str, Any]) -> str:
    """Return the line that is printed for a model."""
    low, middle, high = np.quantile(row["quotients"], [0.1, 0.5, 0.9])
    largest = max(row["errors"])
    return f"{row['exact_ms']:.1f} -> {row['ms']:.1f} ms, {middle:.2f} ({low:.2f} to {high:.2f}); error {largest:.1e}"


def _turn(plan: Any, feeds: dict[str, Any]) -> float:
    plan.run(None, feeds)
    found = []
    for _ in range(2):
        begin = time.perf_counter()
        plan.run(None, feeds)
        found.append(time.perf_counter() - begin)
    return min(found)


if __name__ == "__main__":
    raise SystemExit(main())
