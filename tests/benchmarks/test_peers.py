"""The engines that only the benchmarks compare with: IREE, TVM, and PyTorch on ONNX files."""

import importlib
import importlib.util
import json
import subprocess
import sys
import types

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks import peers
from benchmarks.models import build
from benchmarks.peers import tvm, tvm_build
from benchmarks.peers.iree import _entry, with_fixed_shapes
from benchmarks.peers.tvm import TvmPeer
from korch.errors import UnsupportedError
from korch.inputs import random_inputs
from korch.report.peers import get_peer
from korch.system.extras import install_command
from tests.support.models import in_onnxruntime, saved, sum_and_place

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is optional and not installed")
IREE = pytest.mark.skipif(peers.IREE.is_available() is not None, reason="IREE is optional")
TVM = pytest.mark.skipif(peers.TVM.is_available() is not None, reason="TVM is optional")
ENGINES = [pytest.param("eager", marks=TORCH), pytest.param("iree", marks=IREE), pytest.param("tvm", marks=TVM)]
PAIRS = [
    *(pytest.param("eager", name, marks=TORCH) for name in ("tiny_candy", "tiny_transformer", "mlp", "conv_bn_relu")),
    pytest.param("iree", "tiny_transformer", marks=IREE),
    pytest.param("iree", "conv_bn_relu", marks=IREE),
    pytest.param("tvm", "conv_bn_relu", marks=TVM),
]


@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_each_engine_computes_each_model(engine, name, tmp_path):
    path = saved(build(name), tmp_path)
    inputs = random_inputs(path)
    run = get_peer(peers.full_name(engine)).prepare(path, inputs, 1)
    for _ in range(2):
        for got, reference in zip(run(), in_onnxruntime(path, inputs), strict=True):
            assert got.shape == reference.shape
            np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-4)


@TORCH
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # PyTorch's own
def test_inductor_computes_what_onnxruntime_does(tmp_path):
    path = saved(build("mlp"), tmp_path)
    inputs = random_inputs(path)
    (got,) = peers.INDUCTOR.prepare(path, inputs, 1)()
    np.testing.assert_allclose(got, in_onnxruntime(path, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", *ENGINES])
def test_free_sizes_integer_outputs_and_strided_inputs(engine, tmp_path):
    path = saved(sum_and_place(), tmp_path)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 3)).astype(np.float32).T
    b = rng.standard_normal((3, 4)).astype(np.float32)
    total, where = get_peer(peers.full_name(engine)).prepare(path, {"a": a, "b": b}, 1)()
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(where, (a + b).argmax(1))


@pytest.mark.parametrize(("peer", "package"), [(peers.EAGER, "torch"), (peers.IREE, "iree"), (peers.TVM, "tvm")])
def test_a_missing_engine_says_how_to_install_it(peer, package, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UnsupportedError) as caught:
        peer.prepare(tmp_path / "m.onnx", {}, 1)
    assert str(caught.value) == (
        f"peer {peer.name}: the Python package {package} is not installed. Run: {install_command(package)}"
    )


def test_the_name_says_whether_tvm_is_tuned():
    assert [peer.name for peer in (peers.TVM, TvmPeer(64))] == ["tvm (untuned)", "tvm (64 trials)"]
    assert peers.TVM_2000.prepare_timeout_s > 2000 > peers.TVM.prepare_timeout_s


def test_tuning_needs_more_than_compiling(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "xgboost" else module)
    assert peers.TVM.is_available() is None
    assert TvmPeer(8).is_available() == ("the Python package xgboost is not installed; run: " + install_command("tvm"))


def test_half_of_iree_is_not_enough(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "iree.runtime" else module)
    assert peers.IREE.is_available() == (
        "the Python package iree.runtime is not installed; run: " + install_command("iree")
    )


