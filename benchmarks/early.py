"""Compares the plans that searches of one model find within several budgets, and other engines with them.

    python -m benchmarks.early [--models candy,...] [--searches 10,30,100,100,100,10-analytic,30-analytic]
                               [--rounds N] --artifacts FOLDER --output FILE

Each search is a command `korch optimize` with an empty cache, whose seconds are taken from its start to its end; the
modules' bytecode is compiled before. "10-analytic" has 10 s and does without learned costs, in a process of its own. A
budget of 10 s is 15 s for the models in `SLOW`. Searches that the file and the folder have are not repeated; the
comparison is.
"""

import compileall
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import korch
from benchmarks.models import PAPER
from benchmarks.models.transformers import TRANSFORMERS
from benchmarks.peers import full_name
from benchmarks.rows import artifact_of, in_process, known_rows, options_of, write_rows
from benchmarks.suite import load
from korch.ablation import Ablation
from korch.inputs import random_inputs
from korch.loading import load as load_artifact
from korch.records import plain
from korch.report.compare import RunnerSpec, Settings, compare

MODELS = (*PAPER, *TRANSFORMERS, "resnet50", "mobilenetv2")
SLOW = ("segformer", "efficientvit", "yolov4")
SEARCHES = "10,30,100,100,100,10-analytic,30-analytic"
ENGINES = ("onnxruntime", "openvino")
ANALYTIC = "-analytic"
FIRST_S = 10.0
KEPT = (
    "seconds",
    "least_s",
    "measured_ms",
    "predicted_ms",
    "expected_ms",
    "lower_bound_ms",
    "gap",
    "calibrated_gap",
    "calibrated_ms",
    "untimed",
    "timed_kernels",
    "stages_s",
    "search_s",
)


def main() -> int:
    """Search and compare all models."""
    parser = options_of(__doc__, MODELS)
    parser.add_argument("--searches", default=SEARCHES, help=f"their budgets in seconds (default: {SEARCHES})")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.artifacts is None:
        parser.error("--artifacts is missing")
    args.artifacts.mkdir(parents=True, exist_ok=True)
    compileall.compile_dir(Path(korch.__file__).parent, quiet=1)
    rows = known_rows(args.output)
    for name in args.models.split(","):
        rows[name] = row = measured(name, args, rows.get(name, {}).get("searches", {}))
        write_rows(args.output, rows)
        print(name, {label: round(found["taken_s"], 1) for label, found in row["searches"].items()}, flush=True)
    return 0


def measured(name: str, args: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return the reports of a model's searches by label, and the comparison of their plans."""
    searches, counts = {}, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        model.write_bytes(load(name).SerializeToString())
        for budget in args.searches.split(","):
            counts[budget] += 1
            label = budget if counts[budget] == 1 else f"{budget} #{counts[budget]}"
            artifact = args.artifacts / f"{name} {label}.korch"
            if label in known and artifact.exists():
                searches[label] = known[label]
                continue
            budget_s = float(budget.removesuffix(ANALYTIC))
            budget_s = 1.5 * budget_s if budget_s <= FIRST_S and name in SLOW else budget_s
            began_s = time.monotonic()
            artifact.unlink(missing_ok=True)
            if ANALYTIC in budget:
                in_process(search_by_guesses, model, artifact, args.threads, budget_s)
            else:
                search(model, artifact, args.threads, budget_s)
            taken_s = time.monotonic() - began_s
            report = load_artifact(artifact).report
            searches[label] = {"taken_s": taken_s, **{key: plain(getattr(report, key)) for key in KEPT}}
        runners = [RunnerSpec("korch", args.artifacts / f"{name} {label}.korch", label) for label in searches]
        runners += [RunnerSpec(full_name(engine), model, engine) for engine in ENGINES]
        settings = Settings(args.threads, args.rounds, subject=next(iter(searches)), leave_out=True)
        comparison = compare(runners, random_inputs(model), settings)
    print(comparison.to_text(), flush=True)
    return {"searches": searches, "comparison": comparison.to_json()}


def search(model: Path, artifact: Path, threads: int, budget_s: float) -> None:
    """Write the artifact of one search."""
    with tempfile.TemporaryDirectory() as cache:
        flags = {"--output": artifact, "--threads": threads, "--budget": budget_s, "--cache-folder": cache}
        flags_text = [str(part) for flag in flags.items() for part in flag]
        command = [sys.executable, "-m", "korch.cli", "optimize", str(model), *flags_text]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def search_by_guesses(model: Path, artifact: Path, threads: int, budget_s: float) -> None:
    """Write the artifact of one search without learned costs."""
    ablation = Ablation(learned_costs=False)
    artifact_of(model, artifact, threads=threads, budget=budget_s, ablation=ablation, progress=False)


if __name__ == "__main__":
    sys.exit(main())
