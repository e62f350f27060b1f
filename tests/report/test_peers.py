import gc
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
import types

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import korch
from benchmarks.models import build
from korch.errors import ModelError, OptionError, UnsupportedError
from korch.report.peers import PEERS, get_peer, tvm, tvm_build
from korch.report.peers.arrays import BFLOAT16, load_arrays, save_arrays
from korch.report.peers.inputs import random_inputs, with_fixed_shapes
from korch.report.peers.iree import _entry
from korch.system.extras import install_command

NATIVE = ("onnxruntime", "openvino")
TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is optional and not installed")
IREE = pytest.mark.skipif(PEERS["iree"].is_available() is not None, reason="IREE is optional")
TVM = pytest.mark.skipif(PEERS["tvm"].is_available() is not None, reason="TVM is optional")
ENGINES = [*NATIVE, pytest.param("eager", marks=TORCH)]
COMPILERS = [pytest.param("iree", marks=IREE), pytest.param("tvm", marks=TVM)]
MODELS = ("tiny_candy", "tiny_transformer", "mlp", "conv_bn_relu")
PAIRS = [
    *itertools.product(ENGINES[:2], MODELS),
    *(pytest.param("eager", name, marks=TORCH) for name in MODELS),
    pytest.param("iree", "tiny_transformer", marks=IREE),
    pytest.param("iree", "conv_bn_relu", marks=IREE),
    pytest.param("tvm", "conv_bn_relu", marks=TVM),
]


