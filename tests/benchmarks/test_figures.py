"""The figures in the documentation are equal to those in the files of results."""

import re
from pathlib import Path

import pytest

from benchmarks.figures import PAGES, TABLES, with_figures

NAMES = {path: re.findall("<!-- table: (.*) -->", path.read_text("utf-8")) for path in PAGES}


@pytest.mark.parametrize("path", [path for path, names in NAMES.items() if names], ids=lambda path: path.name)
def test_the_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text == with_figures(text), "run python -m benchmarks.figures"
    changed = re.sub(r"\b(1\.\d\d|\d,\d\d\d)\b", "9.99", text)
    assert changed != text
    assert [TABLES[name]() in with_figures(changed) for name in NAMES[path]] == [True] * len(NAMES[path])


def test_each_table_is_on_one_page() -> None:
    assert sorted(name for names in NAMES.values() for name in names) == sorted(TABLES)
