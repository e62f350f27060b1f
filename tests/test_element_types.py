"""Models with other element types than float32, from ONNX to executable, without the host."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

import korch
from korch.ablation import Ablation

TYPES = {
    "f16": (np.float16, onnx.TensorProto.FLOAT16, 5e-3),
    "bf16": (ml_dtypes.bfloat16, onnx.TensorProto.BFLOAT16, 4e-2),
    "f64": (np.float64, onnx.TensorProto.DOUBLE, 1e-12),
}


def attention(kind: int, dtype: object) -> onnx.ModelProto:
    """softmax((x W) x') x, and a normalization by hand."""
    h, rng = onnx.helper, np.random.default_rng(0)
    weight = (rng.standard_normal((12, 12)) / 4).astype(np.float32).astype(dtype)
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["q"]),
        h.make_node("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
        h.make_node("MatMul", ["q", "k"], ["s"]),
        h.make_node("Softmax", ["s"], ["p"], axis=-1),
        h.make_node("MatMul", ["p", "x"], ["r"]),
        h.make_node("Add", ["r", "x"], ["t"]),
        h.make_node("ReduceMean", ["t"], ["mean"], axes=[-1]),
        h.make_node("Sub", ["t", "mean"], ["d"]),
        h.make_node("Relu", ["d"], ["y"]),
    ]
    shape = [2, 5, 12]
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", kind, shape)],
        [h.make_tensor_value_info("y", kind, shape)],
        [h.make_tensor("w", kind, weight.shape, weight.tobytes(), raw=True)],
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scores = x @ weight @ x.transpose(0, 2, 1)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    t = scores / scores.sum(-1, keepdims=True) @ x + x
    return np.maximum(t - t.mean(-1, keepdims=True), 0)


@pytest.mark.parametrize("name", TYPES)
def test_a_block_of_attention(name: str, cache_folder: Path) -> None:
    dtype, kind, tolerance = TYPES[name]
    model = attention(kind, dtype)
    executable = korch.optimize(model, measure=False, ablation=Ablation(host=False), cache_folder=cache_folder)
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
    h, rng = onnx.helper, np.random.default_rng(0)
    weight = rng.standard_normal((8, 64, 3, 3)).astype(np.float32).astype(dtype)
    graph = h.make_graph(
        [h.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4), h.make_node("Relu", ["c"], ["y"])],
        "g",
        [h.make_tensor_value_info("x", kind, [1, 64, 9, 7])],
        [h.make_tensor_value_info("y", kind, [1, 8, 9, 7])],
        [h.make_tensor("w", kind, weight.shape, weight.tobytes(), raw=True)],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 22)], ir_version=10)
    executable = korch.optimize(model, measure=False, ablation=Ablation(host=False), cache_folder=cache_folder)
    x = rng.standard_normal((1, 64, 9, 7)).astype(np.float32).astype(dtype)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    expected = np.maximum(np.einsum("nchwij,ocij->nohw", windows, weight.astype(np.float64)), 0)
    (found,) = executable(x)
    # One rounding of the result: an accumulator of 16 bits would be a hundred times further away.
    bound = {"f16": 2.0**-10, "bf16": 2.0**-7}[name]
    assert np.abs(found.astype(np.float64) - expected).max() <= bound * np.abs(expected).max()


def test_a_quantized_model(cache_folder: Path) -> None:
    h, rng = onnx.helper, np.random.default_rng(0)
    weight = rng.integers(-127, 128, (6, 4, 3, 3)).astype(np.int8)
    scales = rng.uniform(0.01, 0.03, 6).astype(np.float32)
    constants = {
        "w": weight,
        "ws": scales,
        "wz": np.zeros(6, np.int8),
        "s": np.float32(0.02),
        "z": np.uint8(128),
        "os": np.float32(0.1),
        "oz": np.uint8(100),
    }
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        h.make_node("DequantizeLinear", ["w", "ws", "wz"], ["dw"], axis=0),
        h.make_node("Conv", ["d", "dw"], ["c"], pads=[1] * 4),
        h.make_node("QuantizeLinear", ["c", "os", "oz"], ["y"]),
    ]
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", 1, [1, 4, 9, 9])],
        [h.make_tensor_value_info("y", onnx.TensorProto.UINT8, [1, 6, 9, 9])],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    executable = korch.optimize(model, measure=False, cache_folder=cache_folder)
    x = rng.standard_normal((1, 4, 9, 9)).astype(np.float32)
    import onnxruntime

    # As written, in float32: on CPUs without VNNI, its integer convolution
    # adds pairs of products in 16 bits, and saturates.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    expected = session.run(None, {"x": x})[0].astype(int)
    found = executable.run(None, {"x": x})[0].astype(int)
    assert np.abs(found - expected).max() <= 1  # a quotient next to a half
    assert (found != expected).mean() < 0.01


def test_an_output_that_is_zero_in_exact_arithmetic(cache_folder: Path) -> None:
    """The mean of what was just centred is rounding errors alone, of a plan and of the model."""
    h = onnx.helper
    nodes = [
        h.make_node("MeanVarianceNormalization", ["x"], ["a"]),
        h.make_node("ReduceMean", ["a", "k"], ["y"], keepdims=1),
    ]
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", 1, [3, 3, 5, 17])],
        [h.make_tensor_value_info("y", 1, [1, 3, 1, 1])],
        [onnx.numpy_helper.from_array(np.array([0, 2, 3]), "k")],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)
    executable = korch.optimize(model, measure=False, ablation=Ablation(host=False), cache_folder=cache_folder)
    report = executable.report
    assert report.given_error == pytest.approx(1) and report.max_error < 100  # both relative to the model's
    x = np.random.default_rng(1).standard_normal((3, 3, 5, 17)).astype(np.float32)
    assert np.abs(executable(x)[0]).max() < 1e-6
