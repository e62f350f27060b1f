"""The public API on tiny models, from a model to an executable."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import korch
from benchmarks.models import build
from korch.candidate.candidate import Candidate
from korch.errors import InaccurateError, InputError, ModelError, OptionError, UnknownSizeError
from korch.measure.cpu import CpuMeter
from tests.support.models import parsed

QUICK = {"threads": 1, "budget": 1.0, "search": korch.SearchLimits(gap=0.5, max_primitives=8, solver_seconds=5.0)}
FEW = korch.SearchLimits(gap=0.5, max_primitives=4, max_measured=0.02, free_measurements=20)
ALONE = {**QUICK, "ablation": korch.Ablation(baselines=False)}
"""For tests that do not need other plans, which would be built and timed."""


@pytest.fixture(scope="session")
def network(cache_folder: Path) -> tuple[onnx.ModelProto, korch.Executable]:
    model = build("conv_bn_relu", size=8, channels=(4, 16))
    return model, korch.optimize(model, cache_folder=cache_folder, **{**QUICK, "budget": None, "search": FEW})


def reference(model: onnx.ModelProto, *arrays: np.ndarray) -> list[np.ndarray]:
    session = onnx.reference.ReferenceEvaluator(model)
    names = [tensor.name for tensor in model.graph.input]
    return session.run(None, dict(zip(names, arrays, strict=True)))


def inputs_of(executable: korch.Executable, seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(t.shape).astype(t.dtype) for t in executable.get_inputs()]


def test_an_executable_computes_what_the_model_does(network) -> None:
    model, executable = network
    arrays = inputs_of(executable)
    for actual, expected in zip(executable(*arrays), reference(model, *arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # onnx.reference's own
def test_nan_and_infinity_travel(network) -> None:
    model, executable = network
    (x,) = inputs_of(executable)
    x.reshape(-1)[5] = np.nan
    x.reshape(-1)[11] = np.inf
    (actual,), (expected,) = executable(x), reference(model, x)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))


def test_without_baselines_one_plan_is_built(cache_folder: Path, network) -> None:
    model, executable = network
    alone = korch.optimize(model, cache_folder=cache_folder, **ALONE).report
    assert [row.plan for row in alone.plans][:1] == ["searched"]
    assert len(alone.plans) == 1 < len(executable.report.plans)


def test_other_groupings_of_each_kernels_primitives_are_told(cache_folder: Path) -> None:
    report = korch.optimize(build("mlp"), threads=1, cache_folder=cache_folder, search=FEW).report
    assert len(report.groupings) == report.kernels
    for number, rows in enumerate(report.groupings):
        assert all(number in row.instead for row in rows)
    assert any(report.groupings)


@pytest.mark.long
def test_a_plan_beyond_the_tolerance_is_rejected(cache_folder: Path) -> None:
    model = build("conv_bn_relu", size=16, channels=(16, 16))
    loose = korch.optimize(model, cache_folder=cache_folder, **QUICK).report
    assert 0 < loose.max_error <= loose.rms_error < 1e-3
    assert 0 < loose.given_error <= loose.given_rms_error
    needed = 5e-7
    tight = korch.optimize(model, cache_folder=cache_folder, tolerance=needed, **QUICK).report
    assert tight.max_error <= needed
    with pytest.raises(InaccurateError, match="Set --tolerance above") as info:
        korch.optimize(model, cache_folder=cache_folder, tolerance=1e-12, **QUICK)
    assert "of the largest element of output 'output', more than 1.0e-12" in str(info.value)


def test_a_transformer_with_an_infinite_mask(cache_folder: Path) -> None:
    model = build("tiny_transformer", sequence=8, width=16, heads=2)
    executable = korch.optimize(model, cache_folder=cache_folder, **ALONE)
    arrays = inputs_of(executable)
    (actual,), (expected,) = executable(*arrays), reference(model, *arrays)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)


def test_the_report_is_honest(network) -> None:
    _, executable = network
    report = executable.report
    assert report.status in ("optimal", "feasible")
    assert report.lower_bound_ms <= report.predicted_ms
    assert (report.status == "optimal") == (report.gap == 0)
    assert report.max_error < 1e-5
    assert {"searched", "split"} <= {row.plan for row in report.plans}
    assert report.kernels == len(executable.plan.steps)
    assert len(report.groupings) == report.kernels
    errors = report.output_errors
    assert [row.output for row in errors] == [tensor.name for tensor in executable.plan.outputs]
    assert max(row.error.of_largest for row in errors) == report.max_error
    assert all(0 < row.error.rms <= row.error.of_rms < 1e-4 for row in errors)


def test_strict_reorders_nothing(cache_folder: Path) -> None:
    model = build("conv_bn_relu", size=8, channels=(4, 16))
    executable = korch.optimize(model, cache_folder=cache_folder, strict=True, **ALONE)
    rules = {rule.name: rule for rule in executable.report.rule_reports}
    assert rules["affine-folds-into-linear-after-it"].is_off
    arrays = inputs_of(executable)
    np.testing.assert_allclose(executable(*arrays)[0], reference(model, *arrays)[0], atol=1e-5)


def test_a_second_search_takes_no_time_anew(
    tmp_path: Path, calibrated: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: Counter[str] = Counter()
    measure_batch = CpuMeter.measure_batch

    def measure(meter: CpuMeter, batch: Sequence[Candidate], *rest: Any) -> None:
        timed.update(candidate.key for candidate in batch)
        measure_batch(meter, batch, *rest)

    monkeypatch.setattr(CpuMeter, "measure_batch", measure)
    model = build("mlp")
    options = {**ALONE, "budget": None, "search": FEW}
    first = korch.optimize(model, cache_folder=calibrated(tmp_path), **options)
    assert max(timed.values()) == 2  # what a plan has is timed a second time, and no more
    again = korch.optimize(model, cache_folder=tmp_path, **options)
    assert max(timed.values()) == 2
    arrays = inputs_of(first)
    np.testing.assert_allclose(again(*arrays)[0], first(*arrays)[0], rtol=1e-4, atol=1e-5)


def test_an_executable_shows_what_it_is(network) -> None:
    _, executable = network
    (x,), (y,) = executable.get_inputs(), executable.get_outputs()
    head, *tensors = repr(executable).splitlines()
    shown = r"<Executable a model: \d+ kernels? on 1 thread, [\d.]+ ms measured"
    assert re.fullmatch(shown + r", gap [\d.]+%", head)
    assert tensors == [f"  input {x.name!r}: tensor(float) {x.shape}", f"  output {y.name!r}: tensor(float) {y.shape}>"]


def test_the_package_shows_its_names_before_they_are_used() -> None:
    code = "import korch, sys; print(dir(korch), 'korch.api' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{sorted(korch.__all__)} False\n"


def test_only_a_path_is_loaded() -> None:
    with pytest.raises(InputError, match="5 is not a path; expected the name of a file"):
        korch.load(5)


def test_save_and_load(network, tmp_path: Path) -> None:
    _, executable = network
    executable.save(tmp_path / "a.korch")
    loaded = korch.load(tmp_path / "a.korch")
    arrays = inputs_of(executable)
    np.testing.assert_array_equal(loaded(*arrays)[0], executable(*arrays)[0])
    assert loaded.report == executable.report
    names = [tensor.name for tensor in loaded.get_outputs()]
    feeds = {loaded.get_inputs()[0].name: arrays[0]}
    np.testing.assert_array_equal(loaded.run(names, feeds)[0], loaded(*arrays)[0])


def test_an_operator_without_a_rule_is_run_by_onnx_runtime(cache_folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = parsed("(float[3,5] x) => (float[3,5] y) { a = Relu(x) b = Hardmax(a) y = Sigmoid(b) }")
    executable = korch.optimize(model, cache_folder=cache_folder, **ALONE)
    assert "onnxruntime" in {step.provider for step in executable.plan.steps}
    arrays = inputs_of(executable)
    np.testing.assert_allclose(executable(*arrays)[0], reference(model, *arrays)[0], atol=1e-6)


def test_wrong_calls_are_named(network) -> None:
    _, executable = network
    with pytest.raises(InputError, match="called with 0 arrays"):
        executable()
    with pytest.raises(InputError, match="there is no input 'nobody'"):
        executable.run(None, {"nobody": np.zeros(1, np.float32)})


def test_wrong_models_and_options_are_named(tmp_path: Path) -> None:
    (tmp_path / "not.onnx").write_bytes(b"this is no model")
    with pytest.raises(ModelError):
        korch.optimize(tmp_path / "not.onnx")
    with pytest.raises(OptionError, match="option threads"):
        korch.optimize(build("mlp"), threads=0)
    with pytest.raises(OptionError, match="option target: unknown target 'tpu'"):
        korch.optimize(build("mlp"), target="tpu")


@pytest.mark.parametrize("shapes", [{"batch": 2.5}, {"x": (1, None)}, "batch=2", 3, [3]])
def test_bindings_that_are_none_are_named(shapes: Any) -> None:
    with pytest.raises(OptionError, match=r"^option shapes: .* is no binding; expected like"):
        korch.optimize(build("mlp"), shapes=shapes)


def test_a_size_may_be_of_numpy(cache_folder: Path) -> None:
    model = parsed("(float[batch,3] x) => (float[batch,3] y) { y = Relu(x) }")
    for shapes in ({"batch": np.int64(2)}, {"x": np.array([2, 3])}):
        made = korch.optimize(model, shapes=shapes, measure=False, cache_folder=cache_folder)
        assert made.get_inputs()[0].shape == [2, 3]


def test_an_executable_with_parts_on_the_host_takes_arrays_as_others_do(cache_folder: Path) -> None:
    model = parsed("(float[2,3] x) => (int64[2,n] y) { y = NonZero(x) }")
    executable = korch.optimize(model, measure=False, cache_folder=cache_folder)
    assert repr(executable) == (
        "<HostedExecutable segments on the host: 1, native: 0\n"
        "  input 'x': tensor(float) [2, 3]\n  output 'y': tensor(int64) [2, -1]>"
    )
    array = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    for given in (array, array.astype(">f4"), np.asfortranarray(array)):
        np.testing.assert_array_equal(executable(given)[0], np.nonzero(array))

    class Elsewhere:
        def __dlpack__(self, **_: Any) -> None:
            raise BufferError("it is on another device")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    for given, text in (
        (
            Elsewhere(),
            "input 'x': it can't be read through DLPack: it is on another device; "
            "expected f32[2,3] in this machine's memory",
        ),
        ([1.0], "input 'x': it is of type list; expected f32[2,3] as an array of NumPy, or one that supports DLPack"),
        (array[:1], "input 'x': it is f32[1,3]; expected f32[2,3]"),
    ):
        with pytest.raises(InputError) as caught:
            executable(given)
        assert str(caught.value) == text
    with pytest.raises(InputError, match="the feeds are of type list; expected a dict"):
        executable.run(None, [array])


def test_sizes_that_are_assumed_are_fixed_with_an_error_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []

    def note(_: Any, bindings: Sequence[Any]) -> None:
        if not bindings[0]:
            raise UnknownSizeError("n has no size")
        bound.extend(bindings)

    monkeypatch.setattr("korch.api._Job._bound", note)
    model = parsed("(float[n,6] x) => (float[n,6] y) { y = Relu(x) }")
    for error in (0.0, 1e-2):
        korch.optimize(model, error=error, progress=False)
    assert isinstance(bound[0]["n"][0], range) and isinstance(bound[1]["n"][0], int)
