"""The figures in the documentation are equal to those in the files of results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import MACHINES, PAGES, results, with_figures
from benchmarks.suite import table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "tables"), [("README.md", 1), ("docs/benchmarks.md", 2), ("docs/comparison.md", 1)])
def test_the_tables_are_those_of_the_results(name: str, tables: int) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert text == with_figures(name, text), "run python -m benchmarks.figures"
    made = PAGES[name][1]()
    assert len(made) == tables
    changed = re.sub(r"\b1\.\d\d\b", "9.99", text)
    assert not [table for table in made if table in changed]
    assert not [table for table in made if table not in with_figures(name, changed)]


@pytest.mark.parametrize("file", MACHINES)
def test_the_means_are_those_of_the_results(file: str) -> None:
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    means = re.findall(r": ([\d.]+x) \(geometric mean; least ([\d.]+x)\)", table(results(file)))
    assert len(means) == 2
    for mean, least in means:
        assert re.search(rf"{re.escape(mean)}[^.]*\(least {re.escape(least)}\)", text)
