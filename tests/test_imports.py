"""Imports point left along the data's way, so that a stage can be read without the next."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "korch"
ORDER = (
    ("errors", "libraries"), ("options", "target"), ("primitive",),
    ("frontend", "fission", "equivalence"), ("candidate",), ("tile",), ("provider",), ("measure",),
    ("orchestrate",), ("runtime",), ("contest", "report"), ("pipeline",), ("api", "cli"),
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
LATE = {("report", "pipeline"), ("report", "api")}
"""A comparison may optimize its subject first; it does so by a late import."""


def imports_of(text: str) -> set[str]:
    """Return the parts of korch that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("korch."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("korch.")}
    return found


def test_imports_point_left() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own in ("__init__", "testing"):
            continue
        wrong += [
            f"{path.relative_to(SOURCE)} imports {part}"
            for part in imports_of(path.read_text())
            if part in RANK and RANK[part] > RANK[own] and (own, part) not in LATE
        ]
    assert wrong == []


def test_the_test_can_say_no() -> None:
    assert imports_of("from korch.cli import main\nimport korch.tile.cpp\n") == {"cli", "tile"}
    assert RANK["primitive"] < RANK["tile"] < RANK["cli"]
