"""The command line: exit codes, one-line errors, JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.models import build

from korch.cli import main, parse_shapes
from korch.errors import OptionError

QUICK = ("--budget", "1", "--gap", "0.9", "--max-primitives", "6")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("korch-cli")
    (made / "mlp.onnx").write_bytes(build("mlp").SerializeToString())
    return made


@pytest.fixture(scope="session")
def artifact(folder: Path) -> Path:
    path = folder / "mlp.korch"
    arguments = ["optimize", str(folder / "mlp.onnx"), "-o", str(path), *QUICK,
                 "--cache-folder", str(folder / "cache")]  # fmt: skip
    assert main(arguments) == 0
    return path


def test_optimize_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["optimize", str(folder / "mlp.onnx"), "-o", str(folder / "b.korch"), "--json",
                 *QUICK, "--cache-folder", str(folder / "cache")]  # fmt: skip
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    wanted = {"artifact", "status", "predicted_ms", "measured_ms", "lower_bound_ms", "gap",
              "primitives", "alternatives", "candidates", "measured_candidates", "kernels",
              "arena_bytes", "max_error", "seconds"}  # fmt: skip
    assert wanted <= report.keys()
    assert Path(report["artifact"]).is_file()


def test_run_and_explain(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.npz"
    assert main(["run", str(artifact), "--random", "--output", str(out), "--repeat", "3"]) == 0
    assert "3 runs: median" in capsys.readouterr().out
    assert np.isfinite(np.load(out)["output"]).all()
    assert main(["explain", str(artifact)]) == 0
    text = capsys.readouterr().out
    assert "x bound" in text and "whole plans, timed in turn" in text and "matmul" in text
    assert main(["explain", str(artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]


def test_bench(artifact: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    arguments = ["bench", str(artifact), "--against", "onnxruntime", "--rounds", "2", "--json",
                 "--model", str(folder / "mlp.onnx")]  # fmt: skip
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["korch", "onnxruntime"]
    assert found["speedup_over_best"] > 0
    assert max(row["max_error"] for row in found["rows"]) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "MISSING.onnx", "-o", "x.korch"], "MISSING.onnx"),
        (["optimize", "{folder}/text.onnx", "-o", "{folder}/x.korch"], "text.onnx"),
        (["optimize", "{folder}/mlp.onnx", "-o", "/nowhere/x.korch"],
         "option --output: the folder of /nowhere/x.korch does not exist. Create it first"),
        (["optimize", "{folder}/mlp.onnx", "-o", "{folder}/x.korch", "--shape", "input"],
         "option --shape: can't read 'input'; expected NAME=1x3x224x224"),
        (["run", "{folder}/text.onnx", "--random"], "text.onnx"),
        (["run", "{artifact}", "--input", "input"], "option --input: can't read 'input'"),
        (["run", "{artifact}", "--input", "input={folder}/mlp.onnx"], "expected a .npy file"),
        (["run", "{artifact}"], "input 'input' is missing"),
        (["bench", "{artifact}", "--against", "nobody"], "nobody"),
        (["bench", "{artifact}", "--rounds", "0"], "option --rounds: the value 0 is too small"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    arguments: list[str], message: str, folder: Path, artifact: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder / "text.onnx").write_text("this is neither a model nor an artifact")
    filled = [a.format(folder=folder, artifact=artifact) for a in arguments]
    assert main(filled) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("korch: ")
    assert "Traceback" not in error and len(error.strip().splitlines()) == 1


def test_wrong_usage_is_code_2() -> None:
    with pytest.raises(SystemExit) as error:
        main(["optimize"])
    assert error.value.code == 2


def test_shapes_are_read() -> None:
    assert parse_shapes(["x=1x3", "a=b=2"]) == {"x": (1, 3), "a=b": (2,)}
    with pytest.raises(OptionError):
        parse_shapes(["x=1xa"])


def test_an_interrupted_search_goes_on(folder: Path, tmp_path: Path) -> None:
    (folder / "tiny.onnx").write_bytes(build("tiny_candy").SerializeToString())
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "korch.cli", "optimize", str(folder / "tiny.onnx"), "-o",
               str(tmp_path / "tiny.korch"), "--cache-folder", str(cache)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    database = cache / "kernels-1.sqlite"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _records(database) == 0:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in error and "Traceback" not in error
    before = _records(database)
    assert before > 0
    assert not (tmp_path / "tiny.korch").exists()
    assert main([*command[3:], *QUICK]) == 0
    assert _records(database) >= before


def _records(database: Path) -> int:
    import sqlite3
    from contextlib import closing

    if not database.exists():
        return 0
    with closing(sqlite3.connect(database, timeout=10)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM records").fetchone()[0])
        except sqlite3.OperationalError:
            return 0
