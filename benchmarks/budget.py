"""Compares the budget of `korch optimize` with the seconds it takes, on an idle machine and beside busy processes.

    python -m benchmarks.budget MODEL.onnx... [--budget 10,20,60] [--busy 0,2] [--output FILE.json]

Each run begins with an empty cache and is timed from the start of the command to its end. A budget
is kept if the run takes at most 1.1 times the budget plus two seconds. If the command announced a
larger minimum, that minimum counts instead of the budget.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.busy import busy_processes
from benchmarks.suite import machine

ALLOWED_SHARE, ALLOWED_S = 1.1, 2.0


def main() -> int:
    """Run each combination of model, busy processes and budget; return 1 if a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--budget", default="10,20,60", help="seconds, separated by commas")
    parser.add_argument("--busy", default="0,2", help="numbers of busy processes")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for busy in map(int, args.busy.split(",")):
            for budget_s in map(float, args.budget.split(",")):
                rows.append(run(model, budget_s, busy))
                print(text_of(rows[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return int(not all(row["is_kept"] for row in rows))


def run(model: Path, budget_s: float, busy: int) -> dict[str, Any]:
    """Optimize a model with an empty cache; return the budget, the seconds taken and the plan."""
    with tempfile.TemporaryDirectory() as folder, busy_processes(busy):
        load = os.getloadavg()[0]
        begun_s = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "korch.cli",
                "optimize",
                str(model),
                "-o",
                f"{folder}/a.korch",
                "--budget",
                str(budget_s),
                "--cache-folder",
                f"{folder}/cache",
                "--json",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.monotonic() - begun_s
    report = json.loads(done.stdout)
    least_s = report.get("least_s")
    limit_s = ALLOWED_SHARE * max(budget_s, least_s or 0.0) + ALLOWED_S
    return {
        "model": model.stem,
        "budget_s": budget_s,
        "busy": busy,
        "load": load,
        "seconds": seconds,
        "least_s": least_s,
        "is_kept": seconds <= limit_s,
        "predicted_ms": report["predicted_ms"],
        "measured_ms": report["measured_ms"],
        "plan": report["plan"],
        "disturbed": report["disturbed"],
        "has_doubt": report["discrepancy"] is not None,
    }


def text_of(row: dict[str, Any]) -> str:
    """Return the line that is printed for a row."""
    least = f", announced minimum {row['least_s']:.0f} s" if row["least_s"] else ""
    kept = "kept" if row["is_kept"] else "NOT KEPT"
    return (
        f"{row['model']} beside {row['busy']}: budget {row['budget_s']:.0f} s{least}, took "
        f"{row['seconds']:.1f} s, {kept}; predicted {row['predicted_ms']:.2f} ms, measured "
        f"{row['measured_ms']:.2f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
