"""The primitives of a model and the candidates for its kernels, written as ONNX by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.models import build
from korch.cli import main
from korch.report.stage_onnx import INDEX


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_a_model_as_primitives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = build("mlp"), tmp_path / "primitives.onnx"
    (tmp_path / "mlp.onnx").write_bytes(model.SerializeToString())
    assert main(["fission", str(tmp_path / "mlp.onnx"), "-o", str(path)]) == 0
    assert "primitives" in capsys.readouterr().out
    runner, own = session(onnx.load(path)), session(model)
    (given,) = own.get_inputs()
    feeds = {given.name: np.random.default_rng(0).standard_normal(given.shape).astype(np.float32)}
    np.testing.assert_allclose(runner.run(None, feeds)[0], own.run(None, feeds)[0], rtol=1e-5, atol=1e-6)
    assert all(node.doc_string for node in onnx.load(path).graph.node if node.op_type == "MatMul")


def test_candidates_with_their_costs(tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlp.onnx").write_bytes(build("mlp").SerializeToString())
    (tmp_path / "out").mkdir()
    arguments = ["candidates", str(tmp_path / "mlp.onnx"), "--onnx", str(tmp_path / "out")]
    assert main([*arguments, "--cache-folder", str(cache_folder)]) == 0
    rows = json.loads((tmp_path / "out" / INDEX).read_text())
    assert f"{len(rows)} candidates" in capsys.readouterr().out
    assert all(row["cost_ns"] > 0 and row["provider"] for row in rows)
    for name in {row["model"] for row in rows if row["primitives"]}:
        assert session(onnx.load(tmp_path / "out" / name)).get_outputs()
