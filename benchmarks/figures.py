"""Update the tables of measured figures in README.md and the documentation.

    python -m benchmarks.figures

The figures come from the files in `benchmarks/results`; a test fails if a table differs from them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import PAPER
from benchmarks.models.transformers import NAMES
from benchmarks.suite import quotients, table

ROOT = Path(__file__).parent.parent
MACHINES = {"suite.json": "matrix units", "suite-avx512.json": "AVX-512"}
CPUS = {"suite.json": "Xeon with AMX", "suite-avx512.json": "EPYC"}
GROUPS = {"five models of the paper": PAPER, "four transformers": NAMES}
ENGINES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "inductor": "Inductor", "iree": "IREE"}


def results(file: str) -> dict[str, Any]:
    """Return the rows of a file in `benchmarks/results`, by model."""
    models: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / file).read_text("utf-8"))["models"]
    return models


def suite_table(file: str) -> str:
    """Return the table of all models from one file, which has the results of one machine."""
    return table(results(file)).partition("\n\n")[0] + "\n"


def medians(file: str) -> dict[str, dict[str, float]]:
    """Return by engine and model the median of the engine's time divided by Korch's."""
    found: dict[str, dict[str, float]] = {engine: {} for engine in ENGINES}
    for model, row in results(file).items():
        for engine, times in quotients(row).items():
            found[engine][model] = float(np.median(times))
    return found


def summary() -> str:
    """Return the table of the README: mean, least and largest quotient of each engine on each machine."""
    head = " | ".join(f"{cpu}: mean | worst | best" for cpu in CPUS.values())
    lines = [f"| engine's time / Korch's | {head} |", "|---|" + "---:|" * (3 * len(CPUS))]
    rows: dict[str, list[str]] = {title: [] for title in ("fastest of these", *ENGINES.values())}
    for file in CPUS:
        found = medians(file)
        models = {model for values in found.values() for model in values}
        fastest = [min(v[model] for v in found.values() if model in v) for model in models]
        groups = [fastest, *(list(found[engine].values()) for engine in ENGINES)]
        for cells, values in zip(rows.values(), groups, strict=True):
            cells += [f"{v:.2f}" for v in (statistics.geometric_mean(values), min(values), max(values))]
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()]
    return "\n".join(lines) + "\n"


def ranges() -> str:
    """Return the table of `docs/comparison.md`: the least and largest median quotient of each engine."""
    columns = [(file, group) for file in MACHINES for group in GROUPS]
    head = (f"{group}, {MACHINES[file]}" for file, group in columns)
    lines = [f"| engine's time over Korch's | {' | '.join(head)} |", "|---|" + "---:|" * len(columns)]
    for engine, title in ENGINES.items():
        cells = []
        for file, group in columns:
            rows = medians(file)[engine]
            values = [rows[model] for model in GROUPS[group] if model in rows]
            cells.append(f"{min(values):.2f} to {max(values):.2f}" if values else "–")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "README.md": (r"engine's time / ", lambda: [summary()]),
    "docs/benchmarks.md": (r"model \| onnxruntime", lambda: [suite_table(file) for file in MACHINES]),
    "docs/comparison.md": (r"engine's time over ", lambda: [ranges()]),
}


def with_figures(name: str, text: str) -> str:
    """Return the text of a page with its tables regenerated from the results.

    Args:
        name: the page, a key of `PAGES`.
        text: the text of the page.
    """
    start, make = PAGES[name]
    tables = make()
    return re.sub(rf"^\| {start}(?:.*\n)(?:\|.*\n)+", lambda _: tables.pop(0), text, flags=re.MULTILINE)


def main() -> None:
    """Update all pages of `PAGES`."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_figures(name, path.read_text("utf-8")))


if __name__ == "__main__":
    main()
