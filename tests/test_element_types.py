"""Models with other element types than float32, from ONNX to executable, without the host."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

import korch
from korch.ablation import Ablation
from tests.support.models import in_onnxruntime, parsed

TYPES = {
    "f16": (np.float16, "float16", 5e-3),
    "bf16": (ml_dtypes.bfloat16, "bfloat16", 4e-2),
    "f64": (np.float64, "double", 1e-12),
}


def attention(kind: str, dtype: object) -> onnx.ModelProto:
    """softmax((x W) x') x, and a normalization by hand."""
    weight = (np.random.default_rng(0).standard_normal((12, 12)) / 4).astype(np.float32).astype(dtype)
    text = f"""({kind}[2,5,12] x) => ({kind}[2,5,12] y) {{
        q = MatMul(x, w)
        k = Transpose<perm = [0, 2, 1]>(x)
        s = MatMul(q, k)
        p = Softmax<axis = -1>(s)
        r = MatMul(p, x)
        t = Add(r, x)
        mean = ReduceMean<axes = [-1]>(t)
        d = Sub(t, mean)
        y = Relu(d)
    }}"""
    return parsed(text, w=weight)


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scores = x @ weight @ x.transpose(0, 2, 1)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    t = scores / scores.sum(-1, keepdims=True) @ x + x
    return np.maximum(t - t.mean(-1, keepdims=True), 0)


@pytest.mark.parametrize("name", TYPES)
def test_a_block_of_attention(name: str, cache_folder: Path) -> None:
    dtype, kind, tolerance = TYPES[name]
    model = attention(kind, dtype)
    executable = korch.optimize(
        model, measure=False, ablation=Ablation(host=False, baselines=False, rules="none"), cache_folder=cache_folder
    )
    assert "onnxruntime" not in {step.provider for step in executable.plan.steps}
    x = np.random.default_rng(1).standard_normal((2, 5, 12)).astype(np.float32).astype(dtype)
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    expected = reference(x.astype(np.float64), weight)
    (found,) = executable(x)
    assert found.dtype == dtype
    assert np.abs(found.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_a_convolution_accumulates_in_float32(name: str, cache_folder: Path) -> None:
    dtype, kind, _ = TYPES[name]
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 64, 3, 3)).astype(np.float32).astype(dtype)
    text = f"({kind}[1,64,9,7] x) => ({kind}[1,8,9,7] y) {{ c = Conv<pads = [1,1,1,1]>(x, w) y = Relu(c) }}"
    model = parsed(text, 22, w=weight)
    executable = korch.optimize(
        model, measure=False, ablation=Ablation(host=False, baselines=False, rules="none"), cache_folder=cache_folder
    )
    x = rng.standard_normal((1, 64, 9, 7)).astype(np.float32).astype(dtype)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    expected = np.maximum(np.einsum("nchwij,ocij->nohw", windows, weight.astype(np.float64)), 0)
    (found,) = executable(x)
    # One rounding of the result: an accumulator of 16 bits would be a hundred times further away.
    bound = {"f16": 2.0**-10, "bf16": 2.0**-7}[name]
    assert np.abs(found.astype(np.float64) - expected).max() <= bound * np.abs(expected).max()


def test_a_quantized_model(cache_folder: Path) -> None:
    rng = np.random.default_rng(0)
    text = """(float[1,4,9,9] x) => (uint8[1,6,9,9] y) {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        dw = DequantizeLinear<axis = 0>(w, ws, wz)
        c = Conv<pads = [1,1,1,1]>(d, dw)
        y = QuantizeLinear(c, os, oz)
    }"""
    weight, scales = rng.integers(-127, 128, (6, 4, 3, 3)).astype(np.int8), rng.uniform(0.01, 0.03, 6)
    constants = {"w": weight, "ws": scales.astype(np.float32), "wz": np.zeros(6, np.int8)}
    grids = {"s": np.float32(0.02), "z": np.uint8(128), "os": np.float32(0.1), "oz": np.uint8(100)}
    model = parsed(text, **constants, **grids)
    executable = korch.optimize(model, measure=False, cache_folder=cache_folder)
    x = rng.standard_normal((1, 4, 9, 9)).astype(np.float32)
    # As written, in float32: on CPUs without VNNI, its integer convolution
    # adds pairs of products in 16 bits, and saturates.
    expected = in_onnxruntime(model, {"x": x}, optimizes=False)[0].astype(int)
    found = executable.run(None, {"x": x})[0].astype(int)
    assert np.abs(found - expected).max() <= 1  # a quotient next to a half
    assert (found != expected).mean() < 0.01


def test_an_output_that_is_zero_in_exact_arithmetic(cache_folder: Path) -> None:
    """The mean of what was just centred is rounding errors alone, of a plan and of the model."""
    text = "(float[3,3,5,17] x) => (float[1,3,1,1] y) { a = MeanVarianceNormalization(x) y = ReduceMean(a, k) }"
    model = parsed(text, 18, k=np.array([0, 2, 3]))
    executable = korch.optimize(
        model, measure=False, ablation=Ablation(host=False, baselines=False, rules="none"), cache_folder=cache_folder
    )
    report = executable.report
    assert report.given_error == pytest.approx(1) and report.max_error < 100  # both relative to the model's
    x = np.random.default_rng(1).standard_normal((3, 3, 5, 17)).astype(np.float32)
    assert np.abs(executable(x)[0]).max() < 1e-6
