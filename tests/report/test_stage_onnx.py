"""The primitives of a model and the candidates for its kernels, written as ONNX by the command line."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.models import PAPER, build
from korch.binary_program.candidate_file import parse_candidates
from korch.cli import main
from korch.report.stage_onnx import INDEX


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


MODELS: dict[str, dict[str, int]] = {
    name: {} for name in ("mlp", "tiny_transformer", *(f"tiny_{name}" for name in PAPER))
}
MODELS["mobilenetv3"] = {"size": 32}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_primitives(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = build(name, **MODELS[name]), tmp_path / "primitives.onnx"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert main(["fission", str(tmp_path / "model.onnx"), "-o", str(path)]) == 0
    assert "primitives" in capsys.readouterr().out
    runner, own = session(onnx.load(path)), session(model)
    (given,) = own.get_inputs()
    feeds = {given.name: np.random.default_rng(0).standard_normal(given.shape).astype(np.float32)}
    for found, right in zip(runner.run(None, feeds), own.run(None, feeds), strict=True):
        assert np.abs(found - right).max() <= 1e-4 * np.abs(right).max()
    assert all(node.doc_string for node in onnx.load(path).graph.node if node.op_type in ("Conv", "MatMul"))


def test_candidates_with_their_costs(tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlp.onnx").write_bytes(build("mlp").SerializeToString())
    (tmp_path / "out").mkdir()
    arguments = ["candidates", str(tmp_path / "mlp.onnx"), "--onnx", str(tmp_path / "out")]
    assert main([*arguments, "--cache-folder", str(cache_folder)]) == 0
    path = tmp_path / "out" / INDEX
    (file,) = parse_candidates(path.read_text(), "it")
    rows = file.candidates
    assert f"{len(rows)} candidates" in capsys.readouterr().out
    assert all(row.cost_ns > 0 and row.kernel for row in rows)
    for name in {row.model for row in rows if row.primitives}:
        assert session(onnx.load(tmp_path / "out" / name)).get_outputs()
    assert main(["orchestrate", str(path)]) == 0
    head, *ids = capsys.readouterr().out.splitlines()
    assert head.startswith("plan optimal objective=") and {*ids} <= {row.id for row in rows}
