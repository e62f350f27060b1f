"""TensorRT's provider without TensorRT: ONNX Runtime runs its networks, and a replacement runs its engines."""

import dataclasses
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

from korch.candidate.candidate import Refusal
from korch.cuda import engine
from korch.cuda.kernel import CudaKernel, Network
from korch.cuda.measure.meter import CudaMeter
from korch.cuda.network import network_of, refusal_of, with_constants
from korch.cuda.runtime.executable import open_engines
from korch.cuda.runtime.record import archive_of, read_program
from korch.cuda.target import NOMINAL
from korch.errors import CompileError, ProviderError, UnsupportedError
from korch.primitive import reference
from korch.primitive.ops.linear import ConvAttributes
from korch.provider import tensorrt
from korch.report.doctor import examine
from korch.testing.kernels import group_family, group_terms
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from tests.cuda import cuda_groups as groups
from tests.cuda import fake_tensorrt
from tests.cuda.test_whole_plans import check_issued, options_of, program_of
from tests.tile.tile_groups import Graph

MEASURED = replace(NOMINAL[90], is_nominal=False)


@pytest.fixture
def library(monkeypatch):
    """Put the stand-in where the package would be."""
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.as_module())
    monkeypatch.setattr(tensorrt, "has_driver", lambda: True)
    engine._library.cache_clear()
    engine.build_engine.cache_clear()
    yield
    engine._library.cache_clear()
    engine.build_engine.cache_clear()


def weighted(group, *positions):
    """Return the group with some inputs known at build time."""
    return dataclasses.replace(group, constant_inputs=frozenset(positions))


def biased(kind="f32", op="max", bound=0.0):
    g = Graph()
    y = g.add("matmul", [g.tensor(f"{kind}[6,20]"), g.tensor(f"{kind}[20,9]")])
    y = g.add("add", [y, g.wide(g.tensor(f"{kind}[9]"), (6, 9))])
    return weighted(g.group(g.add(op, [y, g.number(y, bound)])), 1, 2)


