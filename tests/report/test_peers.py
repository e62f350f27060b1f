import gc
import importlib
import importlib.util
import itertools

import numpy as np
import pytest

import korch
from benchmarks.models import build
from korch.errors import ModelError, OptionError, UnsupportedError
from korch.inputs import random_inputs
from korch.report.peers import PEERS, get_peer
from korch.report.peers.arrays import BFLOAT16, load_arrays, save_arrays
from korch.report.peers.peer import require
from korch.system.extras import install_command
from tests.support.models import in_onnxruntime, parsed, saved, sum_and_place

NATIVE = ("onnxruntime", "openvino")
TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is optional and not installed")
MODELS = ("tiny_candy", "tiny_transformer", "mlp", "conv_bn_relu")


@pytest.mark.parametrize(("engine", "name"), list(itertools.product(NATIVE, MODELS)))
def test_each_engine_computes_each_model_again_and_again(engine, name, tmp_path):
    path = saved(build(name), tmp_path)
    inputs = random_inputs(path)
    expected = in_onnxruntime(path, inputs)
    # Arrays that only the engine knows, and memory that is reused if it doesn't hold them.
    run = PEERS[engine].prepare(path, {n: a.copy() for n, a in inputs.items()}, 1)
    gc.collect()
    clutter = [np.full(a.shape, np.nan, a.dtype) for a in inputs.values() for _ in range(50)]
    for _ in range(2):
        for got, reference in zip(run(), expected, strict=True):
            assert got.shape == reference.shape
            np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-4)
    del clutter


NETWORK = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, y):
        return {"a": self.dropout(x - y), "none": None, "rest": [x.sum(0)]}

net = Net()
build = Net
number = int
"""


@TORCH
@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # PyTorch's own
def test_a_module_of_pytorch_is_called_by_the_names_or_the_order_of_its_inputs(engine, tmp_path, monkeypatch):
    (tmp_path / "korch_network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    x, y = np.ones((2, 3), np.float32), np.full((2, 3), 3.0, np.float32)
    for name, inputs in (("net", {"y": y, "x": x}), ("build", {"p": x, "q": y})):
        run = get_peer(f"{engine}:korch_network:{name}").prepare(tmp_path / "none", inputs, 1)
        difference, total = run()
        np.testing.assert_array_equal(difference, x - y)
        np.testing.assert_array_equal(total, x.sum(0))


@TORCH
def test_what_is_no_module_of_pytorch_is_refused(tmp_path, monkeypatch):
    (tmp_path / "korch_network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=r"^peer eager:korch_network:number: it is a int; expected a PyTorch module$"):
        get_peer("eager:korch_network:number").prepare(tmp_path / "none", {}, 1)


def test_pytorch_needs_the_name_of_a_module():
    with pytest.raises(UnsupportedError) as caught:
        require(get_peer("eager"))
    assert str(caught.value) == (
        "peer eager: no module is named. Write eager:package.module:OBJECT, with a PyTorch module or its builder"
    )


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("onnxruntime", "onnxruntime"),
        ("openvino", "openvino"),
        ("eager:mlp:net", "torch"),
        ("inductor:mlp:net", "torch"),
    ],
)
def test_a_missing_engine_says_how_to_install_it(name, package, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UnsupportedError) as caught:
        get_peer(name).prepare(tmp_path / "m.onnx", {}, 1)
    assert str(caught.value) == (
        f"peer {get_peer(name).name}: the Python package {package} is not installed. Run: {install_command(package)}"
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
        "option --against: there is no engine 'xla'; expected korch, onnxruntime, openvino, inductor, eager, "
        "package.module:OBJECT"
    )
    for name in ("no_such_module:PEER", "korch.errors:PEER"):
        with pytest.raises(OptionError, match="can't load the peer"):
            get_peer(name)
    assert get_peer("korch.report.peers.onnxruntime:OnnxRuntimePeer") is not None


def test_other_engines_have_no_options():
    with pytest.raises(OptionError) as caught:
        get_peer("openvino:O3")
    assert str(caught.value) == "peers: openvino has no options; expected openvino"


def test_random_inputs_repeat_by_seed_and_follow_the_given_shape(tmp_path):
    path = saved(sum_and_place(), tmp_path)
    shapes = {"a": (2, 4), "b": (2, 4)}
    first, again, other = (random_inputs(path, seed, shapes) for seed in (1, 1, 2))
    assert list(first) == ["a", "b"]
    np.testing.assert_array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], other["a"])
    assert first["b"].shape == (2, 4)
    assert first["b"].dtype == np.float32


def test_integer_inputs_are_zeros_and_ones_and_initializers_are_no_inputs(tmp_path):
    text = "(int64[50] ids, float[2,3] table) => (float[50,3] y) { y = Gather(table, ids) }"
    inputs = random_inputs(saved(parsed(text, table=np.ones((2, 3), np.float32)), tmp_path))
    assert list(inputs) == ["ids"]
    assert inputs["ids"].dtype == np.int64
    assert set(inputs["ids"]) == {0, 1}


def test_unknown_dimensions_and_unreadable_files_are_refused(tmp_path):
    path = saved(sum_and_place(), tmp_path)
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
    path = saved(parsed("(bfloat16[1,3] x) => (bfloat16[1,3] y) { y = Relu(x) }", 14), tmp_path)
    (y,) = PEERS["openvino"].prepare(path, {"x": x}, 1)()
    assert y.dtype == BFLOAT16 and y.astype(float).tolist() == [[0, 2.25, np.inf]]
