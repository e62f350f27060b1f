"""Measures the superoptimizer on mutated programs, pruning rules, Mirage's six blocks and whole models.

    python -m benchmarks.superopt mutants --count 10000
    python -m benchmarks.superopt pruning --seconds 60
    python -m benchmarks.superopt blocks --batch 1 8 --rounds 15
    python -m benchmarks.superopt models --block efficientvit yolox segformer llama --seconds 80

`mutants` checks whether the verifier refuses wrong programs. `pruning` counts the prefixes that the search visits with
and without each pruning rule. `blocks` and `models` compare plans with and without the superoptimizer. Each command
prints its results and writes them as JSON to benchmarks/results. New rows of blocks and models replace earlier rows
with the same name and batch, so that they can be measured one by one.
"""

import argparse
import difflib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import korch
from benchmarks.models.writer import GraphWriter
from benchmarks.peers import full_name
from benchmarks.rows import machine
from benchmarks.suite import load
from benchmarks.superopt_unpruned import Unpruned
from korch.candidate.candidate import make_group
from korch.inputs import random_inputs
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.report.compare import Comparison, RunnerSpec, Settings, compare
from korch.runtime.report import Report
from korch.superopt.axes import named
from korch.superopt.expressions import expressions
from korch.superopt.find import search
from korch.superopt.generate import MARGIN, BlockStep, GraphSearch, Rules, block_graphs
from korch.superopt.sizes import CacheMachine
from korch.superopt.verify import verify
from korch.tile.check.arithmetic import Float64
from korch.tile.check.reference import run_program
from korch.tile.ir.program import TileProgram
from korch.tile.ir.text import format_program
from tests.support.blocks import GROUPS, Block, rms_norm_product
from tests.support.mutants import mutant

RESULTS = Path(__file__).parent / "results"
MACHINE = CacheMachine(4, 2, 1 << 16)
ENGINES = ("onnxruntime", "openvino", "inductor")
SUITE = ("efficientvit", "yolox", "segformer", "llama")
LABELS = ("without", "with")
SAMPLE = 6
"""The number of accepted mutants of each kind of change that are written to the results, to be checked by hand."""


def found_programs() -> Iterator[tuple[str, PrimitiveGraph, TileProgram]]:
    """Yield the name, graph and program of each program that is found for the groups of `GROUPS`, at small sizes."""
    for name, make in GROUPS.items():
        graph = make()
        group = make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])
        for found in search(group, MACHINE, 30.0).programs:
            yield name, group.body, found.program


def mutants(count: int, seed: int) -> dict[str, Any]:
    """Verify mutated programs; compare accepted ones with the reference on other inputs; return the counts."""
    rng, programs = np.random.default_rng(seed), list(found_programs())
    counts, by_change, accepted = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[str] = []
    sample: dict[str, list[str]] = {}
    begin = time.monotonic()
    for number in range(count):
        name, graph, program = programs[number % len(programs)]
        what, changed = mutant(program, rng)
        if changed == program:
            counts["unchanged"] += 1
            continue
        verdict = verify(changed, graph, number)
        by_change[what] += 1
        if not verdict.is_equal:
            counts["refused"] += 1
            continue
        counts["accepted"] += 1
        accepted[what] += 1
        if accepted[what] <= SAMPLE:
            sample.setdefault(what, []).append(f"{name}: {_changed_lines(program, changed)}")
        if difference := _differs(changed, graph, number):
            wrong.append(f"{name}: {what}: {difference}")
    return {
        "mutants": count,
        "programs": len(programs),
        "counts": dict(counts),
        "by change": dict(by_change),
        "accepted by change": dict(accepted),
        "accepted, the first of each change": sample,
        "wrongly accepted": wrong,
        "seconds": round(time.monotonic() - begin, 1),
    }


