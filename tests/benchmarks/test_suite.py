"""The suite: by default it runs all engines that the file of results has."""

import json
from pathlib import Path
from typing import Any

from benchmarks import suite
from korch.errors import MeasureError

RESULTS = Path(suite.__file__).parent / "results" / "suite.json"


def test_engines_of_the_kept_results_are_compared_by_default() -> None:
    models = json.loads(RESULTS.read_text("utf-8"))["models"].values()
    kept = {row["name"] for model in models for row in model["comparison"]["rows"]}
    assert kept - {"korch"} == set(suite.AGAINST.split(","))


def test_an_engine_that_is_not_installed_is_left_out(monkeypatch, capsys) -> None:
    asked = []

    class Peer:
        def __init__(self, name: str) -> None:
            self.name = name

        def is_available(self) -> str | None:
            return "not installed" if self.name == "benchmarks.peers:IREE" else None

    def in_process(measure, name, against, *rest):
        asked.append(against)
        raise MeasureError("no engine", where=name)

    monkeypatch.setattr(suite, "get_peer", Peer)
    monkeypatch.setattr(suite, "in_process", in_process)
    monkeypatch.setattr("sys.argv", ["suite", "--models", "candy"])
    assert suite.main() == 1
    assert asked == [["onnxruntime", "openvino", "inductor"]]
    assert "without iree: not installed" in capsys.readouterr().out


def test_a_model_that_fails_leaves_the_others(monkeypatch, capsys, tmp_path) -> None:
    rows = {"bert": {"comparison": {"rows": []}}}
    monkeypatch.setattr(suite, "in_process", lambda measure, name, *rest: rows[name])
    written = tmp_path / "suite.json"
    monkeypatch.setattr("sys.argv", ["suite", "--models", "candy,bert", "--output", str(written)])
    assert suite.main() == 1
    assert json.loads(written.read_text("utf-8"))["models"] == rows
    found = capsys.readouterr()
    assert "candy failed" in found.out and "candy: KeyError" in found.err


def test_other_results_than_those_of_onnx_runtime_fail() -> None:
    def row(error: float | None) -> dict[str, Any]:
        return {"comparison": {"rows": [{"name": "onnxruntime", "max_error": error}]}}

    assert [suite.differs(row(error)) for error in (1e-6, 0.1, None)] == [False, True, True]
