"""The suite for CUDA devices without a device: what it resumes, records and prints."""

from __future__ import annotations

import argparse
import json
import time
from importlib.util import find_spec

import pytest

from benchmarks import device
from korch.options import Options


def row(name, whole, **engines):
    return {**device._empty_row(name, "tf32", 1, "H200"), "is_whole": whole, "engines": engines}


def test_the_table_has_medians_ratios_and_reasons(tmp_path):
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
        device._path(tmp_path, True, item["model"], "tf32", 1).write_text(json.dumps(item))
    (tmp_path / "tests.txt").write_text("...\n12 passed in 3 s\n")
    text = device.table(device.collect(tmp_path, quick=True))
    first, head, candy, yolox, mean = text.splitlines()
    assert first == "tests: 12 passed in 3 s" and "compile" in head
    end = ["2.00", "(2.00-2.00)", "(timed", "otherwise)"]
    assert candy.split() == ["candy", "tf32", "1", "1.000", "4.000", "-", "2.500", "2.000", "-", "-", *end]
    assert "no device" in yolox and "not all engines" in yolox and "otherwise" not in yolox
    assert mean == "geometric mean, tf32 x1: 2.00 over 1"


def test_only_whole_rows_are_not_done_again(tmp_path):
    path = device._path(tmp_path, False, "candy", "tf32", 1)
    assert not device._is_whole(path)
    path.write_text(json.dumps(row("candy", False)))
    assert not device._is_whole(path)
    path.write_text(json.dumps(row("candy", True)))
    assert device._is_whole(path)


def test_the_papers_models_and_the_transformers_are_in_it():
    found = device.configurations(quick=False)
    assert len(found) == len(set(found)) == 31
    assert {(p, b) for name, p, b in found if name == "bert"} == {(p, b) for p in ("tf32", "float16") for b in (1, 16)}
    assert device.SIZES["efficientvit"] == {"size": 2048}


def test_a_command_that_takes_too_long_ends_with_its_children():
    begun_s = time.monotonic()
    ended, text = device._run(["sh", "-c", "echo on; sleep 60; true"], 3.0, is_kept=True)
    assert (ended, text) == ("out of time", "on\n") and time.monotonic() - begun_s < 30


def test_an_engine_has_a_limit():
    with pytest.raises(TimeoutError, match="after 1 s"), device._limit(1):
        time.sleep(30)
    with device._limit(None):
        pass


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_a_model_is_a_module_with_its_inputs(monkeypatch):
    monkeypatch.setattr(device, "PAPER", ("tiny_candy",))
    module, inputs, (model,) = device._model("tiny_candy", 1, "cpu")
    (found,) = module(*inputs)
    assert found.dim() == 4 and model.graph.node


@pytest.mark.parametrize("precision", sorted({precision for _, precision, _ in device.configurations(quick=False)}))
def test_korch_takes_the_options_of_each_precision(precision, tmp_path):
    chosen = device.options_of(precision, argparse.Namespace(budget=60.0, folder=tmp_path))
    chosen["budget_s"] = chosen.pop("budget")
    assert Options(**chosen).precision == precision
