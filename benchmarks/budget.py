"""Compares the budget of a search with the seconds it takes, on an idle machine and beside busy processes.

    python -m benchmarks.budget [--cases mlp,distilbert,...] [--busy 0,2] [--output FILE.json]

Each run begins with an empty cache, and with compiled bytecode, as in an installed package. A command is timed from
its start to its end, a call of a module that torch.compile optimizes from its start until it returns. A budget is
kept if that takes at most 1.1 times the budget plus two seconds, for each search; a call without a search may take
two seconds. If a larger least was announced, it counts instead of the budget, and the run is repeated with it. Rows
in the output file are not measured again.
"""

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import korch
from benchmarks.busy import busy_processes
from benchmarks.rows import known_rows, write_rows

ALLOWED_SHARE, ALLOWED_S = 1.1, 2.0


@dataclass(frozen=True)
class Case:
    """What is searched."""

    budget_s: float  # the budget
    model: Callable[[Path], Any] | None = None  # writes a model to a file; None for a module of `benchmarks.compiled`
    shapes: tuple[str, ...] = ()  # the values of `--shape`


def written(name: str, path: Path, **options: Any) -> None:
    """Write a model of `benchmarks.models`."""
    from benchmarks.models import build
    from benchmarks.models.exported import export_model, is_exported

    make = export_model if is_exported(name) else build
    path.write_bytes(make(name, **options).SerializeToString())


def ranged(name: str, path: Path) -> None:
    """Write a model of `benchmarks.ranges` with free dimensions."""
    from benchmarks.ranges import MODELS

    path.write_bytes(MODELS[name].build().SerializeToString())


def unrolled(steps: int, is_product: bool, path: Path) -> None:
    """Write a recurrence of `steps` steps without a loop: h = tanh(h W + x V), or h = a h + b x."""
    import numpy as np
    import onnx
    from onnx import helper

    width, rng = 32, np.random.default_rng(0)
    node = helper.make_node
    names = [f"x{t}" for t in range(steps)]
    nodes = [node("Split", ["x"], names, axis=0, num_outputs=steps)]
    for t, x in enumerate(names):
        op = "MatMul" if is_product else "Mul"
        nodes += [node(op, [f"h{t}", "w"], [f"p{t}"]), node(op, [x, "v"], [f"q{t}"])]
        nodes += [node("Add", [f"p{t}", f"q{t}"], [f"s{t}"]), node("Tanh", [f"s{t}"], [f"h{t + 1}"])]
    nodes.append(node("Concat", [f"h{t + 1}" for t in range(steps)], ["y"], axis=0))
    shapes = {"w": (width, width) if is_product else (width,), "v": (width, width) if is_product else (width,)}
    arrays = {n: rng.uniform(-0.3, 0.3, shape) for n, shape in {**shapes, "h0": (1, width)}.items()}
    constants = [onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    ends = [[helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (steps, width))] for n in ("x", "y")]
    graph = helper.make_graph(nodes, "unrolled", *ends, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


CASES: Mapping[str, Case] = {
    "mlp": Case(1, partial(written, "mlp")),
    "mlp, longer": Case(10, partial(written, "mlp")),
    "mobilenetv3": Case(30, partial(written, "mobilenetv3")),
    "candy": Case(20, partial(written, "candy")),
    "segformer": Case(30, partial(written, "segformer")),
    "bert, two layers": Case(20, partial(written, "bert:script", layers=2)),
    "bert, two layers, range": Case(40, partial(ranged, "bert-2"), ("length=1..128",)),
    "bert, two layers, two ranges": Case(60, partial(ranged, "bert-2d"), ("batch=1..32", "length=16..512")),
    "vit, range": Case(30, partial(ranged, "vit-4"), ("batch=1..8",)),
    "yolox, range": Case(60, partial(ranged, "yolox"), ("size=160..640:32",)),
    "unrolled products": Case(20, partial(unrolled, 150, True)),
    "unrolled recurrence": Case(20, partial(unrolled, 64, False)),
    "unrolled recurrence, long": Case(20, partial(unrolled, 200, False)),
    "compiled layers": Case(10),
    "compiled distilbert": Case(10),
    "compiled llama": Case(10),
}


def main() -> int:
    """Run each case beside each number of busy processes; return 1 if a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help=f"separated by semicolons; all by default: {'; '.join(CASES)}")
    parser.add_argument("--busy", default="0,2", help="numbers of busy processes")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = known_rows(args.output, "rows")
    compileall.compile_dir(Path(korch.__file__).parent, quiet=1)
    for name in args.cases.split(";") if args.cases else CASES:
        for busy in map(int, args.busy.split(",")):
            if any(row["model"].split(": ")[0] == name and row["busy"] == busy for row in rows):
                continue
            for row in run(name, busy):
                rows.append({"busy": busy, **row})
                print(rows[-1], flush=True)
            write_rows(args.output, rows, "rows")
    return int(not all(row["is_kept"] for row in rows))


def run(name: str, busy: int) -> list[dict[str, Any]]:
    """Return a row for each timed call of a case, with the seconds that it took with the announced least as budget."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder, busy_processes(busy):
        load = os.getloadavg()[0]
        if case.model is not None:
            case.model(Path(folder) / "model.onnx")
        rows = attempt(name, case.budget_s, Path(folder))
        most_s = max((row["least_s"] or 0.0 for row in rows), default=0.0)
        again = attempt(name, most_s, Path(folder)) if most_s > case.budget_s else []
    found = []
    for i, row in enumerate(rows):
        follows = again[i] if i < len(again) else None
        kept = all(own["ends_well"] and own["seconds"] <= allowed_s(own) for own in (row, follows) if own is not None)
        found.append({**row, "load": load, "follows_s": follows and follows["seconds"], "is_kept": kept})
    return found


def allowed_s(row: Mapping[str, Any]) -> float:
    """Return the seconds that the searches of a row may take."""
    return max(ALLOWED_S, row["searches"] * (ALLOWED_SHARE * max(row["budget_s"], row["least_s"] or 0.0) + ALLOWED_S))


def attempt(name: str, budget_s: float, folder: Path) -> list[dict[str, Any]]:
    """Run a case with a budget and an empty cache; return the seconds and the announced least of each call."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as cache:
        if case.model is None:
            command = ["benchmarks.compiled", name.removeprefix("compiled "), str(budget_s), cache]
            calls = json.loads(_call(command))
            return [{**row, "model": f"{name}: {row['call']}", "ends_well": True} for row in calls]
        command = ["korch.cli", "optimize", str(folder / "model.onnx"), "-o", f"{folder}/a.korch", "--json"]
        command += ["--budget", str(budget_s), "--cache-folder", cache]
        begun_s = time.monotonic()
        said = _call([*command, *(f"--shape={shape}" for shape in case.shapes)])
        seconds = time.monotonic() - begun_s
    report = json.loads(said) if said else {}
    plans = report["plans"].values() if isinstance(report.get("plans"), dict) else [report]  # a range has several
    least_s = max(plan.get("least_s") or 0.0 for plan in plans) or None
    row = {"model": name, "budget_s": budget_s, "searches": 1, "seconds": seconds, "least_s": least_s}
    return [{**row, "ends_well": bool(said)}]


def _call(arguments: Sequence[str]) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], check=False, capture_output=True, text=True, env=own
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
