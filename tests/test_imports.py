"""Modules import only earlier stages of the pipeline, so that a stage can be read without later stages."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "korch"
ORDER = (
    ("errors", "records", "system"),
    ("ablation", "inputs", "limits"),
    ("options", "target"),
    ("primitive",),
    ("numerics",),
    ("frontend", "fission", "ranges", "equivalence"),
    ("candidate",),
    ("tile.ir",),
    ("tile.check", "tile.lower"),
    ("tile.analysis",),
    ("tile.triton",),
    ("tile.llvm",),
    ("cuda",),
    ("schedule",),
    ("provider",),
    ("costs",),
    ("measure",),
    ("cuda.measure",),
    ("binary_program",),
    ("search",),
    ("report.alternatives",),
    ("segments",),
    ("events",),
    ("runtime",),
    ("cuda.runtime",),
    ("validation", "report"),
    ("backend",),
    ("superopt",),
    ("pipeline",),
    ("host",),
    ("pytorch",),
    ("api", "cli", "loading"),
    ("torch_backend",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def part_of(module: str) -> str:
    """Return the part of a module within korch: a folder, a folder in it that has a rank of its own, or a file."""
    folder, _, rest = module.partition(".")
    inner = f"{folder}.{rest.partition('.')[0]}"
    return inner if inner in RANK else folder


@cache
def parsed(path: Path) -> tuple[set[str], list[str]]:
    """Return the parts of korch that a source imports, and its public classes."""
    tree = ast.parse(path.read_text("utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return imports_of(tree), classes


def imports_of(tree: ast.Module) -> set[str]:
    """Return the parts of korch that a source imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "korch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("korch.")}
    return {part_of(name.removeprefix("korch.")) for name in found}


def wrong_imports(own: str, imported: set[str]) -> set[str]:
    """Return the parts that a source of the part `own` may not import."""
    return {part for part in imported & RANK.keys() if RANK[part] > RANK[own]}


def test_imports_point_left() -> None:
    wrong, parts = {}, set()
    for path in SOURCE.rglob("*.py"):
        own = part_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))
        if own in ("__init__", "testing", "tile"):
            continue
        parts.add(own)
        if found := wrong_imports(own, parsed(path)[0]):
            wrong[str(path.relative_to(SOURCE))] = found
    assert wrong == {}
    assert parts == RANK.keys()


@pytest.mark.parametrize(
    ("own", "text", "wrong"),
    [
        ("tile.lower", "from korch.provider.provider import Kernel", {"provider"}),
        ("primitive", "def f():\n    import korch.cli, korch.errors", {"cli"}),
        ("measure", "from korch import api, options", {"api"}),
        ("cuda", "from korch.cuda.measure.meter import CudaMeter", {"cuda.measure"}),
        ("report", "from korch.pipeline import optimize_model", {"pipeline"}),
        ("provider", "from korch.tile.llvm.print import emit\nimport numpy", set()),
    ],
)
def test_what_points_right_is_seen(own: str, text: str, wrong: set[str]) -> None:
    assert wrong_imports(own, imports_of(ast.parse(text))) == wrong


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in parsed(path)[1]:
            places.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
