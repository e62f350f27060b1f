"""Documentation, docstrings, comments and messages avoid the words that the glossary rejects."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "korch"
# Parts of src/korch whose texts still have such words. A part that has none any more leaves the list.
NOT_CLEAN_YET: set[str] = set()


@cache
def rejected(gap: str = r"\s+(?:\S+\s+){0,4}") -> re.Pattern[str]:
    """Return a pattern of the left column of the glossary's table of words, with what "..." stands for."""
    table = (ROOT / "docs" / "glossary.md").read_text("utf-8").partition("## Words to avoid")[2]
    cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:]
    terms = [term for cell in cells for term in cell.split(", ")]
    patterns = [
        gap.join(r"\s+".join(map(re.escape, part.split())) + r"(?:s|d|es|ed|ing)?" for part in term.split("..."))
        for term in terms
    ]
    return re.compile(r"\b(?:" + "|".join(patterns) + r")\b", re.IGNORECASE)


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment, and of each string that has more than one word."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_string = token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
        if token.type == tokenize.COMMENT or (is_string and " " in token.string.strip()):
            yield token.start[0], without_code(token.string)


def texts_of_cpp(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment."""
    for match in re.finditer(r"//.*|/\*.*?\*/", source, re.DOTALL if "/*" in source else 0):
        for number, line in enumerate(match[0].split("\n")):
            if number == 0 or match[0].startswith("/*"):
                yield source[: match.start()].count("\n") + 1 + number, line


def without_code(text: str) -> str:
    """Return text in which code between backticks is empty."""
    return re.sub(r"`[^`\n]*`", "``", text)


def text_of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield the text of a page with empty lines for its blocks of code."""
    text = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), source, flags=re.DOTALL)
    yield 1, without_code(re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def found_in(path: Path) -> list[str]:
    """Return the rejected words of a file, each with its line."""
    source = path.read_text("utf-8")
    if not rejected(r"\s(?s:.*)").search(source):
        return []  # as in most files, whose code need not be told from text
    texts = {".py": texts_of_python, ".h": texts_of_cpp, ".md": text_of_page}[path.suffix]
    return [
        f"{path.relative_to(ROOT)}:{line + text[: match.start()].count(chr(10))}: {match[0]!r}"
        for line, text in texts(source)
        for match in rejected().finditer(text)
    ]


def part_of(path: Path) -> str:
    """Return the folder of a source within src/korch, or its name if it lies in none."""
    return path.relative_to(SOURCE).parts[0]


SOURCES = [path for path in sorted(SOURCE.rglob("*")) if path.suffix in {".py", ".h"}]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("part", sorted({part_of(path) for path in SOURCES}))
def test_sources_avoid_rejected_words(part: str) -> None:
    found = [line for path in SOURCES if part_of(path) == part for line in found_in(path)]
    if part in NOT_CLEAN_YET:
        assert found != [], f"{part} is clean now: remove it from NOT_CLEAN_YET"
    else:
        assert found == [], "see docs/glossary.md"


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_benchmarks_and_tests_avoid_rejected_words(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    assert [line for path in paths for line in found_in(path)] == [], "see docs/glossary.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_avoid_rejected_words(page: Path) -> None:
    if page.name != "glossary.md":
        assert found_in(page) == [], "see docs/glossary.md"


@pytest.mark.parametrize(
    "text", ["the house", "Two crowds.", "we hold this plan against that one", "which is thought\nto be fast"]
)
def test_rejected_words_are_found(text: str) -> None:
    assert rejected().search(text)


@pytest.mark.parametrize("text", ["storyboard", "compare this with that", "a cycle", "`heart`"])
def test_other_words_are_accepted(text: str) -> None:
    assert not rejected().search(without_code(text))
