"""Small graphs for which a result was wrong, a model was refused, or a search did not end."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import korch
from korch.ablation import Ablation
from korch.equivalence.saturate import saturate
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.primitive import reference
from korch.testing.tolerance import assert_same
from tests.support.models import in_onnxruntime

Node = tuple[str, dict[str, Any], dict[int, Any]]
"""An operator, its attributes, and its inputs behind the first: arrays."""

WEIGHTS = np.random.default_rng(3).standard_normal((42, 2)).astype(np.float32)
ONES = np.ones(2, np.float32)
LAST = {"exclusive": 1, "reverse": 1}


def pool(op: str, kernel: list[int], **attributes: Any) -> list[Node]:
    return [(op, {"kernel_shape": kernel, **attributes}, {})]


def sums(axis: int = -1) -> Node:
    return "CumSum", LAST, {1: np.array(axis)}


CASES: dict[str, tuple[int, list[int], list[Node]]] = {
    "average-ceil-include-pad": (
        20,
        [3, 8, 2, 13, 5],
        pool("AveragePool", [2, 1, 2], ceil_mode=1, count_include_pad=1, pads=[1, 0, 1, 0, 0, 1], strides=[1, 1, 2]),
    ),
    "average-ceil-window-in-padding": (
        20,
        [3, 9, 2, 2],
        pool("AveragePool", [4, 3], ceil_mode=1, pads=[1, 1, 2, 0], strides=[3, 1]),
    ),
    "average-ceil-window-larger": (20, [1, 1, 1], pool("AveragePool", [2], ceil_mode=1, strides=[2])),
    "average-ceil-odd": (17, [1, 1, 7, 7], pool("AveragePool", [2, 2], ceil_mode=1, pads=[1, 1, 1, 1], strides=[2, 2])),
    "max-ceil-odd": (17, [1, 1, 7, 7], pool("MaxPool", [2, 2], ceil_mode=1, pads=[1, 1, 1, 1], strides=[2, 2])),
    "max-ceil-odd-22": (22, [1, 1, 7, 7], pool("MaxPool", [2, 2], ceil_mode=1, pads=[1, 1, 1, 1], strides=[2, 2])),
    "lp-ceil-odd": (18, [1, 1, 7, 7], pool("LpPool", [2, 2], ceil_mode=1, pads=[1, 1, 1, 1], strides=[2, 2])),
    "max-ceil-window-in-padding": (20, [1, 1, 2], pool("MaxPool", [4], ceil_mode=1, pads=[1, 2], strides=[3])),
    "max-ceil-window-larger": (20, [1, 1, 1], pool("MaxPool", [2], ceil_mode=1, strides=[2])),
    "slice-back-from-before-the-axis": (
        20,
        [5, 3],
        [("Slice", {}, {1: np.array([-6]), 2: np.array([-99]), 3: np.array([0]), 4: np.array([-1])})],
    ),
    "resize-to-nothing": (20, [2, 1], [("Resize", {"mode": "linear"}, {2: np.array([1, 0.5], np.float32)})]),
    "transposed-convolution-of-nothing": (
        20,
        [1, 3, 0],
        [("ConvTranspose", {"pads": [0, 0]}, {1: np.ones((3, 2, 4), np.float32), 2: np.array([1, 2], np.float32)})],
    ),
    "local-normalization-of-nothing": (20, [2, 8, 5, 0], [("LRN", {"size": 3}, {})]),
    "group-normalization-18": (18, [1, 4, 5, 5], [("GroupNormalization", {"num_groups": 2}, {1: ONES, 2: ONES})]),
    "group-normalization-20": (20, [1, 4, 3], [("GroupNormalization", {"num_groups": 2}, {1: 2 * ONES, 2: ONES})]),
    "relu-matmul-vector": (20, [42], [("Relu", {}, {}), ("MatMul", {}, {1: WEIGHTS})]),
    "mul-matmul-vector": (20, [42], [("Mul", {}, {1: WEIGHTS[:, 0]}), ("MatMul", {}, {1: WEIGHTS})]),
    "reshape-matmul-vector": (20, [6, 7], [("Reshape", {}, {1: np.array([42])}), ("MatMul", {}, {1: WEIGHTS})]),
    "trilu-matmul-vector": (
        20,
        [2, 13, 17],
        [
            ("Trilu", {}, {1: np.array(-3)}),
            ("Reshape", {}, {1: np.array([442])}),
            ("MatMul", {}, {1: np.ones((442, 2), np.float32)}),
        ],
    ),
    **{f"sums-{n}": (20, [1, n], [sums()]) for n in (33, 100, 256, 400, 2000)},
    "sums-other-axis": (20, [2, 70, 3], [sums(1)]),
    "tile-sums": (20, [1, 4, 5, 10], [("Tile", {}, {1: np.array([1, 2, 1, 3])}), ("Flatten", {"axis": 0}, {}), sums()]),
    "resize-transposed-convolution-sums": (
        20,
        [1, 9, 5, 9],
        [
            ("Resize", {"mode": "nearest"}, {2: np.array([1, 1, 2, 1.5], np.float32)}),
            ("Flatten", {"axis": 1}, {}),
            ("Tile", {}, {1: np.array([1, 2])}),
            sums(),
        ],
    ),
}


def nodes_of(name: str, nodes: list[Node], source: str) -> tuple[list[Any], list[Any]]:
    """Return the nodes of a chain and their constants; the last one writes `name`."""
    made, constants, value = [], [], source
    for i, (op, attributes, others) in enumerate(nodes):
        inputs = [value]
        for position in range(1, max(others, default=0) + 1):
            inputs.append(f"{name}_{i}_{position}" if position in others else "")
            if position in others:
                array = numpy_helper.from_array(np.asarray(others[position]), inputs[-1])
                constants.append(array)
        value = name if i == len(nodes) - 1 else f"{name}_{i}"
        made.append(helper.make_node(op, inputs, [value], **attributes))
    return made, constants


def model_of(cases: dict[str, tuple[int, list[int], list[Node]]], opset: int) -> onnx.ModelProto:
    """Return a model of several chains side by side."""
    nodes, constants, inputs = [], [], []
    for name, (_, shape, chain) in cases.items():
        inputs.append(helper.make_tensor_value_info(f"x_{name}", 1, shape))
        made, more = nodes_of(name, chain, f"x_{name}")
        nodes, constants = nodes + made, constants + more
    outputs = [helper.make_empty_tensor_value_info(name) for name in cases]
    graph = helper.make_graph(nodes, "found", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def feeds_of(cases: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {f"x_{n}": rng.standard_normal(c[1]).astype(np.float32) for n, c in cases.items()}


DISAGREES = {
    "average-ceil-window-larger",
    "slice-back-from-before-the-axis",
    "transposed-convolution-of-nothing",
    "local-normalization-of-nothing",
}
"""Where `onnx.reference` counts windows otherwise than ONNX's inference and ONNX Runtime."""