def _changed_lines(program: TileProgram, changed: TileProgram) -> str:
    """Return the lines that a mutation changed, before and after."""
    texts = [format_program(p).splitlines() for p in (program, changed)]
    lines = [line for line in difflib.unified_diff(*texts, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
    return " / ".join(" ".join(line.split()) for line in lines)


def _differs(program: TileProgram, graph: PrimitiveGraph, seed: int) -> str:
    """Return how a program differs from its graph in float64, on inputs that the verifier has not used; "" if equal."""
    rng = np.random.default_rng((seed, 1))
    for _ in range(3):
        feeds = {name: rng.standard_normal(graph.types[v].shape) * rng.uniform(0.3, 2) for name, v in graph.inputs}
        (wanted,) = reference.run(graph, feeds, exact=True).values()
        (found,) = run_program(program, [*feeds.values()], seed, Float64())
        error = float(np.abs(found - wanted.reshape(-1)).max() / np.abs(wanted).max())
        if not error < 1e-9:
            return f"an error of {error:.1e}"
    return ""


KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "without bound": {"by_bound": False},
    "without bound, readers": {"by_bound": False, "by_readers": False},
    "without expressions": {"others": Unpruned},
    "none": {"others": Unpruned, "by_bound": False, "by_readers": False},
}
"""The pruning rules that are switched off, by the name of a row."""


def pruning(seconds: float) -> list[dict[str, Any]]:
    """Count the prefixes that the search visits with and without each pruning rule.

    If both searches are complete, a row also says whether it has the same programs as the row "all", among the programs
    whose work the bound allows.
    """
    rows = []
    for name, graph, steps in (
        *(("exp(x w)", exp_of_product(), steps) for steps in range(2, 5)),
        *(("RMSNorm and a product", rms_norm_product(), steps) for steps in range(5, 12)),
    ):
        computation = named(graph)
        ways = expressions(computation, joins=name.startswith("RMSNorm"))
        graphs: dict[str, GraphSearch] = {}
        for kind, flags in KINDS.items():
            found = block_graphs(
                computation, ways, Rules(most_steps=steps, seconds=seconds, most_found=10_000, **flags)
            )
            graphs[kind] = found
            row = {
                "computation": name,
                "steps": steps,
                "pruning": kind,
                "visited": found.visited,
                "found": len(found.found),
                "pruned": dict(found.pruned),
                "seconds": round(found.seconds, 2),
                "is_complete": found.is_complete,
            }
            if found.is_complete and graphs["all"].is_complete:
                row["same programs"] = _within_bound(found) == _within_bound(graphs["all"])
            rows.append(row)
            print({key: value for key, value in row.items() if key != "pruned"}, flush=True)
    return rows


def exp_of_product() -> PrimitiveGraph:
    """Return exp(x w): it has only two steps, so a search without pruning can complete."""
    b = Block()
    return b.result(b.add("exp", (b.add("matmul", (b.tensor("x", 4, 6), b.tensor("w", 6, 5))),)))


def _within_bound(search: GraphSearch) -> set[tuple[BlockStep, ...]]:
    """Return the block graphs whose work the bound allows, independent of the order in which they were found."""
    least = min((graph.work for graph in search.found), default=0)
    return {graph.steps for graph in search.found if graph.work <= MARGIN * least}


# Models of the six blocks


def inputs(g: GraphWriter, *shapes: tuple[int, ...]) -> list[str]:
    """Add inputs; return their names."""
    return [g.input(f"x{i}", shape) for i, shape in enumerate(shapes)]


def weight(g: GraphWriter, *shape: int) -> str:
    """Add a random weight; return its name."""
    return g.normal(shape, shape[0] ** -0.5, "w")


def normalized(g: GraphWriter, x: str) -> str:
    """Return x divided by the root of the mean of its squares along the last axis."""
    mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1], keepdims=1)
    return g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.scalar(1e-5, "epsilon"))))


def attention(g: GraphWriter, q: str, k: str, v: str, d: int) -> str:
    """Return softmax(q k' / sqrt(d)) v."""
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))
    scaled = g.op("Mul", scores, g.scalar(d**-0.5, "scale"))
    return g.op("MatMul", g.op("Softmax", scaled, axis=-1), v)


