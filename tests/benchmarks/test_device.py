"""The script for CUDA devices without a device: what it prepares, resumes, plans and prints."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

from benchmarks import device, gpu_rows
from benchmarks.gpu_rows import Row, all_rows
from benchmarks.models.transformers import NAMES
from benchmarks.paper import BLOCKS


def row(name, whole, **engines):
    return {**device._empty_row(Row(name, "tf32", 1), "H200"), "is_whole": whole, "engines": engines}


def test_the_table_has_medians_ratios_and_reasons(tmp_path, capsys):
    rows = [
        row(
            "candy",
            True,
            korch={"times_ms": [1.0, 1.0]},
            eager={"times_ms": [4.0, 4.0]},
            **{"torch.compile": {"times_ms": [2.5, 2.5]}, "torch.compile captured": {"times_ms": [2.0, 2.0]}},
        ),
        row("yolox", False, korch={"failure": "MeasureError: no device"}, eager={"times_ms": [3.0]}),
    ]
    rows[0]["clock"] = "an older one"
    for item in rows:
        (tmp_path / f"{item['model']}-tf32-1.json").write_text(json.dumps(item))
    device.main(["table", "--folder", str(tmp_path), "--output", str(tmp_path / "gpu.json")])
    head, candy, yolox, mean = capsys.readouterr().out.splitlines()
    assert "compile" in head
    end = ["2.00", "(2.00-2.00)", "(timed", "otherwise)"]
    assert candy.split() == ["candy", "tf32", "1", "1.000", "4.000", "-", "2.500", "2.000", "-", "-", *end]
    assert "no device" in yolox and "not all engines" in yolox and "otherwise" not in yolox
    assert mean == "geometric mean, tf32 x1: 2.00 over 1"
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 2


def test_the_plan_says_what_is_missing(tmp_path, capsys):
    (tmp_path / "prepared.json").write_text(
        json.dumps({"candy-tf32-1": {"added": 2, "candidates": 9, "known": 1, "left": 4}})
    )
    (tmp_path / "plans.json").write_text(json.dumps({"candy-tf32-1": {"predicted_ms": 0.4}}))
    device.main(["plan", "--folder", str(tmp_path), "--only", "candy-tf32-1,bert-tf32-1"])
    assert capsys.readouterr().out.splitlines() == [
        "2 rows: 1 prepared, 1 planned, 0 timed",
        "  candy-tf32-1: 2 kernels of 9 candidates, 1 known before, 4 left",
        "  bert-tf32-1: not prepared",
    ]


def test_the_rows_are_those_of_the_table():
    rows = all_rows()
    assert len(rows) == len({row.key for row in rows}) == 9 * 3 * 2 + 3 * len(BLOCKS) == 72
    assert gpu_rows.TINY_BLOCKS.keys() == BLOCKS.keys()
    assert gpu_rows.SIZES["efficientvit", 1] == {"size": 2048}


def test_an_unknown_row_is_refused():
    with pytest.raises(SystemExit, match="there is no row 'cndy'"):
        device.main(["plan", "--only", "cndy"])


def test_a_command_that_takes_too_long_ends_with_its_children():
    begun_s = time.monotonic()
    assert device._run(["sh", "-c", "sleep 60; true"], 3.0) == "out of time" and time.monotonic() - begun_s < 30


def test_an_engine_has_a_limit():
    with pytest.raises(TimeoutError, match="after 1 s"), device._limit(1):
        time.sleep(30)
    with device._limit(None):
        pass


@pytest.mark.parametrize("row", [row for row in all_rows() if row.precision == "tf32"], ids=lambda row: row.key)
def test_a_row_has_a_model_and_a_module(row):
    if row.model in NAMES and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    _, make = gpu_rows.source_of(row, is_tiny=True)
    module, inputs = make()
    outputs = module(*inputs)
    first = outputs[0] if isinstance(outputs, tuple | list) else outputs
    batch = gpu_rows.TINY_BATCH if row.batch > 1 or row.model.endswith("batch 16") else 1
    assert first.shape[0] == inputs[0].shape[0] == batch


@pytest.mark.long
def test_a_row_passes_through_all_steps():
    command = [sys.executable, "-m", "benchmarks.device", "--dry-run", "--only", "softmax-attention-tf32-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("1 of 1 rows are right\n"), done.stdout + done.stderr
