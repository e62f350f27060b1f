"""The figures in the documentation are those of the files of results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.figures import MACHINES, results, with_figures
from benchmarks.suite import table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "tables"), [("README.md", 2), ("docs/comparison.md", 1)])
def test_the_tables_are_those_of_the_results(name: str, tables: int) -> None:
    text = (ROOT / name).read_text()
    assert text == with_figures(name, text), "run python -m benchmarks.figures"
    changed = re.sub(r"\b1\.\d\d\b", "9.99", text)
    restored = with_figures(name, changed)
    assert sum("9.99" in row for row in changed.splitlines() if row.startswith("| ")) > tables
    assert not [row for row in restored.splitlines() if row.startswith("| ") and "9.99" in row]


@pytest.mark.parametrize("file", MACHINES)
def test_the_means_of_the_readme_are_those_of_the_results(file: str) -> None:
    text = (ROOT / "README.md").read_text()
    means = re.findall(r": ([\d.]+x) \(geometric mean; least ([\d.]+x)\)", table(results(file)))
    assert len(means) == 2
    for mean, least in means:
        assert re.search(rf"{re.escape(mean)}[^.]*\(least {re.escape(least)}\)", text)
