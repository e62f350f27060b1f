"""Repeats experiments of the paper on this machine's CPU (Korch, ASPLOS 2024, section 6).

    python -m benchmarks.paper whole [--models candy,...]     figure 6: models of batch 1 and 16, and their plans
    python -m benchmarks.paper fission [--models candy,...]   figure 7: other engines given the primitives
    python -m benchmarks.paper blocks [--models norm,...]     figures 2 to 4, 8 to 10, 12 and 13: blocks of models
    python -m benchmarks.paper candidates                     table 2: primitives, candidates and seconds
                               [--budget S] [--rounds N] [--output FILE]

Rows that a file of results has are not measured again. Engines are drawn in docs/assets, too (needs matplotlib).
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx

from benchmarks.figures import AGAIN, PAPER_FIGURE_6, ROOT, RULES, by_primitives
from benchmarks.models import PAPER, build
from benchmarks.models.paper_blocks import (
    linear_attention,
    normalized_and_padded,
    resized_and_joined,
    softmax_attention,
)
from benchmarks.peers import full_name
from benchmarks.plot import draw
from benchmarks.rows import known_rows, options_of, write_rows
from benchmarks.suite import quotients
from korch.ablation import Ablation
from korch.api import optimize
from korch.cli.bench import bench
from korch.fission import fission
from korch.frontend import load_model
from korch.inputs import random_inputs
from korch.options import Options
from korch.pipeline import Run, run_until
from korch.primitive.as_onnx import OnnxNodes
from korch.records import plain
from korch.report.compare import RunnerSpec, Settings, compare
from korch.report.kernel import operations
from korch.report.stage_onnx import save_model

BLOCKS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "norm, ReLU, pad": normalized_and_padded,
    "resize x4, concat": partial(resized_and_joined, 1),
    "the same, batch 16": partial(resized_and_joined, 16),
    "linear attention, 512²": partial(linear_attention, 32),
    "linear attention, 2048²": partial(linear_attention, 128),
    "softmax attention": softmax_attention,
}
"""The blocks of the paper's case studies."""

WHOLE: Mapping[str, Callable[[], onnx.ModelProto]] = {
    f"{name} of {images}": partial(lambda name, batch: of_batch(build(name), batch), name, int(images.split()[0]))
    for images in ("1 image", "16 images")
    for name in PAPER
}
"""The paper's models for one image and for 16."""

PAPERS = "paper: TensorRT"
"""The name of the paper's numbers in a figure."""

ENGINES = ("onnxruntime", "openvino", "inductor")


def of_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Return a model of one image for several, whose inner shapes follow from the images."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    del model.graph.value_info[:]
    return model


def of_fission(name: str, args: Any, folder: Path) -> dict[str, Any]:
    """Return the times of engines for a model, and for its primitives."""
    path, split = folder / "model.onnx", folder / "primitives.onnx"
    path.write_bytes(build(name).SerializeToString())
    save_model(OnnxNodes(fission(load_model(path)), name).model(), split)
    runners = [
        RunnerSpec(full_name(engine), file, f"{engine}{label}")
        for engine in ENGINES
        for file, label in ((path, ""), (split, ", primitives"))
    ]
    settings = Settings(args.threads, args.rounds, subject=ENGINES[0], leave_out=True)
    return compare(runners, random_inputs(path), settings).to_json()


def of_plans(name: str, args: Any, folder: Path) -> dict[str, Any]:
    """Return the times of engines for a block, of its whole plans, and of the kernels of the best one."""
    path = folder / "block.onnx"
    path.write_bytes(BLOCKS[name]().SerializeToString())
    row = searched(path, folder, args, Ablation())
    comparison = bench(
        folder / "any.korch", list(map(full_name, ENGINES)), path, args.rounds, Options(threads=args.threads), {}
    )
    return {"comparison": comparison.to_json()} | row


