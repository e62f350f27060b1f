"""Update the tables of measured figures in README.md and the documentation.

    python -m benchmarks.figures

A page marks the place of a table by a comment, `<!-- table: NAME -->`. The figures come from the files in
`benchmarks/results`; a test fails if a table differs from them.
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experts import BLOCKS, best_of
from benchmarks.judges import OF_MODELS, table
from benchmarks.models import PAPER
from benchmarks.models.transformers import NAMES
from benchmarks.suite import quotients

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SUITES = {"suite.json": "Xeon (AMX)", "suite-avx512.json": "EPYC (AVX-512)", "suite-avx2.json": "EPYC (AVX2)"}
ENGINES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "inductor": "Inductor", "iree": "IREE"}


def results(file: str) -> dict[str, Any]:
    """Return the rows of a file in `benchmarks/results`, by model."""
    found: dict[str, Any] = json.loads((RESULTS / file).read_text("utf-8"))
    models: dict[str, Any] = found.get("models") or found["blocks"]
    return models


def rows_of(file: str) -> list[dict[str, Any]]:
    """Return the rows of a file in `benchmarks/results` that has a list of them."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / file).read_text("utf-8"))["rows"]
    return rows


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Any) -> str:
    """Return the median with the 10th and 90th percentile."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def against_best(row: dict[str, Any]) -> tuple[str, Any]:
    """Return the engine that is fastest beside Korch, and its times divided by Korch's."""
    found = quotients(row)
    best = min(found, key=lambda name: float(np.median(found[name])))
    return ENGINES.get(best, best), found[best]


def medians(file: str) -> dict[str, dict[str, float]]:
    """Return by engine and model the median of the engine's time divided by Korch's."""
    found: dict[str, dict[str, float]] = {engine: {} for engine in ENGINES}
    for model, row in results(file).items():
        for engine, times in quotients(row).items():
            found[engine][model] = float(np.median(times))
    return found


def fastest(file: str) -> dict[str, float]:
    """Return by model the median of the fastest other engine's time divided by Korch's."""
    found = medians(file).values()
    models = dict.fromkeys(model for values in found for model in values)
    return {model: min(values[model] for values in found if model in values) for model in models}


def summary() -> str:
    """Return the mean and least quotient of each engine on each machine."""
    head = ["engine's time / Korch's", *(f"{cpu}: mean | worst" for cpu in SUITES.values())]
    rows: dict[str, list[str]] = {title: [] for title in ("fastest of these", *ENGINES.values())}
    for file in SUITES:
        groups = [fastest(file), *medians(file).values()]
        for cells, values in zip(rows.values(), groups, strict=True):
            found = values.values()
            cells += [f"{v:.2f}" for v in (statistics.geometric_mean(found), min(found))] if found else ["–"] * 2
    return markdown(" | ".join(head).split(" | "), [[title, *cells] for title, cells in rows.items()])


def ranges() -> str:
    """Return the least and largest median quotient of each engine, by machine and kind of model."""
    groups = {"the paper's models": PAPER, "transformers": NAMES}
    columns = [(file, group) for file in SUITES for group in groups]
    rows = []
    for engine, title in ENGINES.items():
        found = [[medians(file)[engine].get(model) for model in groups[group]] for file, group in columns]
        known = [[value for value in values if value is not None] for values in found]
        rows.append([title, *(f"{min(values):.2f} to {max(values):.2f}" if values else "–" for values in known)])
    return markdown(["engine's time over Korch's", *(f"{group}, {SUITES[file]}" for file, group in columns)], rows)


