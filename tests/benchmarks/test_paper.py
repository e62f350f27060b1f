"""The experiments of the paper: blocks have the paper's shapes, and rows that are known are not measured again."""

import json
from pathlib import Path

import pytest

from benchmarks import paper
from korch.fission import fission
from korch.frontend import load_model


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("norm, ReLU, pad", {"max": 1, "pad": 1}),
        ("resize x4, concat", {"concat": 1, "add": 4}),
        ("linear attention, 2048²", {"matmul": 2, "conv": 4}),
        ("softmax attention", {"matmul": 2, "exp": 1}),
    ],
)
def test_a_block_has_the_operations_of_its_figure(name: str, operators: dict[str, int]) -> None:
    graph = fission(load_model(paper.BLOCKS[name]()))
    counts = {op: sum(p.op == op for p in graph.primitives) for op in operators}
    assert all(counts[op] >= count for op, count in operators.items()), counts
    assert graph.outputs[0][0] == "output"


def test_a_row_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str, args: object, folder: Path) -> dict[str, object]:
        made.append(name)
        return {"seconds": 1.0}

    monkeypatch.setattr(paper, "EXPERIMENTS", {"candidates": (make, ("candy", "yolox", "yolov4"))})
    path = tmp_path / "rows.json"
    for models in ("candy", "candy,yolo"):
        arguments = ["paper", "candidates", "--models", models, "--output", str(path)]
        monkeypatch.setattr("sys.argv", arguments)
        assert paper.main() == 0
    assert made == ["candy", "yolox", "yolov4"] and json.loads(path.read_text())["models"].keys() == {*made}
