"""One executable for a range of sizes: results are those of the model at each size, and other sizes are refused."""

import gc
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import korch
from korch.cli import main
from korch.cli.shapes import parse_bindings
from korch.errors import ArtifactError, InaccurateError, InputError, KorchError, OptionError
from korch.ranges.mask import Masks, Value
from korch.runtime.choice import MOST
from korch.runtime.ranged import RangedExecutable
from korch.runtime.unpack import unpack
from tests.ranges.range_models import bert, pyramid

QUICK = {"measure": False, "threads": 1, "ablation": korch.Ablation(baselines=False)}

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, n, 6] x, float[n] bias) => (float[batch, n, 6] y, float[batch, 6] mean)
{
    t = Transpose <perm = [0, 2, 1]> (x)
    s = MatMul(x, t)
    b = Add(s, bias)
    p = Softmax <axis = -1> (b)
    y = MatMul(p, x)
    mean = ReduceMean <axes = [1], keepdims = 0> (y)
}
"""


def proto() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def check(executable: RangedExecutable, batch: int, n: int) -> None:
    rng = np.random.default_rng(n)
    feeds = {
        "x": rng.standard_normal((batch, n, 6)).astype(np.float32),
        "bias": rng.standard_normal(n).astype(np.float32),
    }
    session = onnxruntime.InferenceSession(proto().SerializeToString())
    for found, wanted in zip(executable.run(None, feeds), session.run(None, feeds), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def executable(cache_folder) -> RangedExecutable:
    limits = korch.SearchLimits(range_least=6, range_factor=4)
    shapes = {"batch": 2, "n": range(1, 25)}
    found = korch.optimize(proto(), shapes=shapes, search=limits, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, RangedExecutable)
    return found


def test_every_size_runs_on_the_plan_with_the_least_cost(executable: RangedExecutable) -> None:
    plans = executable.ranges.plans
    assert {plan.sizes for plan in plans} == {(24,), (6,)}
    for one, plan in zip(executable.executables, plans, strict=True):
        assert len(plan.costs) == sum(step.runs for step in one.plan.steps)
    for n in range(1, 25):
        check(executable, 2, n)
        able = [plan.cost_ns((n,)) for plan in plans if plan.sizes[0] >= n]
        chosen = executable.serving((n,))[1]
        sums = {i: at.sum_ns for i, plan in enumerate(plans) for at in plan.measured if at.sizes == (n,)}
        assert min(able) > 0
        fitted = next(i for i, plan in enumerate(plans) if plan.sizes[0] >= n and plan.cost_ns((n,)) == min(able))
        if fitted in sums and sums[fitted] > MOST * min(sums.values()):
            assert sums[plans.index(chosen)] == min(sums.values())  # the measured times overrule the fitted ones
        else:
            assert chosen is plans[fitted]
    small = executable.serving((6,))[0]
    assert executable.plan_for([np.zeros((2, 6, 6)), np.zeros(6)]) is small


def test_elements_of_a_larger_run_do_not_enter_a_smaller_one(cache_folder) -> None:
    """A sum over an input reads the zeros behind its elements."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 6] x) => (float[6] y)'
    model = onnx.parser.parse_model(text + "{ y = ReduceMean <axes = [0], keepdims = 0> (x) }")
    found = korch.optimize(model, shapes={"n": range(1, 25)}, cache_folder=cache_folder, **QUICK)
    rng = np.random.default_rng(0)
    for n in (24, 5, 1, 24, 3, 7, 2):
        x = rng.standard_normal((n, 6)).astype(np.float32)
        (y,) = found.run(None, {"x": x})
        np.testing.assert_allclose(y, x.mean(0), rtol=1e-5, atol=1e-6)