def gqa(g: GraphWriter, batch: int) -> str:
    """Return attention with 8 key heads, 4 queries for each of them, and 1024 keys of width 64."""
    return attention(g, *inputs(g, (8 * batch, 4, 64), (8 * batch, 1024, 64), (8 * batch, 1024, 64)), 64)


def qk_norm(g: GraphWriter, batch: int) -> str:
    """Return attention with 8 heads, 64 normalized queries, and 256 normalized keys of width 64."""
    q, k, v = inputs(g, (8 * batch, 64, 64), (8 * batch, 256, 64), (8 * batch, 256, 64))
    return attention(g, normalized(g, q), normalized(g, k), v, 64)


def rms_norm(g: GraphWriter, batch: int) -> str:
    """Return the product of a normalized row of 1024 and a matrix of 1024 columns."""
    x = normalized(g, *inputs(g, (batch, 1024)))
    return g.op("MatMul", g.op("Mul", x, weight(g, 1024)), weight(g, 1024, 1024))


def lora(g: GraphWriter, batch: int) -> str:
    """Return the product of a row of 1024 with a matrix, plus its product with a matrix of rank 16."""
    (x,) = inputs(g, (batch, 1024))
    low = g.op("MatMul", g.op("MatMul", x, weight(g, 1024, 16)), weight(g, 16, 1024))
    return g.op("Add", g.op("MatMul", x, weight(g, 1024, 1024)), low)


def gated_mlp(g: GraphWriter, batch: int) -> str:
    """Return silu(x w) (x v) for a row x of 1024."""
    (x,) = inputs(g, (batch, 1024))
    gate = g.op("MatMul", x, weight(g, 1024, 1024))
    gate = g.op("Mul", gate, g.op("Sigmoid", gate))
    return g.op("Mul", gate, g.op("MatMul", x, weight(g, 1024, 1024)))


def n_trans(g: GraphWriter, batch: int) -> str:
    """Return norm(x + alpha (norm(h) - x)) for 16 rows of 1024 in each element of the batch."""
    x, h = inputs(g, (16 * batch, 1024), (16 * batch, 1024))
    step = g.op("Mul", weight(g, 1024), g.op("Sub", normalized(g, h), x))
    return normalized(g, g.op("Add", x, step))


MODELS: dict[str, Callable[[GraphWriter, int], str]] = {
    "GQA": gqa,
    "QKNorm": qk_norm,
    "RMSNorm": rms_norm,
    "LoRA": lora,
    "GatedMLP": gated_mlp,
    "nTrans": n_trans,
}


def write_model(path: Path, name: str, batch: int) -> None:
    """Write a block, or a model of the suite, unless the file exists."""
    if path.exists():
        return
    if name in MODELS:
        g = GraphWriter(name, 0)
        g.output(MODELS[name](g, batch), "y", (None, None, None)[: 2 + (name in ("GQA", "QKNorm"))])
        onnx.save(g.finish(), path)
    else:
        path.write_bytes(load(name).SerializeToString())


def prepare(folder: Path, name: str, batch: int, seconds: float, labels: Sequence[str]) -> dict[str, Any]:
    """Optimize a model with and without the superoptimizer, unless its artifacts exist; return facts about the plans.

    Both searches share one cache of measurements. The search without runs first, so that it has no less time.
    """
    path, facts = folder / f"{name}-{batch}.onnx", {}
    write_model(path, name, batch)
    for label in labels:
        out = folder / f"{name}-{batch}-{label}.korch"
        kept = out.with_suffix(".json")
        if not out.exists():
            begin = time.monotonic()
            limit = seconds / 3 if label == "with" else 0.0
            executable = korch.optimize(path, superopt=limit, budget=seconds, threads=2)
            kept.write_text(json.dumps(facts_of(executable.report, time.monotonic() - begin)))
            executable.save(out)
            del executable
        plan = korch.load(out).plan
        found = [step.variant for step in plan.steps if step.provider == "superopt"]
        facts[label] = {**json.loads(kept.read_text("utf-8")), "found kernels": len(found), "kernels": len(plan.steps)}
        if name in MODELS:
            facts[label]["plan"] = [f"{step.provider} {step.variant}".strip() for step in plan.steps]
        del plan
    return facts