def suite(file: str) -> str:
    """Return the quotients of each model, with the bound's gap and the seconds of the search."""
    rows = []
    for model, row in results(file).items():
        found, report = quotients(row), row["report"]
        cells = [spread(found[engine]) if engine in found else "–" for engine in ENGINES]
        gap = "–" if report["gap"] is None else f"{100 * report['gap']:.0f} %"  # None: not all kernels were timed
        rows.append([model, *cells, gap, f"{report['seconds']:.0f} s"])
    best = fastest(file)
    for title, names in (("mean against the fastest, the paper's models", PAPER), ("the same, transformers", NAMES)):
        known = [best[name] for name in names if name in best]
        cell = f"{statistics.geometric_mean(known):.2f}, least {min(known):.2f}"
        rows.append([title, cell, *[""] * (len(ENGINES) + 1)])
    return markdown(["model", *ENGINES.values(), "gap", "search"], rows)


def busy() -> str:
    """Return the quotients of the fastest other engine beside busy processes."""
    rows = []
    for file, cpu in (("busy.json", "Xeon"), ("busy-avx512.json", "EPYC")):
        cells = defaultdict(list)
        for row in rows_of(file):
            cells[row["model"]].append(spread(against_best({"comparison": row})[1]))
        rows += [[f"{model}, {cpu}", *found] for model, found in cells.items()]
    return markdown(["fastest other engine / Korch", "alone", "1 busy process", "2 busy processes"], rows)


def quantized() -> str:
    """Return the quotients of the fastest other engine for models of few bits, by machine."""
    rows = []
    for kind, prefix in (("quantized", "int8, "), ("narrow", "")):
        files = [f"{kind}{suffix}.json" for suffix in ("", "-avx512", "-amx")]
        machines = [results(file) if (RESULTS / file).exists() else {} for file in files]
        for model in dict.fromkeys(model for machine in machines for model in machine):
            found = [against_best(machine[model]) if model in machine else ("", None) for machine in machines]
            cells = [f"{spread(times)} {engine}" if engine else "–" for engine, times in found]
            rows.append([f"{prefix}{model}", *cells])
    return markdown(["fastest other engine / Korch", "EPYC, AVX2", "EPYC, AVX-512", "Xeon with AMX"], rows)


def precision() -> str:
    """Return how much faster plans with an error budget are."""
    rows = [
        [f"{model}, {machine}", spread(row["quotients"]), f"{max(row['errors']):.1e}"]
        for machine, file in (("Xeon", "precision-amx.json"), ("EPYC", "precision-avx512.json"))
        for model, row in results(file).items()
    ]
    return markdown(["model", "float32 / with `--error 1e-2`", "largest error"], rows)


def experts() -> str:
    """Return the quotients of the fastest other engine for mixtures of experts."""
    rows = []
    for key, row in results("experts.json").items():
        name, _, tokens = key.partition("-")
        found = {
            engine: best
            for engine in ("onnxruntime", "openvino", "eager", "inductor")
            if (best := best_of(row, engine))
        }
        engine = min(found, key=lambda name: float(np.median(found[name][1])))
        form, times = found[engine]
        cell = f"{spread(times)} {ENGINES.get(engine, engine)}, {form}"
        rows.append([f"{name}, {tokens}", f"{row['chosen']} of {BLOCKS[name].experts}", cell])
    return markdown(["block, tokens", "experts", "fastest other engine / Korch"], rows)


def budgets() -> str:
    """Return the seconds that searches took, alone and beside two busy processes, by case and budget."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows_of("budget.json"):
        if not row["searches"]:
            continue
        follows = f": {row['follows_s']:.1f}" if row["follows_s"] else ""
        least = f" ({row['least_s']:.0f}{follows})" if row["least_s"] else ""
        taken = f"{row['seconds']:.1f}{least}{'' if row['is_kept'] else ' **no**'}"
        searches = f" x {row['searches']}" if row["searches"] > 1 else ""
        cells[row["model"], f"{row['budget_s']:g}{searches}"].append(taken)
    rows = [[*key, *found, "–"][:4] for key, found in cells.items()]
    return markdown(["case", "budget, s", "alone, s (least: followed)", "beside two, s"], rows)


def operators() -> str:
    """Return ONNX Runtime's quotients of single operators, by kind: the least, the median and the greatest."""
    kinds = defaultdict(list)
    for name, row in results("operators.json").items():
        kinds[name.partition(" ")[0]].append(float(np.median(quotients(row)["onnxruntime"])))
    rows = [[kind, f"{len(q)}", *(f"{n:.2f}" for n in np.percentile(q, [0, 50, 100]))] for kind, q in kinds.items()]
    return markdown(["operator", "sizes", "least", "median", "greatest"], rows)