CASES = {
    **{
        name: lambda name=name: weighted(groups.PRODUCTS[name](), 1)
        for name in groups.PRODUCTS
        if name not in ("bfloat16", "fused convolution")
    },
    "relu": biased,
    "half relu": lambda: biased("f16"),
    "clip": lambda: biased(op="min", bound=6.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("specials", [False, True])
def test_networks_mean_what_their_groups_do(name, specials, rng):
    group = CASES[name]()
    if specials and group.body.types[0].dtype.value == "f16":
        pytest.skip("on a CPU float16 is computed in float32")
    assert refusal_of(group) is None
    arrays = random_arrays(rng, group.input_types, specials)
    feeds = {name: a for (name, _), a in zip(group.body.inputs, arrays, strict=True)}
    if specials:  # what is not finite spreads along a row of a product
        feeds["i0"] = np.where(rng.random(feeds["i0"].shape) < 0.05, np.nan, 0.5).astype("f4")
        feeds["i0"].reshape(-1)[feeds["i0"].size // 2] = np.nan
        feeds |= {k: rng.standard_normal(a.shape).astype("f4") for k, a in feeds.items() if k != "i0"}
    known = {f"i{i}": feeds.pop(f"i{i}") for i in group.constant_inputs}
    model = with_constants(network_of(group), known)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = reference.run(group.body, feeds | known, exact=True)
    found = session.run([n for n, _ in group.body.outputs], feeds)
    for (output, _), actual in zip(group.body.outputs, found, strict=True):
        assert_same(actual, expected[output], family=group_family(group), terms=group_terms(group), name=output)
    if specials:
        assert any(np.isnan(expected[n]).any() for n, _ in group.body.outputs)


def test_what_is_spread_is_left_to_the_library():
    ops = [node.op_type for node in network_of(biased()).graph.node]
    assert "Expand" not in ops and ops.count("MatMul") == 1
    kept = Graph()
    x = kept.wide(kept.tensor("f32[1,4]"), (3, 4))
    y = kept.add("matmul", [kept.add("neg", [x]), kept.tensor("f32[4,5]")])
    group = kept.group(y)
    assert [n.op_type for n in network_of(group).graph.node].count("Expand") == 1


def refused():
    g = Graph()
    x, w = g.tensor("f32[4,6]"), g.tensor("f32[6,4]")
    y = g.add("matmul", [x, w])
    z = g.add("max", [y, g.add("neg", [y])])
    whole = Graph()
    conv = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))
    image = whole.tensor("f32[1,4,6,6]")
    made = whole.add("exp", [whole.tensor("f32[8,4,3,3]")])
    shifted = Graph()
    a = shifted.slice(shifted.tensor("f32[4,6]"), (3, 0), (4, 6), (-1, 1))
    double = Graph()
    softmax = Graph()
    s = softmax.add("matmul", [softmax.tensor("f32[4,6]"), softmax.tensor("f32[6,4]")])
    empty = Graph()
    return {
        "lose a NaN": g.group(z),
        "weights of a convolution": whole.group(whole.add("conv", [image, made], conv)),
        "goes backwards": shifted.group(shifted.add("matmul", [a, shifted.tensor("f32[6,4]")])),
        "f64 is not a type": double.group(double.add("matmul", [double.tensor("f64[4,6]"), double.tensor("f64[6,4]")])),
        "reduce_max is not": softmax.group(softmax.reduce("max", s, 1)),
        "no product": biased_only(),
        "empty": empty.group(empty.add("matmul", [empty.tensor("f32[0,6]"), empty.tensor("f32[6,4]")])),
        "repeats elements": weighted(groups.PRODUCTS["fused convolution"](), 1),
    }


def biased_only():
    g = Graph()
    return g.group(g.add("exp", [g.tensor("f32[4]")]))


@pytest.mark.parametrize("text", refused())
def test_what_is_no_network_is_refused(text, library):
    found = tensorrt.TensorRTProvider().offer(refused()[text], MEASURED)
    assert isinstance(found, Refusal) and text in found.reason


def test_engines_are_offered_where_they_can_be_built(library):
    provider = tensorrt.TensorRTProvider()
    assert provider.version.startswith(f"{fake_tensorrt.VERSION}-")
    found = provider.offer(biased(), NOMINAL[90])
    assert isinstance(found, Refusal) and "on the device" in found.reason
    (offer,) = provider.offer(biased(), MEASURED)
    kernel = provider.build(biased(), offer, MEASURED)
    assert isinstance(kernel, CudaKernel) and isinstance(kernel.network, Network)
    assert kernel.network.constants == (1, 2) and "MatMul" in kernel.network.source


def test_without_the_library_the_provider_is_left_out_and_doctor_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    engine._library.cache_clear()
    with pytest.raises(ImportError, match="pip install tensorrt"):
        tensorrt.TensorRTProvider()
    text, _ = examine()
    (line,) = [line for line in text.splitlines() if "tensorrt" in line]
    assert line.startswith("--") and "pip install tensorrt" in line


def test_precision_follows_the_target_and_what_is_no_network_fails(library):
    model = with_constants(network_of(biased()), {}).SerializeToString()
    for allowed in (True, False):
        head = engine.build_engine(model, allowed).partition(b"\n")[0]
        assert json.loads(head) == {"tf32": allowed}
    with pytest.raises(CompileError, match="does not take the network"):
        engine.build_engine(b"nonsense", False)
    with pytest.raises(ProviderError, match="does not load"):
        engine.TensorRtEngine(b"nonsense", ["i0"])


def test_an_engine_without_memory_to_run_in_is_one_clear_error(library, monkeypatch):
    loaded = SimpleNamespace(create_execution_context=lambda: None)
    monkeypatch.setattr(fake_tensorrt.Runtime, "deserialize_cuda_engine", lambda self, image: loaded)
    with pytest.raises(ProviderError, match="TensorRT has no memory to run an engine in"):
        engine.TensorRtEngine(b"image", ["i0"])


@pytest.fixture
def program(library, tmp_path, monkeypatch):
    before = CudaMeter.__init__

    def begin(self, *arguments):
        before(self, *arguments)
        self.target = replace(self.target, is_nominal=False)

    monkeypatch.setattr(CudaMeter, "__init__", begin)
    left_out = ("torch", "triton-product", "triton-attention", "triton-winograd")
    return program_of("tiny_candy", options_of("tiny_candy", tmp_path), left_out)


def test_a_plan_with_engines_is_built_kept_and_run(program, tmp_path):
    pytest.importorskip("torch")
    made, split = program
    assert made.engines and made.engine_maker.startswith(f"TensorRT {fake_tensorrt.VERSION}, ")
    archive_of(made).write(tmp_path / "p.korch")
    again = read_program(tmp_path / "p.korch")
    assert replace(again, weights=made.weights) == made
    check_issued(again, split, 1e-4)


class _Torch:
    class cuda:  # noqa: N801
        @staticmethod
        def get_device_name(device):
            return "another GPU"


def test_engines_of_another_version_or_device_are_refused(program, monkeypatch):
    made, _ = program
    with pytest.raises(UnsupportedError) as caught:
        open_engines(made, 90, _Torch)
    assert str(caught.value) == (
        f"the artifact: its engines were built by {made.engine_maker}; this machine has "
        f"TensorRT {fake_tensorrt.VERSION}, another GPU, sm_90; expected the same version of "
        "TensorRT and kind of device. Build the artifact here again"
    )
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    engine._library.cache_clear()
    with pytest.raises(UnsupportedError, match="this machine has no TensorRT"):
        open_engines(made, 90, _Torch)
    assert open_engines(replace(made, engines={}), 90, _Torch) == {}