def facts_of(report: Report, seconds: float) -> dict[str, Any]:
    """Return the time and counts of a search, and the predicted time of its plan."""
    facts: dict[str, Any] = {"seconds": round(seconds, 1), "predicted_ms": report.predicted_ms}
    if report.provider_reports:
        found = re.match(r".*: (\d+) programs for \d+ of (\d+) groups, .* in ([\d.]+) s", report.provider_reports[0])
        assert found is not None
        facts |= {"groups": int(found[2]), "programs": int(found[1]), "superopt seconds": float(found[3])}
    return facts


def measured(folder: Path, name: str, batch: int, rounds: int, engines: Sequence[str] = ENGINES) -> Comparison:
    """Compare both plans, and other engines if any are given, in one interleaved run."""
    path = folder / f"{name}-{batch}.onnx"
    runners = [RunnerSpec("korch", folder / f"{name}-{batch}-{label}.korch", label) for label in LABELS]
    runners += [RunnerSpec(full_name(engine), path, engine) for engine in engines]
    return compare(runners, random_inputs(path, seed=0), Settings(2, rounds, leave_out=True))


def rows_of(folder: Path, name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return the times of both plans, and for blocks also with all engines.

    Without other engines, weights stay in the shared cache.
    """
    runs = {"alone": measured(folder, name, batch, 5 * rounds if name in MODELS else rounds, ())}
    if name in MODELS:
        runs["rows"] = measured(folder, name, batch, rounds)
    for run in runs.values():
        print(run, flush=True)
    return {key: _short(run.to_json()["rows"]) for key, run in runs.items()}


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the times of single runs."""
    return [{key: value for key, value in row.items() if key != "times_ns"} for row in rows]


def blocks(args: argparse.Namespace, names: Sequence[str], batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each block or model and each batch, unless artifacts are only prepared."""
    labels = args.only or LABELS
    for batch in batches:
        for name in names:
            facts = prepare(args.folder, name, batch, args.seconds, labels)
            print(name, batch, json.dumps(facts), flush=True)
            if not args.prepare:
                times = rows_of(args.folder, name, batch, args.rounds)
                yield {"block": name, "batch": batch, "plans": facts, **times}


def keep_rows(rows: Iterator[dict[str, Any]], path: Path) -> None:
    """Write each row when it is measured; it replaces an earlier row of the same name and batch on this machine."""
    for row in rows:
        before = json.loads(path.read_text("utf-8")) if path.exists() else {}
        about, key = machine(), (row["block"], row["batch"])
        is_same = before.get("cpu") == about["cpu"] and before.get("isa") == about["isa"]
        kept = [r for r in before.get("result", ()) if is_same and (r["block"], r["batch"]) != key]
        order = [*MODELS, *SUITE]
        kept = sorted([*kept, row], key=lambda r: (r["batch"], order.index(r["block"])))
        path.write_text(json.dumps({**about, "result": kept}, indent=1) + "\n")


def main() -> None:
    """Run the command that was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("mutants", "pruning", "blocks", "models"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--block", nargs="*", help="the blocks or models (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/korch-superopt"))
    parser.add_argument("--prepare", action="store_true", help="only optimize the blocks")
    parser.add_argument("--only", nargs="*", choices=LABELS, help="which plans to optimize (default: both)")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    path = RESULTS / f"superopt-{args.command}.json"
    match args.command:
        case "mutants":
            result: Any = mutants(args.count, args.seed)
        case "pruning":
            result = pruning(args.seconds)
        case "models":
            keep_rows(blocks(args, args.block or SUITE, [1]), path)
            return
        case _:
            keep_rows(blocks(args, args.block or [*MODELS], args.batch), path)
            return
    path.write_text(json.dumps({**machine(), "result": result}, indent=1) + "\n")
    print(json.dumps(result if args.command == "mutants" else len(result), indent=1))


if __name__ == "__main__":
    main()
