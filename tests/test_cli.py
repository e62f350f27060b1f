"""The command line: exit codes, one-line errors, JSON."""

import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.models import build
from korch.cli import main
from korch.cli.parser import PRINTED
from korch.cli.select import sizes_of
from korch.cli.shapes import parse_shapes
from korch.errors import OptionError
from korch.limits import SearchLimits
from korch.loading import load
from korch.measure.record import from_text
from korch.options import Options
from korch.pipeline import STAGES
from korch.ranges.form import Dimension
from korch.report.progress import STAGES as SHOWN
from korch.runtime.executable import Executable
from korch.runtime.text import counted
from tests.support.models import parsed

QUICK = ("--budget", "1", "--threads", "1")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("korch-cli")
    (made / "mlp.onnx").write_bytes(build("mlp").SerializeToString())
    (made / "text.onnx").write_text("this is neither a model nor an artifact")
    np.savez(made / "several.npz", a=np.zeros(2))
    np.save(made / "shape.npy", np.zeros((2, 16), np.float32))
    np.save(made / "type.npy", np.zeros((1, 16), np.float64))
    np.save(made / "type=.npy", np.zeros((1, 16), np.float64))
    (made / "kernels-0.sqlite").write_bytes(b"")
    (made / "cut.npy").write_bytes((made / "shape.npy").read_bytes()[:-8])
    with (made / "huge.npy").open("wb") as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 56,)}
        np.lib.format.write_array_header_1_0(stream, header)
    os.mkfifo(made / "pipe")
    (made / "dangling").symlink_to("/nowhere/x")
    return made


@pytest.fixture(scope="session")
def artifact(folder: Path, cache_folder: Path) -> Path:
    path = folder / "mlp.korch"
    arguments = ["optimize", str(folder / "mlp.onnx"), "-o", str(path), *QUICK, "--cache-folder", str(cache_folder)]
    assert main(arguments) == 0
    return path