def of_whole(name: str, args: Any, folder: Path) -> dict[str, Any]:
    """Return the times of engines for a model, of its plan, and of the plan of a search with groups by rules.

    The second search begins with what the first one has measured. The model is searched again after it, so that there
    is a plan of any groups that had as much time.
    """
    path = folder / "model.onnx"
    path.write_bytes(WHOLE[name]().SerializeToString())
    row = searched(path, folder, args, Ablation())
    first = (folder / "any.korch").rename(folder / "first.korch")
    row[RULES] = searched(path, folder, args, Ablation(groups="by-rules"))
    row[AGAIN] = searched(path, folder, args, Ablation())
    runners = [
        RunnerSpec("korch", first, "korch"),
        RunnerSpec("korch", folder / "by-rules.korch", RULES),
        RunnerSpec("korch", folder / "any.korch", AGAIN),
    ]
    runners += [RunnerSpec(full_name(engine), path, engine) for engine in ENGINES]
    settings = Settings(args.threads, args.rounds, subject="korch", leave_out=True)
    return {"comparison": compare(runners, random_inputs(path), settings).to_json()} | row


def searched(path: Path, folder: Path, args: Any, ablation: Ablation) -> dict[str, Any]:
    """Write an artifact, named after its groups; return its plans and the kernels of the best one."""
    executable: Any = optimize(
        path, threads=args.threads, budget=args.budget, ablation=ablation, cache_folder=folder / "cache", progress=False
    )
    executable.save(folder / f"{ablation.groups}.korch")
    report = plain(executable.report)
    kernels = [{"operations": operations(step, 99), "cost_ns": step.cost_ns} for step in executable.plan.steps]
    return {"plan": report["plan"], "plans": report["plans"], "kernels": kernels}


def of_candidates(name: str, args: Any, folder: Path) -> dict[str, Any]:
    """Return the numbers of primitives and candidates of a model, and the seconds in which they were found."""
    path, begin_s = folder / "model.onnx", time.monotonic()
    path.write_bytes(build(name).SerializeToString())
    run = Run(Options(threads=args.threads, cache_folder=folder / "cache"), {}, lambda update: None, path)
    with run.resources:
        run_until(run, "candidates", skip=("reference",))
        tasks = run.results["candidates"].tasks
        return {
            "nodes": len(build(name).graph.node),
            "primitives": len(run.results["fission"].graph.primitives),
            "groups": sum(task.enumeration.groups for task in tasks),
            "candidates": sum(len(task.candidates) for task in tasks),
            "seconds": round(time.monotonic() - begin_s, 1),
        }


EXPERIMENTS: Mapping[str, tuple[Callable[[str, Any, Path], dict[str, Any]], tuple[str, ...]]] = {
    "fission": (of_fission, PAPER),
    "blocks": (of_plans, tuple(BLOCKS)),
    "whole": (of_whole, tuple(WHOLE)),
    "candidates": (of_candidates, PAPER),
}
"""The experiments: what makes a row, and the names of all rows."""


DRAWN: Mapping[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str, Mapping[str, float]]] = {
    "fission": (by_primitives, "time for the model / for its primitives", {"segformer": 1.24}),
    "blocks": (
        quotients,
        "time / Korch's time",
        {"norm, ReLU, pad": 1.32, "linear attention, 2048²": 3.29, "softmax attention": 1.5},
    ),
    "whole": (
        quotients,
        "time / Korch's time",
        {f"{name} of 1 image": float(tensorrt.split(",")[0]) for name, (_, tensorrt) in PAPER_FIGURE_6.items()},
    ),
}
"""By experiment, what makes the bars of a row, what they are, and the paper's numbers for TensorRT on a V100."""


def drawn(experiment: str, rows: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draw the rows of an experiment beside the paper's numbers."""
    bars, label, paper = DRAWN[experiment]
    found = {name: bars(row) | ({PAPERS: [paper[name]]} if name in paper else {}) for name, row in rows.items()}
    for own in found.values():
        own.pop(AGAIN, None)
    draw(found, path, label)


def main() -> int:
    """Run one experiment; write each row when it is measured, and draw all rows."""
    parser = options_of(__doc__, (), budget_s=40.0)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    make, names = EXPERIMENTS[args.experiment]
    path = args.output or ROOT / "benchmarks" / "results" / f"paper-{args.experiment}.json"
    rows = known_rows(path)
    for name in names:
        if name in rows or not any(part in name for part in args.models.split(",")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = make(name, args, Path(folder))
        write_rows(path, rows)
        print(name, {k: v for k, v in rows[name].items() if k not in ("comparison", "rows", "plans")})
    if args.experiment in DRAWN and rows and find_spec("matplotlib"):
        drawn(args.experiment, rows, (args.output or ROOT / "docs" / "assets" / path.name).with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
