"""The page of operators is up to date and agrees with fission."""

from collections import Counter
from pathlib import Path

from tests.support.operators_page import format_page, supported_operators

PAGE = Path(__file__).parent.parent.parent / "docs" / "operators.md"


def test_the_page_is_up_to_date() -> None:
    found = format_page(supported_operators())
    assert PAGE.read_text("utf-8") == found, "python -m tests.support.operators_page > docs/operators.md"


def test_at_least_120_operators_are_split() -> None:
    ways = Counter(row.way for row in supported_operators())
    assert ways["fission"] + ways["definition"] >= 120


def test_each_operator_stands_once() -> None:
    names = [(row.domain, row.name) for row in supported_operators()]
    assert len(names) == len(set(names))
