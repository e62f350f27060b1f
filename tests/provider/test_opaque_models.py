"""Whole models with operators that fission does not split, compared with ONNX Runtime."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import korch
from korch.ablation import Ablation
from korch.limits import SearchLimits
from korch.report.explain import describe
from tests.support.models import one_operator, parsed

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.long
def test_operators_that_are_kept_whole_run_in_the_middle_of_a_model(cache_folder):
    """Two outputs, sizes as constants, truth values and integers of three types."""
    outputs = "float[4,3] top, int64[4,3] places, float[1,2,4,6] negative, int32[4] counts, bool[4,12] unmasked"
    text = f"""(float[4,12] x, uint32[4] bits) => ({outputs}) {{
        positive = Relu(x)
        sums = CumSum(positive, axis)
        values, order = TopK<axis = 1>(sums, k)
        top = Tanh(values)
        places = Add(order, one)
        grown = Exp(x)
        flat = Reshape(grown, columns)
        image_of_x = Col2Im<strides = [2, 3]>(flat, image, block)
        negative = Neg(image_of_x)
        shifted = BitShift<direction = "LEFT">(bits, by)
        counts = Cast<to = {TensorProto.INT32}>(shifted)
        mask = Greater(x, half)
        unmasked = Not(mask)
    }}"""
    integers = {"axis": 1, "k": [3], "one": [1], "columns": [1, 12, 4], "image": [4, 6], "block": [2, 3]}
    constants = {name: np.array(value, np.int64) for name, value in integers.items()}
    model = parsed(text, 18, by=np.array([1, 2, 0, 3], np.uint32), half=np.float32(0.5), **constants)
    onnx.checker.check_model(model)
    executable = korch.optimize(
        model,
        cache_folder=cache_folder,
        budget=1,
        search=SearchLimits(max_primitives=6),
        ablation=Ablation(baselines=False),
    )
    rng = np.random.default_rng(3)
    feeds = {"x": rng.standard_normal((4, 12)).astype(np.float32), "bits": rng.integers(0, 9, 4).astype(np.uint32)}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for found, expected in zip(executable.run(None, feeds), session.run(None, feeds), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_report_names_the_node_whose_references_differ(cache_folder):
    """`onnx.reference` does not repeat the border in cubic interpolation; ONNX Runtime and PyTorch do."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    image = rng.standard_normal((1, 2, 5, 4)).astype(np.float32)
    grid = rng.uniform(-1.4, 1.4, (1, 3, 3, 2)).astype(np.float32)
    model = one_operator("GridSample", [image, grid], opset=20, mode="cubic", padding_mode="border")
    executable = korch.optimize(model, cache_folder=cache_folder, measure=False, inputs={"x0": image, "x1": grid})
    (dispute,) = executable.report.disputes
    assert dispute.node == "GridSample it"
    assert (dispute.followed, dispute.others) == (("ONNX Runtime", "PyTorch"), ("onnx.reference",))
    assert f"references differ: {dispute.text}" in describe("plan", executable.report)
    right = torch.nn.functional.grid_sample(torch.from_numpy(image), torch.from_numpy(grid), "bicubic", "border", False)
    np.testing.assert_allclose(executable(image, grid)[0], right, rtol=1e-4, atol=1e-5)
