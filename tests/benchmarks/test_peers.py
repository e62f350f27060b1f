"""The engines that only the benchmarks compare with: IREE, and PyTorch on ONNX files."""

import importlib.util

import numpy as np
import onnx
import pytest

from benchmarks import peers
from benchmarks.models import build
from benchmarks.peers.iree import _entry, with_fixed_shapes
from korch.errors import UnsupportedError
from korch.inputs import random_inputs
from korch.report.peers import get_peer
from korch.system.extras import install_command
from tests.support.models import in_onnxruntime, parsed, saved, sum_and_place

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is optional and not installed")
IREE = pytest.mark.skipif(peers.IREE.is_available() is not None, reason="IREE is optional")
ENGINES = [pytest.param("eager", marks=TORCH), pytest.param("iree", marks=IREE)]
PAIRS = [
    *(pytest.param("eager", name, marks=TORCH) for name in ("tiny_candy", "tiny_transformer", "mlp", "conv_bn_relu")),
    pytest.param("iree", "tiny_transformer", marks=IREE),
    pytest.param("iree", "conv_bn_relu", marks=IREE),
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


@pytest.mark.parametrize(("peer", "package"), [(peers.EAGER, "torch"), (peers.IREE, "iree")])
def test_a_missing_engine_says_how_to_install_it(peer, package, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UnsupportedError) as caught:
        peer.prepare(tmp_path / "m.onnx", {}, 1)
    assert str(caught.value) == (
        f"peer {peer.name}: the Python package {package} is not installed. Run: {install_command(package)}"
    )


def test_half_of_iree_is_not_enough(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "iree.runtime" else module)
    assert peers.IREE.is_available() == (
        "the Python package iree.runtime is not installed; run: " + install_command("iree")
    )


@IREE
def test_iree_says_what_it_can_not_import(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        peers.IREE.prepare(saved(_fizz_model(), tmp_path), {"x": np.ones(3, np.float32)}, 1)
    assert str(caught.value) == ("can't import the model: No Op registered for Fizz with domain_version of 17")


def _fizz_model():
    return parsed("(float[3] x) => (float[3] y) { y = Fizz(x) }")


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