def test_sizes_beside_the_corners_of_tiles(cache_folder) -> None:
    """A layer with blocks of 16 to 128 rows and keys, at one row less, as many, and one more."""
    source, most = bert(260, 64), 260
    shapes, limits = {"batch": 1, "length": range(1, most + 1)}, korch.SearchLimits(range_least=most)  # one plan
    options = QUICK | {"threads": 2, "search": limits, "ablation": korch.Ablation(baselines=False, rules="none")}
    found = korch.optimize(source, shapes=shapes, cache_folder=cache_folder, **options)
    session = onnxruntime.InferenceSession(source)
    beside = {tiles * size + d for size in (16, 32, 64, 128) for tiles in (1, 2, 3) for d in (-1, 0, 1)}
    for length in sorted({1, most, *beside} & set(range(most + 1))):
        ids, mask = np.random.default_rng(length).integers(0, 2, (2, 1, length))
        mask[0, 0] = 1
        feeds = {"ids": ids, "mask": mask}
        for own, wanted in zip(found.run(None, feeds), session.run(None, feeds), strict=True):
            assert own.shape == wanted.shape
            np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_does_not_grow_with_runs_of_random_sizes(executable: RangedExecutable) -> None:
    rng = np.random.default_rng(0)
    inputs = {n: {"x": np.ones((2, n, 6), np.float32), "bias": np.ones(n, np.float32)} for n in range(1, 25)}

    def grown_bytes(runs: int) -> int:
        before = resident_bytes()
        for n in rng.integers(1, 25, runs).tolist():
            executable.run(None, inputs[n])
        gc.collect()
        return resident_bytes() - before

    grown_bytes(1000)
    assert grown_bytes(10_000) < 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_without_costs_the_smallest_plan_runs(executable: RangedExecutable) -> None:
    bare = replace(executable.ranges, plans=tuple(replace(plan, costs=()) for plan in executable.ranges.plans))
    artifacts = [one.artifact for one in executable.executables]
    found = RangedExecutable(artifacts, executable._shared, bare)
    assert found.serving((6,))[1].sizes == (6,) and found.serving((7,))[1].sizes == (24,)


def test_it_describes_its_ranges(executable: RangedExecutable) -> None:
    assert [info.shape for info in executable.get_inputs()] == [[2, "1..24", 6], ["1..24"]]
    assert [info.shape for info in executable.get_outputs()] == [[2, "1..24", 6], [2, 6]]
    assert [info.shape for info in executable.example_inputs()] == [[2, 24, 6], [24]]
    assert " plans for n=1..24\n  up to n=6, timed at n=3: " in repr(executable)