PAPER_TABLE_2 = {
    "candy": (184, 1031, 5.5),
    "efficientvit": (380, 2174, 11.5),
    "yolox": (367, 3361, 2.8),
    "yolov4": (569, 4644, 12.2),
    "segformer": (672, 11400, 9.2),
}
"""The paper's numbers of primitives and candidates, and its hours."""


def candidates() -> str:
    """Return the numbers of primitives and candidates of the paper's models, and those of the paper."""
    head = ["model", "primitives", "groups", "candidates", "seconds", "the paper: primitives", "candidates", "hours"]
    rows = []
    for model, row in results("paper-candidates.json").items():
        own = [f"{row[key]:,}" for key in ("primitives", "groups", "candidates")]
        primitives, count, hours = PAPER_TABLE_2[model]
        rows.append([model, *own, f"{row['seconds']:.0f}", f"{primitives:,}", f"{count:,}", f"{hours}"])
    return markdown(head, rows)


GIVEN = ("onnxruntime", "openvino", "inductor")
"""The engines of the experiments that repeat the paper's."""


def by_primitives(row: dict[str, Any]) -> dict[str, Any]:
    """Return by engine the times for a model, divided by those for its primitives, of all rounds."""
    times = {own["name"]: np.array(own["times_ns"]) for own in row["rows"]}
    both = {engine: (times.get(engine), times.get(f"{engine}, primitives")) for engine in GIVEN}
    return {engine: a / b for engine, (a, b) in both.items() if a is not None and b is not None}


def fission() -> str:
    """Return the times of engines for models, divided by those for the models' primitives."""
    rows = []
    for model, row in results("paper-fission.json").items():
        found = by_primitives(row)
        rows.append([model, *(spread(found[engine]) if engine in found else "–" for engine in GIVEN)])
    return markdown(["model / its primitives", *map(ENGINES.__getitem__, GIVEN)], rows)


PLANS = ("split", "by-rules", "once")
"""The plans with which the searched plan is compared."""


def plan_cells(row: dict[str, Any]) -> list[str]:
    """Return the times of other plans divided by that of the searched plan, or why there are none."""
    plans = {plan["plan"]: plan for plan in row["plans"]}
    searched_ms = plans["searched"]["measured_ms"]

    def cell(name: str) -> str:
        plan = plans.get(name, {"measured_ms": None, "refusal": "no plan"})
        if plan["measured_ms"] is not None:
            return f"{plan['measured_ms'] / searched_ms:.2f}"
        return "the same" if "has the kernels of plan 'searched'" in plan["refusal"] else "not built"

    return [cell(name) for name in PLANS]


def blocks() -> str:
    """Return the times of the best other engine and of other plans, divided by those of the searched plan."""
    rows = []
    for name, row in results("paper-blocks.json").items():
        engine, times = against_best(row)
        kernels = sum(kernel["cost_ns"] > 0 for kernel in row["kernels"])
        label = name.replace("the same", "resize x4, concat")
        rows.append([label, str(kernels), f"{spread(times)} {engine}", *plan_cells(row)])
    head = ["block", "kernels", "best other engine / Korch", *(f"{plan} / searched" for plan in PLANS)]
    return markdown(head, rows)


RULES = "by-rules"
"""The name of the plan whose groups ONNX Runtime or Inductor could fuse."""

AGAIN = "searched-again"
"""The name of the plan of a search that had as much time as that of the plan by rules."""