def _save(model, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    return path


def _expected(path, inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_each_engine_computes_each_model_again_and_again(engine, name, tmp_path):
    path = _save(build(name), tmp_path)
    inputs = random_inputs(path)
    expected = _expected(path, inputs)
    # Arrays that only the engine knows, and memory that is reused if it doesn't hold them.
    run = PEERS[engine].prepare(path, {n: a.copy() for n, a in inputs.items()}, 1)
    gc.collect()
    clutter = [np.full(a.shape, np.nan, a.dtype) for a in inputs.values() for _ in range(50)]
    for _ in range(2):
        for got, reference in zip(run(), expected, strict=True):
            assert got.shape == reference.shape
            np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-4)
    del clutter


@TORCH
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # PyTorch's own
def test_inductor_computes_what_onnxruntime_does(tmp_path):
    path = _save(build("mlp"), tmp_path)
    inputs = random_inputs(path)
    (got,) = PEERS["inductor"].prepare(path, inputs, 1)()
    np.testing.assert_allclose(got, _expected(path, inputs)[0], rtol=1e-4, atol=1e-5)


def _argmax_model():
    """Two outputs, one of integers; two inputs, one not contiguous when transposed; free sizes."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("ArgMax", ["sum"], ["where"], axis=1, keepdims=0),
    ]
    free = ["rows", 4]
    graph = helper.make_graph(
        nodes,
        "argmax",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, free) for n in "ab"],
        [
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, free),
            helper.make_tensor_value_info("where", TensorProto.INT64, ["rows"]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("engine", [*ENGINES, *COMPILERS])
def test_free_sizes_integer_outputs_and_strided_inputs(engine, tmp_path):
    path = _save(_argmax_model(), tmp_path)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 3)).astype(np.float32).T
    b = rng.standard_normal((3, 4)).astype(np.float32)
    total, where = PEERS[engine].prepare(path, {"a": a, "b": b}, 1)()
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(where, (a + b).argmax(1))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("onnxruntime", "onnxruntime"),
        ("openvino", "openvino"),
        ("eager", "torch"),
        ("inductor", "torch"),
        ("iree", "iree"),
        ("tvm", "tvm"),
    ],
)
def test_a_missing_engine_says_how_to_install_it(name, package, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UnsupportedError) as caught:
        PEERS[name].prepare(tmp_path / "m.onnx", {}, 1)
    assert str(caught.value) == (
        f"peer {PEERS[name].name}: the Python package {package} is not installed. Run: {install_command(package)}"
    )


def test_an_artifact_is_loaded_once_and_called_with_the_inputs_in_order(monkeypatch, tmp_path):
    loaded = []

    def load(path):
        loaded.append(path)
        return lambda a, b: (a - b,)

    monkeypatch.setattr(korch, "load", load, raising=False)
    inputs = {"a": np.ones((2, 3)).T, "b": np.full((3, 2), 3.0)}
    run = PEERS["korch"].prepare(tmp_path / "m.korch", inputs, 2)
    for _ in range(2):
        (difference,) = run()
        np.testing.assert_array_equal(difference, np.full((3, 2), -2.0))
    assert loaded == [tmp_path / "m.korch"]


def test_korch_and_installed_engines_are_available():
    assert [PEERS[name].is_available() for name in ("korch", *NATIVE)] == [None, None, None]


def test_unknown_peers_are_refused():
    with pytest.raises(OptionError) as caught:
        get_peer("xla")
    assert str(caught.value) == (
        "option --against: there is no engine 'xla'; expected korch, onnxruntime, openvino, inductor, eager, tvm, iree"
    )
    for name in ("no_such_module:PEER", "korch.errors:PEER"):
        with pytest.raises(OptionError, match="can't load the peer"):
            get_peer(name)
    assert get_peer("korch.report.peers.onnxruntime:OnnxRuntimePeer") is not None


def test_the_name_says_whether_tvm_is_tuned():
    assert [get_peer(name).name for name in ("tvm", "tvm:64")] == ["tvm (untuned)", "tvm (64 trials)"]
    assert get_peer("tvm:2000").prepare_timeout_s > 2000 > get_peer("tvm").prepare_timeout_s


@pytest.mark.parametrize("option", ["", "0", "-3", "1e3", "x"])
def test_trials_are_a_positive_number(option):
    with pytest.raises(OptionError) as caught:
        get_peer(f"tvm:{option}")
    assert str(caught.value) == (f"peers: tvm: {option!r} is no number of trials; expected tvm or tvm:2000")


def test_other_engines_have_no_options():
    with pytest.raises(OptionError) as caught:
        get_peer("iree:O3")
    assert str(caught.value) == "peers: iree has no options; expected iree"


def test_tuning_needs_more_than_compiling(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "xgboost" else module)
    assert get_peer("tvm").is_available() is None
    assert get_peer("tvm:8").is_available() == (
        "the Python package xgboost is not installed; run: " + install_command("tvm")
    )


def test_half_of_iree_is_not_enough(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "iree.runtime" else module)
    assert get_peer("iree").is_available() == (
        "the Python package iree.runtime is not installed; run: " + install_command("iree")
    )


def test_tvm_is_asked_for_the_shapes_and_types_of_the_inputs(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    monkeypatch.setattr(tvm, "run_tool", lambda command, task: asked.append((command, task)))
    monkeypatch.setattr(tvm, "_load", lambda library, inputs, threads: (library.name, threads))
    inputs = {"a": np.ones((3, 4), np.float32).T, "ids": np.zeros(2, np.int64)}
    assert get_peer("tvm:64").prepare(tmp_path / "m.onnx", inputs, 2) == ("model.so", 2)
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
    code = "import sys; from korch.report.peers import tvm; tvm._import(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "tvm.relax" in loaded and "torch" not in loaded


@TVM
def test_tvm_says_which_operator_it_lacks(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        get_peer("tvm").prepare(_save(_fizz_model(), tmp_path), {"x": np.ones(3, np.float32)}, 1)
    assert str(caught.value) == (
        "can't compile the model: The following operators are not supported for frontend ONNX: Fizz"
    )


@IREE
def test_iree_says_what_it_can_not_import(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        get_peer("iree").prepare(_save(_fizz_model(), tmp_path), {"x": np.ones(3, np.float32)}, 1)
    assert str(caught.value) == ("can't import the model: No Op registered for Fizz with domain_version of 17")


def _fizz_model():
    sizes = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Fizz", ["x"], ["y"])], "g", sizes[:1], sizes[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_iree_runs_the_function_that_waits():
    assert _entry(["g$async", "g", "__init"]) == "g"


def test_free_dimensions_are_fixed_for_engines_that_need_it(tmp_path):
    path = _save(_argmax_model(), tmp_path)
    arrays = {name: np.zeros((7, 4), np.float32) for name in "ab"}
    folder = tmp_path / "fixed"
    folder.mkdir()
    fixed = with_fixed_shapes(path, arrays, folder)
    assert fixed == folder / "m.onnx"
    graph = onnx.load(fixed).graph
    shapes = [[d.dim_value for d in value.type.tensor_type.shape.dim] for value in (*graph.input, *graph.output)]
    assert shapes == [[7, 4], [7, 4], [7, 4], [7]]
    assert with_fixed_shapes(fixed, arrays, folder) == fixed


def test_random_inputs_repeat_by_seed_and_follow_the_given_shape(tmp_path):
    path = _save(_argmax_model(), tmp_path)
    shapes = {"a": (2, 4), "b": (2, 4)}
    first, again, other = (random_inputs(path, seed, shapes) for seed in (1, 1, 2))
    assert list(first) == ["a", "b"]
    np.testing.assert_array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], other["a"])
    assert first["b"].shape == (2, 4)
    assert first["b"].dtype == np.float32


def test_integer_inputs_are_zeros_and_ones_and_initializers_are_no_inputs(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        "lookup",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, [50]),
            helper.make_tensor_value_info("table", TensorProto.FLOAT, [2, 3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [50, 3])],
        [onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "table")],
    )
    inputs = random_inputs(_save(helper.make_model(graph), tmp_path))
    assert list(inputs) == ["ids"]
    assert inputs["ids"].dtype == np.int64
    assert set(inputs["ids"]) == {0, 1}


def test_unknown_dimensions_and_unreadable_files_are_refused(tmp_path):
    path = _save(_argmax_model(), tmp_path)
    with pytest.raises(OptionError) as caught:
        random_inputs(path)
    assert str(caught.value) == (
        f"{path}: the input 'a' has an unknown dimension. Give its shape, as in --shape a=1x3x224x224"
    )
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\xff\xff not onnx")
    for file in (broken, tmp_path / "absent.onnx"):
        with pytest.raises(ModelError, match="can't be read as ONNX"):
            random_inputs(file)


def test_arrays_of_bfloat16_pass_between_processes_and_engines(tmp_path):
    x = np.array([[-1.5, 2.25, np.inf]]).astype(BFLOAT16)
    given = [x, np.array(True), np.arange(3), np.zeros((0, 2), np.float32), x.T]
    save_arrays(tmp_path / "a.npz", given)
    for found, wanted in zip(load_arrays(tmp_path / "a.npz"), given, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found.astype(float), wanted.astype(float))
    ends = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [1, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    path = _save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)]), tmp_path)
    (y,) = PEERS["openvino"].prepare(path, {"x": x}, 1)()
    assert y.dtype == BFLOAT16 and y.astype(float).tolist() == [[0, 2.25, np.inf]]