def test_it_is_saved_and_loaded(executable: RangedExecutable, tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.korch"
    executable.save(path)
    loaded = korch.load(path)
    assert isinstance(loaded, RangedExecutable)
    check(loaded, 2, 13)
    check(pickle.loads(pickle.dumps(loaded)), 2, 1)
    assert loaded.ranges == executable.ranges
    assert main(["run", str(path), "--random"]) == 0
    assert "y: f32[2, 24, 6]" in capsys.readouterr().out
    assert main(["run", str(path), "--random", "--shape", "n=17"]) == 0
    assert "y: f32[2, 17, 6]" in capsys.readouterr().out
    for size, kernel in (("n=17", "0"), ("n=2", "0")):
        assert main(["explain", str(path), "--kernel", kernel, "--shape", size]) == 0
        assert capsys.readouterr().out.startswith("kernel 0")
    assert main(["explain", str(path), "--kernel", "0"]) == 1
    assert (
        f"korch: {path}: it is for ranges of sizes; expected --shape and one size of n=1..24" in capsys.readouterr().err
    )
    assert main(["explain", str(path), "--kernel", "0", "--shape", "n=25"]) == 1
    assert "expected n= and one of 1..24" in capsys.readouterr().err
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "inputs of at most n=24, timed at n=" in text
    assert "time by size, inputs of at most n=24" in text and "kernels in nanoseconds" in text
    unpack(path, tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "sizes.bin").exists()
    damaged = executable.archive()
    damaged.members["ranges.json"] = b'{"dimensions": [], "plans": []}'  # type: ignore[index]
    damaged.write(path)
    with pytest.raises(ArtifactError):
        korch.load(path)


def test_it_times_whole_runs(executable: RangedExecutable) -> None:
    arrays = [np.zeros((2, 5, 6), np.float32), np.zeros(5, np.float32)]
    assert all(run_ns > 0 for run_ns in executable.time(arrays, 3).run_ns)


@pytest.mark.parametrize(
    ("x", "bias", "text"),
    [
        ((2, 25, 6), 25, "input 'x', axis 1: the size 25 of 'n' is out of its range; expected 1..24"),
        ((2, 0, 6), 0, "input 'x', axis 1: the size 0 of 'n' is out of its range; expected 1..24"),
        ((2, 5, 6), 4, "input 'bias', axis 0: the size of 'n' is 4; expected 5, as another axis"),
        ((3, 5, 6), 5, "input 'x', axis 0: its size is 3; expected 2"),
        ((5, 6), 5, "it is f32[5,6]; expected f32[?,?,?]"),
    ],
)
def test_other_sizes_are_refused(executable: RangedExecutable, x, bias: int, text: str) -> None:
    with pytest.raises(InputError) as error:
        executable(np.zeros(x, np.float32), np.zeros(bias, np.float32))
    assert text in str(error.value)


def test_bench_compares_at_sizes(executable: RangedExecutable, tmp_path: Path, capsys) -> None:
    path, model = tmp_path / "a.korch", tmp_path / "m.onnx"
    executable.save(path)
    onnx.save(proto(), str(model))
    command = ["bench", str(path), "--model", str(model), "--against", "", "--rounds", "1"]
    assert main(command) == 0
    assert "n=24" in capsys.readouterr().out
    assert main([*command, "--shape", "n=7"]) == 0
    capsys.readouterr()
    assert main([*command, "--shape", "n=70"]) != 0
    assert "n= and one of 1..24" in capsys.readouterr().err


def test_a_plan_with_wrong_results_is_refused(cache_folder, monkeypatch) -> None:
    def unmasked(self: Masks, value: Value, axis: int, number: float, accepts_soft: bool = False) -> Value:
        return value

    monkeypatch.setattr(Masks, "filled", unmasked)
    text = TEXT[: TEXT.index("    t =")] + "    y = Identity(x)\n mean = ReduceMax <axes = [1], keepdims = 0> (x)\n}\n"
    shapes = {"batch": 1, "n": range(1, 7)}
    with pytest.raises(InaccurateError, match="at n=1 the error of output 'mean'"):
        korch.optimize(onnx.parser.parse_model(text), shapes=shapes, cache_folder=cache_folder, **QUICK)


def test_ranges_are_read() -> None:
    assert parse_bindings(["n=1..512", "x=1x3x64..640x8"]) == [{"n": (range(1, 513),), "x": (1, 3, range(64, 641), 8)}]
    assert parse_bindings(["n=4..4"]) == [{"n": (4,)}]
    assert parse_bindings(["n=4..16:4", "m=4..7:4"]) == [{"n": (range(4, 17, 4),), "m": (4,)}]
    with pytest.raises(OptionError, match=r"the range 5\.\.4 is empty"):
        parse_bindings(["n=5..4"])


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"batch": 1, "n": range(1, 9, 2)}, "'n' has sizes that are no multiples of 2"),
        ({"batch": 1, "n": range(4, 4)}, r"'n' is range\(4, 4\).* sizes that grow"),
        ({"batch": 1, "n": range(4, 1, -1)}, "sizes that grow"),
        ([{"batch": 1, "n": range(1, 9)}, {"batch": 2, "n": 3}], "there are ranges of sizes and several bindings"),
    ],
)
def test_unclear_ranges_are_refused(shapes, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        korch.optimize(proto(), shapes=shapes, **QUICK)


def test_multiples_of_a_step(cache_folder, tmp_path, capsys) -> None:
    source, limits = pyramid(), korch.SearchLimits(exact_sizes=1)
    found = korch.optimize(source, shapes={"size": range(8, 25, 4)}, search=limits, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, RangedExecutable) and not any(plan.is_exact for plan in found.ranges.plans)
    assert found.get_inputs()[0].shape == [1, 3, "8..24", "8..24"]
    session = onnxruntime.InferenceSession(source)
    for size in (8, 20, 24):
        image = np.random.default_rng(size).standard_normal((1, 3, size, size)).astype(np.float32)
        for own, wanted in zip(found.run(None, {"image": image}), session.run(None, {"image": image}), strict=True):
            assert own.shape == wanted.shape
            np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-4)
    for size in (22, 28):
        with pytest.raises(InputError, match=rf"the size {size} of 'size' is out of its range.* 8\.\.24:4"):
            found.run(None, {"image": np.zeros((1, 3, size, size), np.float32)})
    assert {"size": (24,)} in found.planned_bindings()
    assert all(binding["size"][0] in range(8, 25, 4) for binding in found.planned_bindings())  # which bench compares
    model, path = tmp_path / "model.onnx", tmp_path / "a.korch"
    model.write_bytes(source)
    found.save(path)
    command = ["bench", str(path), "--model", str(model), "--against", "", "--rounds", "1"]
    assert main([*command, "--shape", "size=20"]) == 0
    capsys.readouterr()
    assert main([*command, "--shape", "size=22"]) != 0
    assert "size= and one of 8..24:4" in capsys.readouterr().err


def test_a_device_takes_no_ranges() -> None:
    with pytest.raises(KorchError, match="an artifact for a CUDA device has one plan"):
        korch.optimize(proto(), shapes={"batch": 1, "n": range(1, 9)}, target="cuda", measure=False)