PAPER_FIGURE_6 = {
    "candy": ("2.7, 1.8", "1.5, 1.1"),
    "efficientvit": ("1.5, 1.6", "1.4, 1.1"),
    "yolox": ("10.9, 7.0", "1.5, 1.6"),
    "yolov4": ("2.9, 2.9", "1.3, 1.3"),
    "segformer": ("3.0, 2.0", "1.8, 1.4"),
}
"""The paper's times of PyTorch and of TensorRT over Korch's, on a V100 and on an A100."""


def whole() -> str:
    """Return the times of engines and of a plan by rules, divided by those of the searched plan, and the paper's."""
    rows = []
    for name, row in results("paper-whole.json").items():
        found = quotients(row)
        if AGAIN in found:
            found[RULES] = [a / b for a, b in zip(found[RULES], found[AGAIN], strict=True)]
        cells = [spread(found[engine]) if engine in found else "–" for engine in (*GIVEN, RULES)]
        model, _, images = name.partition(" of ")
        rows.append([name, *cells, *(PAPER_FIGURE_6[model] if images == "1 image" else ("–", "–"))])
    head = ["times / Korch's", *map(ENGINES.__getitem__, GIVEN), "plan by rules", "paper: PyTorch", "paper: TensorRT"]
    return markdown(head, rows)


def models() -> str:
    """Return the verdicts on models of PyTorch's benchmark runners, and the times of other engines over Korch's."""
    with (RESULTS / "models.jsonl").open() as lines:
        return table([json.loads(line) for line in lines], list(OF_MODELS))


def early(file: str) -> str:
    """Return how fast plans of short searches are: than other engines, and than plans of longer searches."""
    rows, labels = [], list[str]()
    for model, row in results(file).items():
        times = {r["name"]: np.array(r["times_ns"], float) for r in row["comparison"]["rows"]}
        others = [times.pop(engine) for engine in ("onnxruntime", "openvino")]
        best, labels = min(others, key=np.median), [label for label in ("10", "30", "100") if label in times]
        rows.append(
            [
                model,
                f"{row['searches']['10']['taken_s']:.0f}",
                *(spread(best / times[label]) for label in labels),
                *(spread(times["100"] / times[label]) for label in labels[:-1]),
                *(str(row["searches"][label]["timed_kernels"]) for label in labels[1:]),
            ]
        )
    plans = ["first plan", *(f"{label} s" for label in labels[1:])]
    head = ["model", "first plan, s", *(f"engine / {plan}" for plan in plans)]
    head += [f"100 s / {plan}" for plan in plans[:-1]]
    return markdown([*head, *(f"kernels timed in {plan}" for plan in plans[1:])], rows)


TABLES: dict[str, Callable[[], str]] = {
    "early, Zen 4": lambda: early("early.json"),
    "early, Zen 3": lambda: early("early-avx2.json"),
    "summary": summary,
    "ranges": ranges,
    "suite, Xeon": lambda: suite("suite.json"),
    "suite, EPYC": lambda: suite("suite-avx512.json"),
    "suite, AVX2": lambda: suite("suite-avx2.json"),
    "busy": busy,
    "quantized": quantized,
    "precision": precision,
    "experts": experts,
    "budgets": budgets,
    "operators": operators,
    "candidates": candidates,
    "fission": fission,
    "blocks": blocks,
    "whole": whole,
    "models": models,
}


def with_figures(text: str) -> str:
    """Return the text of a page with its tables made again from the results.

    Raises:
        KeyError: a comment names a table that does not exist.
    """
    pattern = r"<!-- table: (.*) -->\n+(?:\|.*\n)*\n*"
    return re.sub(pattern, lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n", text)


def main() -> None:
    """Update all pages."""
    for path in PAGES:
        text = path.read_text("utf-8")
        if (made := with_figures(text)) != text:
            path.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
