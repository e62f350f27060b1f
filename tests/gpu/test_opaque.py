"""PyTorch calls for opaque operators, captured in a CUDA graph and replayed with other inputs."""

import numpy as np
import onnx
import pytest
from onnx import helper

import korch
from korch.ablation import Ablation
from korch.primitive.ops.opaque import onnx_type
from korch.primitive.types import DType
from tests.support.models import chain, parsed

RNG = np.random.default_rng(0)


def f(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def near(*shape):
    return RNG.integers(0, 2, shape)


NODES = {
    "Gather": ({"x": f(40, 24), "i": near(2, 7)}, {}, 1),
    "GatherElements": ({"x": f(4, 6), "i": near(3, 6)}, {}, 1),
    "GatherND": ({"x": f(4, 6, 5), "i": near(3, 2)}, {}, 1),
    "ScatterElements": ({"x": f(4, 6), "i": near(1, 6), "u": f(1, 6)}, {}, 1),
    "ScatterND": ({"x": f(4, 6), "i": near(3, 2), "u": f(3)}, {"reduction": "add"}, 1),
    "Hardmax": ({"x": f(3, 50)}, {}, 1),
    "Det": ({"x": f(2, 4, 4)}, {}, 1),
    "GridSample": ({"x": f(1, 3, 8, 9), "g": f(1, 4, 5, 2)}, {}, 1),
    "Mod": ({"x": f(3, 5), "y": f(3, 5) + 3}, {}, 1),
    "MatMulInteger": ({"x": near(3, 70).astype(np.uint8), "y": near(70, 5).astype(np.uint8)}, {}, 1),
    "LSTM": ({"x": f(5, 2, 8), "w": f(1, 64, 8), "r": f(1, 64, 16)}, {"hidden_size": 16}, 3),
    "GRU": ({"x": f(5, 2, 8), "w": f(1, 48, 8), "r": f(1, 48, 16)}, {"hidden_size": 16}, 2),
}


@pytest.mark.parametrize("op", NODES)
def test_a_call_is_captured(op, tmp_path):
    inputs, attributes, outputs = NODES[op]
    names = [f"y{i}" for i in range(outputs)]
    kinds = {n: (onnx_type(DType.of(a.dtype)), a.shape) for n, a in inputs.items()}
    model = chain([helper.make_node(op, list(inputs), names, **attributes)], kinds, names, opset=20)
    model = onnx.shape_inference.infer_shapes(model)
    native = Ablation(host=False)
    executable = korch.optimize(
        model.SerializeToString(), target="cuda", budget=8, cache_folder=tmp_path, ablation=native
    )
    expected = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    for actual, wanted in zip(executable(*inputs.values()), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


def test_the_host_runs_the_rest(tmp_path):
    """A pooling with the norm 3 has no call; what is around it runs on the device."""
    nodes = "a = Tanh(x) b = LpPool<kernel_shape = [2,2], p = 3>(a) y = Neg(b)"
    model = parsed(f"(float[1,3,8,8] x) => (float[1,3,7,7] y) {{ {nodes} }}", 20)
    executable = korch.optimize(model.SerializeToString(), target="cuda", budget=8, cache_folder=tmp_path)
    executable.save(tmp_path / "h.korch")
    x = f(1, 3, 8, 8)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    for found in (executable, korch.load(tmp_path / "h.korch")):
        np.testing.assert_allclose(found(x)[0], expected, rtol=1e-4, atol=1e-5)
