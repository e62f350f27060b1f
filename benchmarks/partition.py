"""Compares the plans of different values of SearchLimits.partition ("off", "auto", ...) by estimated costs.

    python -m benchmarks.partition [--models segformer_b0,bert:script] [--modes auto,400,off]
                                   [--seconds 600] [--output FILE.json]

Nothing is measured: the cost of a kernel is estimated from its bytes and operations at fixed rates,
so the figures depend on the cuts and not on the state of the machine. The figures are the operations and
the predicted time of the plan, also relative to the plan of the model without cuts. A mode that takes
too long is reported as a failure. `benchmarks/suite.py` lists the models; names that end in `.onnx`
are files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import PAPER
from benchmarks.models.exported import FORMS
from benchmarks.suite import load, machine
from korch.ablation import Ablation
from korch.candidate.candidate import Candidate
from korch.limits import SearchLimits
from korch.measure.calibrate import Calibration, MemoryLevel
from korch.measure.cpu import CpuMeter
from korch.options import Options
from korch.pipeline import Run, few_collections, front
from korch.pipeline.stages import search_plans
from korch.provider.provider import load_providers
from korch.search.ledger import Ledger
from korch.segments.block_task import prepare_all

MODELS = (
    *PAPER,
    "mobilenetv2",
    "mobilenetv2:dynamo",
    "resnet50",
    *(f"{name}:{form}" for name in ("segformer_b0", "bert", "gpt2", "vit") for form in FORMS),
)

RATES = Calibration(
    (MemoryLevel(1 << 21, 2e11, 1e11), MemoryLevel(1 << 25, 8e10, 4e10), MemoryLevel(0, 2e10, 1e10)),
    rate_flop_per_s=2e11,
    launch_ns=100.0,
    region_ns=2000.0,
    kept_bytes=1 << 25,
)
"""Rounded rates of two cores with AVX-512."""


class EstimatedMeter(CpuMeter):
    """A meter that estimates costs at the fixed rates of `RATES`."""

    def _calibrate(self, known: Calibration | None = None) -> Calibration:
        return RATES

    def bound_ns(self, candidate: Candidate) -> int:
        """Return the estimated time of a candidate."""
        return self.guess_ns(candidate)


@few_collections()
def plan(name: str, mode: str, seconds: float) -> dict[str, Any]:
    """Return the figures of a model's plan."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            search=SearchLimits(partition=mode),
            measure=False,
            ablation=Ablation(baselines=False),
            budget_s=seconds,
            threads=2,
            cache_folder=Path(folder),
        )
        run = Run(options, {}, lambda stage, text: None)
        model = Path(name if name.endswith(".onnx") else f"{folder}/model.onnx")
        if not name.endswith(".onnx"):
            model.write_bytes(load(name).SerializeToString())
        run.model, run.started_s = model, time.monotonic()
        partition, split = front(run)
        meter = EstimatedMeter(options, load_providers())
        tasks = prepare_all(partition, run.joined, meter, options)
        run.tasks, run.ledger = tasks, Ledger(meter, options.search)
        outcome = search_plans(run)
    steps = outcome.plans["searched"]
    return {
        "primitives": len(split.primitives),
        "alternatives": partition.rules.alternatives,
        "saturation": partition.rules.stopped,
        "segments": len(partition.instances),
        "blocks": len(partition.blocks),
        "candidates": sum(len(task.candidates) for task in tasks),
        "kernels": len(steps),
        "given_flop": split.total_flop,
        "flop": sum(c.group.body.total_flop for c in steps),
        "predicted_ms": sum(meter.guess_ns(step) for step in steps) / 1e6,
        "gap": outcome.found.certificate.gap,
        "equivalences_s": round(run.stage_seconds["saturate"], 1),
        "seconds": round(time.monotonic() - begun_s, 1),
    }


def in_process(name: str, mode: str, seconds: float) -> dict[str, Any]:
    """Return the figures of a plan that is made in a separate process, or the reason for its failure."""
    command = [sys.executable, "-m", "benchmarks.partition", "--one", name, "--modes", mode, "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1.5 * seconds + 120)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {seconds:g} s"}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"failure": reason}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(name: str, mode: str, row: dict[str, Any], whole: dict[str, Any] | None) -> str:
    """Return a row as text."""
    if "failure" in row:
        return f"{name:24} {mode:>5} {row['failure']}"
    text = (
        f"{name:24} {mode:>5} {row['given_flop'] / 1e9:7.2f} -> {row['flop'] / 1e9:7.2f} GFLOP "
        f"{row['predicted_ms']:8.2f} ms, {row['segments']} segments, {row['blocks']} different, "
        f"{row['alternatives']} alternatives in {row['equivalences_s']} s, {row['seconds']} s"
    )
    if whole is not None and "failure" not in whole and whole is not row:
        shares = (row[key] / whole[key] for key in ("flop", "predicted_ms"))
        text += "; of off: operations {:.3f}, time {:.3f}".format(*shares)
    return text


def main() -> int:
    """Plan all models in all modes; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default="off,auto")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest for one plan")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(plan(args.one, args.modes, args.seconds)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    for name in args.models.split(","):
        rows[name] = {}
        for mode in sorted(args.modes.split(","), key=lambda mode: mode != "off"):
            row = rows[name][mode] = in_process(name, mode, args.seconds)
            print(line(name, mode, row, rows[name].get("off")), flush=True)
        if args.output is not None:
            text = json.dumps({"machine": machine(), "models": rows}, indent=1)
            args.output.write_text(text + "\n")
    return int(any("failure" in row for of_model in rows.values() for row in of_model.values()))


if __name__ == "__main__":
    sys.exit(main())
