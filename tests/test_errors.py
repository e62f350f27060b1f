"""Texts of other software in messages."""

import pytest

from korch.errors import excerpt


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (ValueError("it fails\n  here"), "it fails here"),
        (ValueError(), "ValueError"),
        ("one two three, four", "one two ..."),
        ("one two three", "one two three"),
    ],
)
def test_a_foreign_text_is_one_line_and_ends_at_a_word(said: object, shown: str) -> None:
    assert excerpt(said, 15) == shown