def test_tvm_is_asked_for_the_shapes_and_types_of_the_inputs(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    monkeypatch.setattr(tvm, "run_tool", lambda command, task: asked.append((command, task)))
    monkeypatch.setattr(tvm, "_load", lambda library, inputs, threads: (library.name, threads))
    inputs = {"a": np.ones((3, 4), np.float32).T, "ids": np.zeros(2, np.int64)}
    assert TvmPeer(64).prepare(tmp_path / "m.onnx", inputs, 2) == ("model.so", 2)
    ((command, task),) = asked
    request = json.loads(command[-1])
    assert request["inputs"] == {"a": [[4, 3], "float32"], "ids": [[2], "int64"]}
    assert (request["threads"], request["trials"]) == (2, 64)
    assert task == "compile the model with 64 trials"


def test_what_tuning_found_is_kept_by_all_that_it_depends_on(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tvm", types.SimpleNamespace(__version__="1.0"))
    model, other = tmp_path / "m.onnx", tmp_path / "n.onnx"
    model.write_bytes(b"model")
    other.write_bytes(b"other")
    request = {"model": str(model), "inputs": {"x": [[1], "float32"]}, "threads": 2, "trials": 64, "library": "a.so"}
    key = tvm_build._key("llvm", request)
    assert tvm_build._key("llvm", request | {"library": "b.so"}) == key
    differing = ({"model": str(other)}, {"trials": 65}, {"threads": 1}, {"inputs": {"x": [[2], "float32"]}})
    found = {tvm_build._key("llvm", request | changed) for changed in differing}
    found |= {tvm_build._key("llvm -mcpu=znver5", request), key}
    monkeypatch.setitem(sys.modules, "tvm", types.SimpleNamespace(__version__="1.1"))
    assert len(found | {tvm_build._key("llvm", request)}) == 7


@pytest.mark.parametrize(("times_s", "is_tuned"), [([1e10, 0.5], True), ([1e10], False), ([], False)])
def test_a_tuner_of_which_no_trial_gave_a_time_has_failed(monkeypatch, tmp_path, times_s, is_tuned):
    patience = []

    def local(timeout_sec):
        patience.append(timeout_sec)

    def tune_relax(module, params, target, folder, *trials, **options):
        records = [types.SimpleNamespace(run_secs=[s]) for s in times_s]
        records.append(types.SimpleNamespace(run_secs=None))
        return types.SimpleNamespace(get_all_tuning_records=lambda: records)

    found = {
        "": {"__version__": "1.0"},
        ".s_tir": {},
        ".s_tir.meta_schedule": {},
        ".s_tir.meta_schedule.builder": {"LocalBuilder": local},
        ".s_tir.meta_schedule.runner": {"LocalRunner": local},
        ".s_tir.meta_schedule.relax_integration": {"extract_tasks": lambda *_: [0, 1], "tune_relax": tune_relax},
    }
    for name, members in found.items():
        monkeypatch.setitem(sys.modules, f"tvm{name}", types.SimpleNamespace(**members))
    (tmp_path / "m.onnx").write_bytes(b"model")
    request = {
        "model": str(tmp_path / "m.onnx"),
        "inputs": {},
        "threads": 2,
        "trials": 4,
        "kept": str(tmp_path / "kept"),
    }
    if is_tuned:
        assert (tvm_build._tuned(None, "llvm", request) / "done").exists()
    else:
        with pytest.raises(RuntimeError, match=r"none of 4 trials gave a time; .*logs says why"):
            tvm_build._tuned(None, "llvm", request)
        assert not list((tmp_path / "kept").glob("*/done"))
    assert len(patience) == 2 and min(patience) > 60


def test_what_tunes_tvm_imports_no_pytorch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (tmp_path / "first").mkdir()
    tvm_build.hide_torch(tmp_path / "first")
    with pytest.raises(ImportError):
        importlib.import_module("torch")
    code = "import sys; print(*sys.path); import torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ImportError: TVM does not need PyTorch\n")
    assert "/somewhere" in done.stdout.split()


@TVM
def test_tvm_does_not_bring_pytorch():
    code = "import sys; from benchmarks.peers import tvm; tvm._import(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "tvm.relax" in loaded and "torch" not in loaded


@TVM
def test_tvm_says_which_operator_it_lacks(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        peers.TVM.prepare(saved(_fizz_model(), tmp_path), {"x": np.ones(3, np.float32)}, 1)
    assert str(caught.value) == (
        "can't compile the model: The following operators are not supported for frontend ONNX: Fizz"
    )


@IREE
def test_iree_says_what_it_can_not_import(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        peers.IREE.prepare(saved(_fizz_model(), tmp_path), {"x": np.ones(3, np.float32)}, 1)
    assert str(caught.value) == ("can't import the model: No Op registered for Fizz with domain_version of 17")


def _fizz_model():
    sizes = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Fizz", ["x"], ["y"])], "g", sizes[:1], sizes[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_iree_runs_the_function_that_waits():
    assert _entry(["g$async", "g", "__init"]) == "g"


def test_free_dimensions_are_fixed_for_engines_that_need_it(tmp_path):
    path = saved(sum_and_place(), tmp_path)
    arrays = {name: np.zeros((7, 4), np.float32) for name in "ab"}
    folder = tmp_path / "fixed"
    folder.mkdir()
    fixed = with_fixed_shapes(path, arrays, folder)
    assert fixed == folder / "m.onnx"
    graph = onnx.load(fixed).graph
    shapes = [[d.dim_value for d in value.type.tensor_type.shape.dim] for value in (*graph.input, *graph.output)]
    assert shapes == [[7, 4], [7, 4], [7, 4], [7]]
    assert with_fixed_shapes(fixed, arrays, folder) == fixed
