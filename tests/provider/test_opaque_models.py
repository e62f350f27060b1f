"""Whole models with operators that fission does not split, compared with ONNX Runtime."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import korch
from korch.ablation import Ablation
from korch.limits import SearchLimits
from korch.report.explain import describe
from tests.support.models import one_operator

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.long
def test_operators_that_are_kept_whole_run_in_the_middle_of_a_model(cache_folder):
    """Two outputs, sizes as constants, truth values and integers of three types."""
    node = helper.make_node
    nodes = [
        node("Relu", ["x"], ["positive"]),
        node("CumSum", ["positive", "axis"], ["sums"]),
        node("TopK", ["sums", "k"], ["values", "order"], axis=1),
        node("Tanh", ["values"], ["top"]),
        node("Add", ["order", "one"], ["places"]),
        node("Exp", ["x"], ["grown"]),
        node("Reshape", ["grown", "columns"], ["flat"]),
        node("Col2Im", ["flat", "image", "block"], ["image_of_x"], strides=[2, 3]),
        node("Neg", ["image_of_x"], ["negative"]),
        node("BitShift", ["bits", "by"], ["shifted"], direction="LEFT"),
        node("Cast", ["shifted"], ["counts"], to=TensorProto.INT32),
        node("Greater", ["x", "half"], ["mask"]),
        node("Not", ["mask"], ["unmasked"]),
    ]
    constants = {
        "axis": np.array(1, np.int64),
        "k": np.array([3], np.int64),
        "one": np.array([1], np.int64),
        "columns": np.array([1, 12, 4], np.int64),
        "image": np.array([4, 6], np.int64),
        "block": np.array([2, 3], np.int64),
        "by": np.array([1, 2, 0, 3], np.uint32),
        "half": np.array(0.5, np.float32),
    }
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "opaque",
        [info("x", TensorProto.FLOAT, [4, 12]), info("bits", TensorProto.UINT32, [4])],
        [
            info("top", TensorProto.FLOAT, [4, 3]),
            info("places", TensorProto.INT64, [4, 3]),
            info("negative", TensorProto.FLOAT, [1, 2, 4, 6]),
            info("counts", TensorProto.INT32, [4]),
            info("unmasked", TensorProto.BOOL, [4, 12]),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
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
