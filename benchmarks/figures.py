"""Write the tables of measured figures in README.md and docs/comparison.md anew.

    python -m benchmarks.figures

They come from the files in `benchmarks/results`; a test fails where they differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import PAPER
from benchmarks.models.transformers import NAMES
from benchmarks.suite import quotients, table

ROOT = Path(__file__).parent.parent
MACHINES = {"suite.json": "matrix units", "suite-avx512.json": "AVX-512"}
GROUPS = {"five models of the paper": PAPER, "four transformers": NAMES}
ENGINES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "inductor": "Inductor", "iree": "IREE"}


def results(file: str) -> dict[str, Any]:
    """Return the models of a file of results."""
    models: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / file).read_text())["models"]
    return models


def suite_table(file: str) -> str:
    """Return the README's table of one machine."""
    return table(results(file)).partition("\n\n")[0] + "\n"


def ranges() -> str:
    """Return the comparison's table: each engine's least and largest median quotient."""
    columns = [(file, group) for file in MACHINES for group in GROUPS]
    head = (f"{group}, {MACHINES[file]}" for file, group in columns)
    lines = [f"| engine's time over Korch's | {' | '.join(head)} |", "|---|" + "---:|" * len(columns)]
    for engine, title in ENGINES.items():
        cells = []
        for file, group in columns:
            rows = results(file)
            found = [quotients(rows[model]) for model in GROUPS[group] if model in rows]
            medians = [float(np.median(q[engine])) for q in found if engine in q]
            cells.append(f"{min(medians):.2f} to {max(medians):.2f}" if medians else "–")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_figures(name: str, text: str) -> str:
    """Return a page's text with its tables as the results have them.

    Args:
        name: of the page: "README.md" or "docs/comparison.md".
        text: of the page.
    """
    if name == "README.md":
        tables = [suite_table(file) for file in MACHINES]
        pattern = r"^\| model \| onnxruntime(?:.*\n)(?:\|.*\n)+"
    else:
        tables, pattern = [ranges()], r"^\| engine's time over (?:.*\n)(?:\|.*\n)+"
    return re.sub(pattern, lambda _: tables.pop(0), text, flags=re.MULTILINE)


def main() -> None:
    """Write the pages."""
    for name in ("README.md", "docs/comparison.md"):
        path = ROOT / name
        path.write_text(with_figures(name, path.read_text()))


if __name__ == "__main__":
    main()