def test_optimize_prints_json(folder: Path, cache_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "b.korch"
    command = f"optimize {folder}/mlp.onnx -o {out} --json --cache-folder {cache_folder}"
    assert main([*command.split(), *QUICK]) == 0
    report = json.loads(capsys.readouterr().out)
    wanted = {
        "artifact",
        "status",
        "predicted_ms",
        "measured_ms",
        "lower_bound_ms",
        "gap",
        "primitives",
        "alternatives",
        "candidates",
        "measured_candidates",
        "kernels",
        "arena_bytes",
        "max_error",
        "seconds",
    }
    assert wanted <= report.keys()
    assert report["artifact"] == str(out) and out.is_file()


def test_run_and_explain(artifact: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.npz"
    assert main(["run", str(artifact), "--random", "--output", str(out), "--repeat", "3"]) == 0
    printed = capsys.readouterr().out
    assert "3 runs: median" in printed and "output: f32[1, 8]" in printed
    with np.load(out) as arrays:
        assert np.isfinite(arrays["output"]).all()
    assert main(["explain", str(artifact)]) == 0
    text = capsys.readouterr().out
    assert "x bound" in text and "whole plans, timed in turn" in text and "matmul" in text
    assert "the slowest kernels, and why" in text
    # A search that its budget ends at once has nothing to tell.
    assert ("the search over time" in text) == (len(load(artifact).report.rounds) > 1)
    assert main(["explain", str(artifact), "--kernel", "0"]) == 0
    assert capsys.readouterr().out.startswith("kernel 0 of ")
    assert main(["explain", str(artifact), "--kernel", "99"]) == 1
    assert "there is no kernel 99" in capsys.readouterr().err
    monkeypatch.setattr("korch.report.page.page", lambda *arguments: "<html>")  # needs a bundle that Node.js makes
    both = [tmp_path / "plan.onnx", tmp_path / "plan.html"]
    assert main(["explain", str(artifact), "--no-run", "--onnx", str(both[0]), "--html", str(both[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(path) for path in both if path.stat().st_size > 0]
    assert main(["explain", str(artifact), "--json", "--onnx", str(both[0])]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]


@pytest.mark.parametrize(
    "flags",
    [["run", "--random", "--output"], ["explain", "--no-run", "--html"], ["profile", "--rounds", "1", "--trace"]],
)
def test_a_full_disk_leaves_the_old_file(
    artifact: Path, flags: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("korch.report.page.page", lambda *arguments: "<html>")
    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "file"
    path.write_text("old")
    command, *rest = flags
    assert main([command, str(artifact), *rest, str(path)]) == 1
    assert f"{path}: it can't be written: No space left on device" in capsys.readouterr().err
    assert path.read_text() == "old"


def test_the_ledger_is_another_file_than_the_artifact(tmp_path: Path, capsys: Capture) -> None:
    onnx.save(build("mlp"), path := tmp_path / "m.onnx")
    both = str(tmp_path / "both")
    assert main(["optimize", str(path), "-o", both, "--ledger", both, *QUICK]) == 1
    assert capsys.readouterr().err.endswith(f"option --ledger: {both} is the artifact, too; expected another file\n")


def test_a_file_of_weights_is_not_overwritten(tmp_path: Path, capsys: Capture) -> None:
    path, weights = tmp_path / "m.onnx", tmp_path / "m.data"
    onnx.save(build("mlp"), path, save_as_external_data=True, location=weights.name, size_threshold=0)
    before = weights.read_bytes()
    assert main(["optimize", str(path), "-o", str(weights), *QUICK]) == 1
    assert f"{weights} is read, too: it would be overwritten" in capsys.readouterr().err
    assert weights.read_bytes() == before


def test_more_threads_than_cores_are_a_warning_when_an_artifact_is_loaded(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(artifact)
    assert not caplog.records
    monkeypatch.setattr("korch.loading.usable_cores", lambda: 0)
    load(artifact)
    (record,) = caplog.records
    assert "was built for 1 threads, which share the 0 cores" in record.getMessage()


def test_a_forged_plan_is_one_error(artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    executable = load(artifact)
    step = executable.plan.steps[0]
    forged = replace(step, inputs=(replace(step.inputs[0], layout="?"), *step.inputs[1:]))
    plan = replace(executable.plan, steps=(forged, *executable.plan.steps[1:]))
    monkeypatch.setattr(Executable, "plan", plan)
    monkeypatch.setattr("korch.loading.load", lambda path: executable)
    for more in ([], ["--kernel", "0"]):
        code = main(["explain", str(artifact), *more])
        error = capsys.readouterr().err
        assert code == 0 or f"{artifact}: its plan can't be read (" in error


def test_profile(artifact: Path, capsys: Capture) -> None:
    assert main(["profile", str(artifact), "--rounds", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = load(artifact).plan.steps
    assert [kernel["provider"] for kernel in found["kernels"]] == [s.provider for s in steps]
    assert [kernel["alone_ns"] for kernel in found["kernels"]] == [s.cost_ns for s in steps]
    for kernel in found["kernels"]:
        assert 0 < kernel["p10_ns"] <= kernel["median_ns"] <= kernel["p90_ns"]
    assert found["run_ns"] > 0 and found["rounds"] == 4
    assert main(["profile", str(artifact), "--rounds", "2"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert len([line for line in text if " us " in line]) == len(steps)
    assert text[-1].startswith("a whole run") and counted(len(steps), "kernel") in text[-2]


def test_run_takes_arrays_and_keeps_names(artifact: Path, tmp_path: Path) -> None:
    given = np.random.default_rng(1).standard_normal((1, 16)).astype(np.float32)
    np.save(tmp_path / "a=x.npy", given)
    results = []
    for name in ("first", "second"):  # numpy.savez would add .npz
        arguments = ["run", str(artifact), "--input", f"input={tmp_path / 'a=x.npy'}", "--output", str(tmp_path / name)]
        assert main(arguments) == 0
        with np.load(tmp_path / name) as arrays:
            results.append(arrays["output"])
    assert results[0].shape == (1, 8) and np.array_equal(*results)


def test_bench_of_an_artifact(artifact: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime")
    arguments = ["bench", str(artifact), "--against", "onnxruntime", "--rounds", "2", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["korch", "onnxruntime"]
    assert {"name", "median_ms", "p10_ms", "p90_ms", "max_error"} <= found["rows"][0].keys()
    assert found["speedup_over_best"] > 0
    assert max(row["max_error"] for row in found["rows"]) < 1e-4


def test_bench_of_a_model_with_parts_on_the_host(cache_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime")
    model, artifact = tmp_path / "m.onnx", tmp_path / "m.korch"
    onnx.save(parsed("(float[2,3] x) => (int64[2,N] y) { y = NonZero(x) }"), model)
    options = [*QUICK, "--cache-folder", str(cache_folder)]
    assert main(["optimize", str(model), "-o", str(artifact), *options]) == 0
    for subject in (artifact, model):
        capsys.readouterr()
        assert main(["bench", str(subject), "--against", "onnxruntime", "--rounds", "1", *options[len(QUICK) :]]) == 0
        text = capsys.readouterr().out
        assert "segments on the host: 1" in text and " as fast as onnxruntime" in text


def test_bench_goes_on_without_an_engine_that_fails(
    artifact: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(Path(__file__).parent / "report")
    left_out = "left out: peer segfault: its process was killed by SIGSEGV while it was asked to"
    arguments = ["bench", str(artifact), "--rounds", "1", "--against"]
    assert main([*arguments, "fake_peers:SEGFAULT,onnxruntime"]) == 0
    text = capsys.readouterr().out
    assert left_out in text and " as fast as onnxruntime" in text
    assert main([*arguments, "fake_peers:SEGFAULT"]) == 1
    assert left_out in capsys.readouterr().out


def test_bench_of_a_model(folder: Path, cache_folder: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime")
    command = f"bench {folder}/mlp.onnx --against onnxruntime --rounds 2 --cache-folder {cache_folder}"
    assert main([*command.split(), *QUICK]) == 0
    text = capsys.readouterr().out
    assert "korch is " in text and " as fast as onnxruntime" in text and "1 thread\n" in text


def test_bench_refuses_a_model_that_is_not_the_one_that_was_built(
    folder: Path, cache_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("onnxruntime")
    model, artifact = tmp_path / "m.onnx", tmp_path / "m.korch"
    model.write_bytes((folder / "mlp.onnx").read_bytes())
    arguments = ["optimize", str(model), "-o", str(artifact), *QUICK, "--cache-folder", str(cache_folder)]
    assert main(arguments) == 0
    model.write_bytes(build("mlp", batch=1, seed=5).SerializeToString())
    capsys.readouterr()
    assert main(["bench", str(artifact), "--against", "onnxruntime"]) == 1
    changed = f"korch: {artifact}: the model {model} has changed since it was built. "
    assert capsys.readouterr().err == changed + "Name the model with --model\n"
    model.unlink()
    assert main(["bench", str(artifact), "--against", "onnxruntime"]) == 1
    gone = f"korch: {artifact}: the model {model} that it was built from does not exist any more. "
    assert capsys.readouterr().err == gone + "Name the model with --model\n"


def test_unknown_dimensions_are_given_once(cache_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime")
    model = build("mlp")
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "n"
    path, artifact = tmp_path / "m.onnx", tmp_path / "m.korch"
    path.write_bytes(model.SerializeToString())
    arguments = ["optimize", str(path), "-o", str(artifact), *QUICK, "--cache-folder", str(cache_folder)]
    assert main(["fission", str(path)]) == 1
    assert "--shape input=" in capsys.readouterr().err
    assert main([*arguments, "--shape", "input=3x16"]) == 0
    bench = ["bench", str(artifact), "--against", "onnxruntime", "--rounds", "1", "--json"]
    capsys.readouterr()
    assert main(bench) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["max_error"] < 1e-5 for row in rows] == [True, True]


def test_the_parser_names_the_stages_of_the_pipeline() -> None:
    assert (*(stage.name for stage in STAGES), "save") == SHOWN
    assert set(PRINTED) < {stage.name for stage in STAGES}


@pytest.mark.parametrize("stage", ["fission", "saturate", "candidates"])
def test_stages_print_text(stage: str, folder: Path, cache_folder: Path, capsys: Capture) -> None:
    cache = [] if stage == "fission" else ["--cache-folder", str(cache_folder)]
    assert main([stage, str(folder / "mlp.onnx"), *cache]) == 0
    text = capsys.readouterr().out
    assert "matmul(%0, %1)" in text and ("# group 1: " in text) == (stage == "candidates")
    arguments = ["optimize", str(folder / "mlp.onnx"), "--stop-after", stage, "--print-after", stage]
    assert main([*arguments, "--cache-folder", str(cache_folder)]) == 0
    assert capsys.readouterr().out == text


def test_stages_read_what_others_print(folder: Path, cache_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    cache, path = ["--cache-folder", str(cache_folder)], tmp_path / "graph.txt"

    def printed(stage: str, source: Path) -> str:
        options = [] if stage == "fission" else cache
        assert (
            main([stage, str(source), *options, *(["--no-measure"] if stage in ("orchestrate", "lower") else [])]) == 0
        )
        return capsys.readouterr().out

    model = folder / "mlp.onnx"
    path.write_text(printed("fission", model))
    saturated = printed("saturate", path)
    assert saturated == printed("saturate", model)
    path.write_text(saturated)
    assert printed("candidates", path) == printed("candidates", model)
    assert "# kernel 0 of " in printed("lower", path)
    instance = printed("orchestrate", path)
    path.write_text(instance)
    plan = printed("orchestrate", path)
    assert "plan optimal" in instance and plan.startswith("plan optimal") and plan.split()[2] in instance
    assert main(["fission", str(path)]) == 1
    assert "expected an ONNX model" in capsys.readouterr().err


def test_stages_read_what_others_print_of_a_model_in_segments(
    folder: Path, cache_folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SearchLimits, "segment_limit", lambda self, primitives: 3 if primitives > 3 else None)
    path, options = tmp_path / "graph.txt", ["--cache-folder", str(cache_folder)]

    def printed(stage: str, source: Path) -> str:
        bounds = ["--no-measure"] if stage in ("orchestrate", "lower") else []
        assert main([stage, str(source), *options, *bounds]) == 0
        return capsys.readouterr().out

    model = folder / "mlp.onnx"
    saturated = printed("saturate", model)
    assert saturated.startswith("model(") and saturated.count("segment(") > 1
    path.write_text(saturated)
    for stage in ("candidates", "orchestrate", "lower"):
        assert printed(stage, path) == printed(stage, model)
    instances = printed("orchestrate", path)
    assert main(["saturate", str(path), *options]) == 1
    assert "the text already contains alternatives" in capsys.readouterr().err
    path.write_text(instances)
    plans = printed("orchestrate", path)
    assert plans.count("plan optimal") == plans.count("block ") == instances.count("block ") > 1


def test_a_stage_has_the_flags_that_apply(folder: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["fission", str(folder / "mlp.onnx"), "--threads", "1"])
    assert "unrecognized arguments: --threads" in capsys.readouterr().err


def test_an_unknown_flag_is_refused_with_the_command_and_a_similar_flag(capsys):
    with pytest.raises(SystemExit) as info:
        main(["optimize", "m.onnx", "--treads", "2"])
    assert info.value.code == 2
    assert capsys.readouterr().err == (
        "korch optimize: error: unrecognized arguments: --treads 2. Do you mean --threads? "
        "`korch optimize --help` lists the flags\n"
    )


BAD = """\
$ optimize {folder}/missing.onnx -o {out}
{folder}/missing.onnx:
$ optimize {folder}/text.onnx -o {out}
{folder}/text.onnx:
$ optimize {mlp} -o /nowhere/x.korch
option --output: the folder of /nowhere/x.korch does not exist. Create it first
$ optimize {mlp} -o /proc/x.korch
option --output: /proc/x.korch can't be written (
$ optimize {mlp} -o {folder}
option --output: {folder} is a folder; expected the name of a file
$ optimize {mlp} -o {folder}/../{name}/mlp.onnx
option --output: {folder}/../{name}/mlp.onnx is read, too: it would be overwritten; expected another file
$ optimize {mlp} -o {folder}/shape.npy --inputs {folder}/shape.npy
option --output: {folder}/shape.npy is read, too: it would be overwritten; expected another file
$ run {artifact} --input input={folder}/type=.npy --output {folder}/type=.npy
option --output: {folder}/type=.npy is read, too: it would be overwritten; expected another file
$ explain {artifact} --html {out} --onnx {out}
option --onnx: {out} is the page, too; expected another file
$ measure {folder}/text.onnx -o {folder}/text.onnx
option --output: {folder}/text.onnx is read, too: it would be overwritten; expected another file
$ database export {folder}/kernels-0.sqlite --cache-folder {folder}
option FILE: {folder}/kernels-0.sqlite is read, too: it would be overwritten; expected another file
$ optimize {mlp} -o /dev/full
option --output: /dev/full is a pipe or a device; expected the name of a file
$ optimize {mlp} -o {folder}/dangling
option --output: the folder of /nowhere/x does not exist. Create it first
$ optimize {folder}/pipe -o {out}
{folder}/pipe: the model can't be read (it is a pipe or a device, not a regular file)
$ optimize /dev/zero -o {out}
/dev/zero: the model can't be read (it is a pipe or a device, not a regular file)
$ optimize {mlp} -o {out} --shape input=²
option --shape: can't read 'input=²'; expected NAME=1x3x224x224
$ optimize {mlp} -o {out} --shape input={nines}
option --shape: can't read 'input=999
$ optimize {mlp} -o {out} --threads 100000
option --threads: the value 100000 is more than the
$ optimize {mlp} -o {out} --target cuda:sm_90
option --target:
$ run {artifact} --random --output {artifact}
option --output: {artifact} is read, too: it would be overwritten; expected another file
$ run {folder}/pipe --random
{folder}/pipe: it can't be read: it is a pipe or a device, not a regular file
$ run {artifact} --input input={folder}/huge.npy
input 'input': {folder}/huge.npy is no array (its header says
$ run {artifact} --input input={folder}/pipe
input 'input': {folder}/pipe can't be read (it is a pipe or a device, not a regular file)
$ optimize {mlp} -o {out} --shape input
option --shape: can't read 'input'; expected NAME=1x3x224x224
$ optimize {mlp} -o {out} --shape other=1x3
other
$ optimize {mlp} -o {out} --threads 0
option --threads: the value 0 is out of range; expected at least 1
$ optimize {mlp} -o {out} --target tpu
option --target: unknown target 'tpu'; expected cpu
$ run {artifact} --random --seed -1
option --seed: the value -1 is out of range; expected at least 0
$ profile {artifact} --seed -1
option --seed: the value -1 is out of range; expected at least 0
$ run {folder}/text.onnx --random
{folder}/text.onnx:
$ run {folder}/missing.korch --random
{folder}/missing.korch:
$ run {artifact}
input 'input' is missing: no input is given; expected an array for each of 'input'
$ run {artifact} --random --output /nowhere/x.npz
option --output: the folder of /nowhere/x.npz does not exist. Create it first
$ run {artifact} --input input
option --input: can't read 'input'; expected NAME=x.npy
$ run {artifact} --input other={folder}/shape.npy
there is no input 'other'; expected an array for each of 'input'
$ run {artifact} --input input={folder}/shape.npy
input 'input': it is f32[2,16]; expected f32[1,16]
$ run {artifact} --input input={folder}/type.npy
input 'input': it is f64[1,16]; expected f32[1,16]
$ run {artifact} --input input={folder}/missing.npy
input 'input': {folder}/missing.npy can't be read (No such file or directory); expected a .npy file
$ run {artifact} --input input={folder}/several.npz
input 'input': {folder}/several.npz is no array (
$ run {artifact} --input input={folder}/cut.npy
input 'input': {folder}/cut.npy is no array (
$ run {artifact} --random --repeat -1
option --repeat: the value -1 is too small; expected at least 0
$ optimize {folder}/{long}.onnx -o {out}
{folder}/{long}.onnx: the model can't be read (File name too long)
$ optimize {mlp} -o {folder}/{long}
option --output: {folder}/{long} can't be written (File name too long). Choose
$ explain {artifact} --onnx /dev/full
option --onnx: /dev/full is a pipe or a device; expected the name of a file
$ explain {artifact} --html /nowhere/x.html
option --html: the folder of /nowhere/x.html does not exist. Create it first
$ profile {artifact} --rounds 1 --trace /dev/full
option --trace: /dev/full is a pipe or a device; expected the name of a file
$ explain {folder}/text.onnx
{folder}/text.onnx:
$ bench {artifact} --against nobody
option --against: there is no engine 'nobody'; expected korch,
$ bench {artifact} --against ort
Do you mean 'onnxruntime'?
$ bench {artifact} --against onnxruntime,onnxruntime
two runners are called 'onnxruntime'
$ bench {artifact} --rounds 0
option --rounds: the value 0 is too small
$ bench {artifact} --strict
option --strict: it says how an artifact is built, and
$ profile {artifact} --rounds 0
option --rounds: the value 0 is too small
$ profile {folder}/missing.korch
{folder}/missing.korch:
$ bench {folder}/missing.korch
{folder}/missing.korch:
$ bench {artifact} --model {folder}/missing.onnx
{folder}/missing.onnx:
$ fission {folder}/text.onnx
{folder}/text.onnx:
$ check {folder}/text.onnx
{folder}/text.onnx:
$ check {mlp} --shape other=3
other
$ check {mlp} --shape input=1x16,1x16
option --shape: two bindings are equal
"""
"""Commands, each with a part of what it says."""


@pytest.mark.parametrize("case", BAD.split("$ ")[1:], ids=lambda case: case[:70])
def test_bad_input_is_one_clear_error(case: str, folder: Path, artifact: Path, capsys: Capture) -> None:
    names = {"folder": folder, "name": folder.name, "artifact": artifact, "nines": 5000 * "9", "long": 300 * "n"}
    command, message = case.format(mlp=folder / "mlp.onnx", out=folder / "x.korch", **names).splitlines()
    capsys.readouterr()
    assert main(command.split()) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("korch: ")
    assert len(printed.err.splitlines()) == 1 and printed.out == ""


@pytest.mark.parametrize("arguments", [["optimize"], ["explode"], [], ["optimize", "m", "-o", "x", "--threads", "two"]])
def test_wrong_usage_is_code_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: korch" in capsys.readouterr().err


def test_flags_are_made_from_the_options(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    seen: list[Options] = []

    def stop(model: Path, options: Options, *_: object) -> None:
        seen.append(options)
        raise OptionError("stop")

    monkeypatch.setattr("korch.api.optimize_model", stop)
    start = ["optimize", str(folder / "mlp.onnx"), "-o", str(folder / "x.korch")]
    assert main(start) == 1
    monkeypatch.setattr("korch.options.machine_cores", lambda: 3)
    assert main([*start, "--threads", "3", "--budget", "2.5", "--strict", "--cache-folder", "/tmp/kc"]) == 1
    assert seen == [Options(), Options(threads=3, budget_s=2.5, strict=True, cache_folder=Path("/tmp/kc"))]


@pytest.mark.parametrize("shapes", [{"n": (5, 7)}, {"n": (5,), "m": (1,)}])
def test_a_size_of_a_range_is_one_number_of_a_known_name(shapes: dict[str, tuple[int, ...]]) -> None:
    ranged: Any = SimpleNamespace(ranges=SimpleNamespace(dimensions=(Dimension("n", None, 1, 512),)))
    assert sizes_of(ranged, {"n": (5,)}) == (5,)
    with pytest.raises(OptionError, match="option --shape"):
        sizes_of(ranged, shapes)


def test_shapes_are_read() -> None:
    assert parse_shapes(["x=1x3", "a=b=2", "s="]) == {"x": (1, 3), "a=b": (2,), "s": ()}
    for text in ("x", "x=1xa", "x=1x", "=1x2", "x=-1x2"):
        with pytest.raises(OptionError):
            parse_shapes([text])


def test_a_stage_without_enough_memory_is_named(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no 6 GiB")

    monkeypatch.setattr("korch.validation.standard.Standard", fail)
    assert main(["optimize", str(folder / "mlp.onnx"), "-o", str(folder / "never.korch")]) == 1
    text = r"^korch: .*mlp\.onnx: the memory of this process does not suffice for the stage 'reference' \(no 6 GiB\)"
    assert re.search(text, capsys.readouterr().err, re.MULTILINE)


NAME = "a\x1b[31mred\x07b\x9b1m"
ESCAPED = r"a\x1b[31mred\x07b\x9b1m"


@pytest.mark.parametrize(
    "place", ["node", "operator", "domain", "input", "output", "weights", "dimension", "attribute"]
)
def test_escape_codes_in_names_do_not_reach_the_terminal(place: str, tmp_path: Path, capsys: Capture) -> None:
    given = {"operator": "Softmax", "domain": "", "attribute": "axis"} | {place: NAME}
    x, y, w = (given.get(key, key) for key in ("input", "output", "weights"))
    nodes = [
        onnx.helper.make_node("Add", [x, w], ["t"]),
        onnx.helper.make_node(given["operator"], ["t"], [y], given.get("node", ""), domain=given["domain"]),
    ]
    nodes[1].attribute.append(onnx.helper.make_attribute(given["attribute"], 1))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(x, 1, [2, given.get("dimension", 3)])],
        [onnx.helper.make_empty_tensor_value_info(y)],
        [onnx.numpy_helper.from_array(np.ones((), np.float64 if place == "weights" else np.float32), w)],
    )
    opsets = [onnx.helper.make_opsetid(domain, 18) for domain in {"", given["domain"]}]
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), path)
    main(["fission", str(path)])
    printed = "".join(capsys.readouterr())
    assert ESCAPED in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b"}


def test_a_reader_that_stops_reading_is_no_error(folder: Path) -> None:
    command = [sys.executable, "-m", "korch.cli", "fission", str(folder / "mlp.onnx")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_terminal_that_knows_no_unicode_gets_all_the_rest(artifact: Path) -> None:
    done = _korch("explain", str(artifact), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "kernels" in done.stdout, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(closed: str, artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "y.npz"
    command = f"{sys.executable} -m korch.cli run {artifact} --random --output {out} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert out.stat().st_size > 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("KeyboardInterrupt", 130, "interrupted; measurements are kept, and the same command continues from them"),
        ("MemoryError", 1, "there is not enough memory"),
    ],
)
def test_an_interrupt_of_imports_and_little_memory_are_one_line(
    error: str, code: int, said: str, tmp_path: Path
) -> None:
    text = f"""
import sys
from korch.cli import main
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "korch.api":
            raise {error}
sys.meta_path.insert(0, Finder())
sys.exit(main(["optimize", "m.onnx", "-o", "m.korch"]))
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, f"korch: {said}\n")


def test_a_full_disk_behind_stdout_is_one_clear_error(artifact: Path) -> None:
    command = [sys.executable, "-m", "korch.cli", "explain", str(artifact), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "korch: No space left on device"


INTERRUPTED_AT_FIRST_RECORD = """
import os, signal, sys
interrupts = int(sys.argv.pop(1))
from korch.cli import main
from korch.measure.database import Database

def put_and_interrupt(database, *record):
    Database.put_record = put
    put(database, *record)
    for _ in range(interrupts):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # runners may ignore it
put, Database.put_record = Database.put_record, put_and_interrupt
sys.exit(main())
"""
"""The search is under way then: a signal from another process may come when it has ended."""


@pytest.mark.long
@pytest.mark.parametrize("interrupts", [1, 2], ids=["keeps its best plan", "ends at the second"])
def test_an_interrupted_search_goes_on(
    interrupts: int, folder: Path, tmp_path: Path, calibrated: Callable[[Path], Path]
) -> None:
    cache = calibrated(tmp_path / "cache")
    command = f"optimize {folder}/mlp.onnx -o {tmp_path}/mlp.korch --cache-folder {cache} --threads 1".split()
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_FIRST_RECORD, str(interrupts), *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    if interrupts == 1:
        assert (process.returncode, _said(process.stderr)) == (0, [])
        assert load(tmp_path / "mlp.korch").report.max_error < 1e-3
    else:
        assert _said(process.stderr) == [
            "korch: interrupted; measurements are kept, and the same command continues from them"
        ]
        assert process.returncode == 130
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    before = _records(cache)
    assert before
    assert main([*command, *QUICK]) == 0
    after = _records(cache)
    assert before.keys() <= after.keys()
    for key, record in before.items():  # of what the plan has, a second time may be taken
        assert after[key] == record or after[key].is_confirmed  # nothing was measured anew


def test_what_a_command_started_ends_with_it() -> None:
    text = """
import argparse, time
from korch.cli import command as module, main
from korch.report.peers.process import WorkerProcess
def command(_):
    with WorkerProcess("engine", 1) as worker:
        print(worker._process.pid, flush=True)
        time.sleep(60)
parser = argparse.ArgumentParser()
parser.set_defaults(verbose=False, command=command, parser=parser)
module.make_parser = lambda: parser
raise SystemExit(main([]))
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.terminate()
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def _records(cache: Path) -> dict[str, Any]:
    files = list(cache.glob("*.sqlite"))
    if not files:
        return {}
    with closing(sqlite3.connect(files[0], timeout=10)) as connection:
        try:
            rows = connection.execute("SELECT candidate, record FROM records").fetchall()
            return {key: from_text(sealed[9:]) for key, sealed in rows}
        except sqlite3.OperationalError:
            return {}


def _said(stderr: str) -> list[str]:
    """What a command said but for progress, and for budgets, which busy machines exceed."""
    progress = re.compile(r"(\d/\d )?\w+ \[\d+ s")
    return [line for line in stderr.splitlines() if not (progress.match(line) or "budget" in line)]


def _korch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "korch.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.long
def test_two_processes_at_once(folder: Path, tmp_path: Path, calibrated: Callable[[Path], Path]) -> None:
    cache = calibrated(tmp_path / "cache")
    command = f"{sys.executable} -m korch.cli optimize {folder}/mlp.onnx --cache-folder {cache}".split()
    both = [
        subprocess.Popen([*command, *QUICK, "-o", str(tmp_path / name)], stderr=subprocess.PIPE, text=True)
        for name in ("a.korch", "b.korch")
    ]
    ended = [(_said(process.communicate(timeout=600)[1]), process.returncode) for process in both]
    assert ended == [([], 0), ([], 0)]
    assert [main(["explain", str(tmp_path / name)]) for name in ("a.korch", "b.korch")] == [0, 0]


KNOWN_RATES = """
import sys
from korch.cli import main
from korch.measure import cpu
from korch.costs.rates import Calibration, MemoryLevel
cpu.calibrate = lambda *_: Calibration((MemoryLevel(0, 1e10, 1e10),), 1e11, 1.0, 500.0)
sys.exit(main(sys.argv[1:]))
"""
"""Measuring the rates takes seconds, and no folder keeps them here."""


def test_a_cache_that_cannot_be_written_is_a_warning(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "a.korch")
    arguments = ["optimize", str(folder / "mlp.onnx"), "-o", out, *QUICK, "--cache-folder", "/proc/korch"]
    done = subprocess.run([sys.executable, "-c", KNOWN_RATES, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and Path(out).is_file()
    (line,) = _said(done.stderr)
    assert line.startswith("korch: the cache folder /proc/korch can't be written (")
    assert line.endswith("); nothing is kept for the next run")