@pytest.mark.parametrize("name", CASES)
def test_primitives_mean_what_onnx_does_and_no_rule_fails(name: str) -> None:
    case = {name: CASES[name]}
    model, feeds = model_of(case, CASES[name][0]), feeds_of(case)
    graph = fission(load_model(model))
    (expected,) = reference.run(graph, feeds).values()
    assert_same(*in_onnxruntime(model, feeds, optimizes=False), expected, terms=2000)
    if name not in DISAGREES:
        assert_same(*ReferenceEvaluator(model).run(None, feeds), expected, terms=2000)
    _, report = saturate(graph, strict=False)
    assert not any(rule.failures for rule in report.rules)


@pytest.mark.long
def test_kernels_compute_it_and_the_search_ends(cache_folder: Path) -> None:
    cases = {n: c for n, c in CASES.items() if c[0] == 20}
    model, feeds = model_of(cases, 20), feeds_of(cases)
    executable: Any = korch.optimize(
        model, measure=False, threads=2, cache_folder=cache_folder, ablation=Ablation(baselines=False)
    )
    for name, found, expected in zip(
        cases, executable.run(None, feeds), in_onnxruntime(model, feeds, optimizes=False), strict=True
    ):
        assert_same(found, expected, terms=2000, name=name)


def test_a_window_of_padding_only_is_the_maximum_of_no_numbers() -> None:
    nodes = pool("MaxPool", [1, 2], ceil_mode=1, dilations=[1, 2], pads=[0, 1, 0, 0], strides=[2, 2])
    case = {"y": (20, [1, 1, 3, 1], nodes)}
    model, feeds = model_of(case, 20), feeds_of(case)
    (found,) = reference.run(fission(load_model(model)), feeds).values()
    assert found.tolist() == [[[[-np.inf], [-np.inf]]]]
    assert in_onnxruntime(model, feeds, optimizes=False)[0].max() == np.finfo(np.float32).min


def test_equal_padding_counts_dilated_windows_as_the_standard_says() -> None:
    """ONNX Runtime pads for the window without its dilation, and has one column less."""
    nodes = pool("LpPool", [2, 2], auto_pad="SAME_LOWER", dilations=[1, 2], strides=[1, 3])
    case = {"y": (20, [1, 1, 2, 5], nodes)}
    model, feeds = model_of(case, 20), feeds_of(case)
    (found,) = reference.run(fission(load_model(model)), feeds).values()
    assert found.shape == (1, 1, 2, 2)  # the size over the stride, rounded up
    x = feeds["x_y"][0, 0]
    assert found[0, 0, 0].tolist() == pytest.approx([abs(x[0, 1]), np.hypot(x[0, 2], x[0, 4])])


def test_equal_padding_gives_the_size_over_the_stride_with_ceil_mode_too() -> None:
    nodes = pool("MaxPool", [1], auto_pad="SAME_LOWER", ceil_mode=1, strides=[3])
    graph = load_model(model_of({"y": (13, [1, 1, 17], nodes)}, 13))
    assert graph.types["y"].shape == (1, 1, 6)


def test_a_declared_shape_that_is_not_computed_is_a_warning(caplog) -> None:
    case = {"y": CASES["max-ceil-odd"]}
    model = model_of(case, 17)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [1, 1, 5, "columns"]))
    assert load_model(model).types["y"].shape == (1, 1, 4, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "model: output 'y' is declared with shape [1,1,5,?], but its node computes f32[1,1,4,4]; "
        "the declared shape is ignored"
    ]
    caplog.clear()
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [1, 1, 4, "columns"]))
    load_model(model)
    assert not caplog.records
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 7, None))
    with pytest.raises(korch.errors.ModelError, match=r"declared with elements of type INT64"):
        load_model(model)
