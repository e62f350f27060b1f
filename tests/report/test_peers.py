import gc
import importlib.util

import numpy as np
import onnx
import onnxruntime
import pytest
from benchmarks.models import build
from onnx import TensorProto, helper

import korch
from korch.errors import ModelError, OptionError, UnsupportedError
from korch.report.peers import PEERS, get_peer
from korch.report.peers.inputs import random_inputs

NATIVE = ("onnxruntime", "openvino")
TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is optional and not installed"
)
ENGINES = [*NATIVE, pytest.param("eager", marks=TORCH)]


def _save(model, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    return path


def _expected(path, inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["tiny_candy", "tiny_transformer", "mlp", "conv_bn_relu"])
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


@pytest.mark.parametrize("engine", ENGINES)
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
    ],
)
def test_a_missing_engine_says_how_to_install_it(name, package, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UnsupportedError) as caught:
        PEERS[name].prepare(tmp_path / "m.onnx", {}, 1)
    assert str(caught.value) == (
        f"peer {name}: the Python package {package} is not installed. "
        f"Run: pip install korch[{package}]"
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
        get_peer("tvm")
    assert str(caught.value) == (
        "peers: there is no peer 'tvm'; expected korch, onnxruntime, openvino, inductor, eager"
    )
    for name in ("no_such_module:PEER", "korch.errors:PEER"):
        with pytest.raises(OptionError, match="can't load the peer"):
            get_peer(name)
    assert get_peer("korch.report.peers.onnxruntime:OnnxRuntimePeer") is not None


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
        f"{path}: the input 'a' has an unknown dimension. "
        "Give its shape, as in --shape a=1x3x224x224"
    )
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\xff\xff not onnx")
    for file in (broken, tmp_path / "absent.onnx"):
        with pytest.raises(ModelError, match="can't be read as ONNX"):
            random_inputs(file)
