"""The documentation is true: its examples run, its links lead somewhere, its lists are whole."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest

import korch
from korch.candidate.candidate import Refusal, make_group
from korch.cli import _parser
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType
from korch.provider.provider import load_providers
from korch.testing.kernels import check_offers

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", page.read_text())
    made = {"benchmarks/results/suite.json"}
    assert [name for name in named if name not in made and not (ROOT / name).exists()] == []


def test_the_house_has_all_its_rooms() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "korch"
    rooms = [folder.parent.name for folder in source.glob("*/__init__.py")]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"^korch (\w+)", text, re.MULTILINE))
    usage = _parser().format_help()
    assert {"optimize", "run", "bench", "explain", "doctor"} <= shown
    assert [name for name in shown if not re.search(rf"^ +{name}\b", usage, re.MULTILINE)] == []


def test_the_example_of_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path
) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert 5 <= len(example.strip().splitlines()) <= 12
    kind, shape = onnx.TensorProto.FLOAT, [1, 3, 224, 224]  # Candy's interface, a lesser model
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["input"], ["output"])], "g",
        [onnx.helper.make_tensor_value_info("input", kind, shape)],
        [onnx.helper.make_tensor_value_info("output", kind, shape)],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    (tmp_path / "candy.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KORCH_CACHE", str(cache_folder))
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert isinstance(names["exe"], korch.Executable)
    assert np.array_equal(names["outputs"][0], np.zeros(shape, np.float32))  # type: ignore[index]


def test_the_provider_of_the_documentation_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target, builder, rng
) -> None:
    page = ROOT / "docs" / "add-a-provider.md"
    points = tomllib.loads(blocks(page, "toml")[0])["project"]["entry-points"]["korch.providers"]
    (tmp_path / "my_package.py").write_text(blocks(page, "python")[0])
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[korch.providers]", *lines]) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    try:
        (provider,) = load_providers()
    finally:
        sys.modules.pop("my_package", None)
    assert provider.name == "negate"
    groups = [group_of("neg", "f32[3,5]"), group_of("neg", "f32[0,2]"), group_of("neg", "f32[]")]
    check_offers(provider, groups, target, builder, rng)
    check_offers(provider, groups, target, builder, rng, specials=True)
    assert provider.offer(group_of("neg", "i32[3]"), target) == Refusal("it is not float32")
    refused = provider.offer(group_of("abs", "f32[3]"), target)
    assert refused == Refusal("it is not a lone negation")


def group_of(op: str, type_: str):
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse(type_))
    builder.output("y", builder.add(op, [x]))
    return make_group(builder.freeze(), [0], [1])


def test_the_operator_of_the_documentation_is_the_one_in_the_source() -> None:
    source = (ROOT / "src" / "korch" / "fission" / "activation.py").read_text()
    function, line = blocks(ROOT / "docs" / "add-an-operator.md", "python")
    assert function in source and line.strip() in source
