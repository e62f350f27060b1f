"""Kernels are prepared here, measured on a device (a fake one), and made into a plan here."""

from unittest.mock import patch

import numpy as np
import pytest

import korch
from benchmarks.models import build
from korch.cli import main
from korch.cuda.compile import CubinCompiler
from korch.cuda.measure import job_file
from korch.cuda.measure.job_file import JobFile, KernelJob
from korch.errors import OptionError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.measure.exchange import read_rows
from korch.primitive import reference
from korch.testing.samples import random_inputs
from tests.support.fake_cuda import fake_cuda

pytest.importorskip("torch")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(build("mlp").SerializeToString())
    return path


def run(*arguments):
    assert main([*map(str, arguments)]) == 0


def test_a_plan_is_built_from_what_a_device_has_measured(model, tmp_path, capsys):
    here, jobs, records = tmp_path / "cache", tmp_path / "jobs.zip", tmp_path / "records.jsonl"
    prepare = ("prepare", model, "--cache-folder", here, "-o", jobs, "--kernels")
    with fake_cuda():
        run(*prepare, 8, "--target", "cuda:sm_90")
        assert "8 kernels added, 8 in all" in capsys.readouterr().out
        run("measure", jobs, "-o", records)
        assert "8 kernels measured, 0 failed, 0 left" in capsys.readouterr().out
        records.write_bytes(records.read_bytes()[:-9])  # the process was ended while it wrote a line
        run("measure", jobs, "-o", records)
        assert "1 kernels measured, 0 failed, 0 left" in capsys.readouterr().out
        tables = [row[0] for row in read_rows(records)]
        assert [tables.count(name) for name in ("targets", "facts", "records")] == [1, 1, 8]
        run("database", "import", records, "--cache-folder", here)
        run("optimize", model, "--cache-folder", here, "--target", "cuda:h200", "-o", tmp_path / "a")
        assert "not run yet" in capsys.readouterr().out
        run(*prepare, 3, "--target", "cuda:h200")  # others than those that are known
        assert "3 kernels added, 11 in all" in capsys.readouterr().out
        with patch.object(CubinCompiler, "compile", side_effect=AssertionError("everything is in the artifact")):
            loaded = korch.load(tmp_path / "a")
        graph = fission(load_model(model.read_bytes()))
        inputs = random_inputs(graph, np.random.default_rng(0))
        expected = reference.run(graph, inputs, exact=True)
        for (name, _), found in zip(graph.outputs, loaded(*inputs.values()), strict=True):
            assert np.abs(found - expected[name]).max() <= 1e-4 * np.abs(expected[name]).max()
        optimized = korch.optimize(model, target="cuda", cache_folder=here)
        assert optimized.report.recalled and optimized.plan.steps == loaded.plan.steps


@pytest.mark.parametrize("damage", ["text", "member", "arch"])
def test_an_unsuitable_file_of_jobs_is_refused(damage, tmp_path, capsys):
    path = tmp_path / "jobs.zip"
    if damage == "text":
        path.write_text("no archive")
    else:
        assert JobFile(path).add([KernelJob("k", {"launches": []}, 1)], {}, 80 if damage == "arch" else 90, "3")
    if damage == "member":
        path.write_bytes(path.read_bytes().replace(b"7zXZ", b"7zXY"))
    with fake_cuda():
        assert main(["measure", str(path), "-o", str(tmp_path / "r")]) == 1
    error = capsys.readouterr().err
    wanted = {"text": "it is no file of jobs", "arch": "its cubins are for sm_80; expected sm_90"}
    assert error.startswith(f"korch: {path}: ") and wanted.get(damage, "is damaged") in error and error.count("\n") == 1


def test_a_file_of_jobs_has_a_largest_size(tmp_path, monkeypatch):
    file = JobFile(tmp_path / "jobs.zip")
    assert file.add([KernelJob("a", {"launches": []}, 1)], {}, 90, "3")
    monkeypatch.setattr(job_file, "MOST_BYTES", file.size_bytes + 10)
    assert not file.add([KernelJob("b", {"launches": []}, 1)], {}, 90, "3")
    assert JobFile(file.path).keys == file.keys == {"a"}
    with pytest.raises(OptionError, match="made by Triton 3; expected another file"):
        file.add([KernelJob("b", {"launches": []}, 1)], {}, 90, "4")
