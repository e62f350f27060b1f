import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from korch.errors import ModelError
from korch.fission import fission_with_report
from korch.frontend import load_model
from korch.primitive.check import check_graph
from korch.primitive.lowering import lower_products
from korch.primitive.reference import run
from korch.primitive.text import format_graph, parse_graph
from korch.primitive.types import DType, ValueType
from korch.testing.samples import random_array
from korch.testing.tolerance import assert_same
from tests.support.models import feeds_of, in_onnxruntime, one_operator


def _types(texts):
    return [ValueType.parse(text) if text else None for text in texts]


def _split(model):
    split, report = fission_with_report(load_model(model))
    graph = lower_products(split)
    check_graph(graph)
    constants = {c.digest: c.array for c in graph.constants.values()}
    assert parse_graph(format_graph(graph), constants) == graph
    return graph, report


def _check(op, texts, constants=None, opset=17, outputs=1, positive=False, **attributes):
    rng = np.random.default_rng(7)
    inputs = [None if t is None else random_array(rng, t) for t in _types(texts)]
    inputs = [np.abs(x) + x.dtype.type(0.1) if positive and x is not None else x for x in inputs]
    model = one_operator(op, inputs, constants=constants, opset=opset, outputs=outputs, **attributes)
    feeds = feeds_of(inputs, constants)
    graph, report = _split(model)
    assert not report.kept, report.kept
    found = run(graph, feeds, exact=False)
    for (name, array), reference in zip(found.items(), in_onnxruntime(model, feeds), strict=True):
        assert_same(array, reference, terms=256, name=name)
    return graph


def _ints(*values):
    return np.array(values, np.int64)


def _floats(*values):
    return np.array(values, np.float32)


X4 = "f32[2,4,7,5]"
CASES = [
    ("BitwiseAnd", ["i32[3,4]", "i32[4]"], {}, 18, {}),
    ("BitwiseXor", ["u8[3,4]", "u8[3,4]"], {}, 18, {}),
    ("BitwiseNot", ["i64[5]"], {}, 18, {}),
    ("BitShift", ["u32[5]", "u32[5]"], {}, 11, {"direction": "LEFT"}),
    ("BitShift", ["u8[5]", "u8[1]"], {}, 11, {"direction": "RIGHT"}),
    ("ScatterElements", ["f32[3,4]", None, "f32[2,2]"], {1: np.array([[0, -1], [2, 1]])}, 16, {"axis": 1}),
    ("ScatterND", ["f32[4,3]", None, "f32[2,3]"], {1: np.array([[3], [-4]])}, 16, {}),
    ("ScatterND", ["f32[4,3]", None, "f32[2]"], {1: np.array([[3, 0], [0, 2]])}, 16, {}),
    ("DequantizeLinear", ["i8[3,4,5]"], {1: _floats(0.5, 2.0, 0.1, 3.0), 2: np.array([1, -2, 0, 5], np.int8)}, 17, {}),
    ("DequantizeLinear", ["u8[3,4]"], {1: np.array(0.25, np.float32)}, 17, {}),
    ("QuantizeLinear", ["f32[3,4]"], {1: np.array(0.02, np.float32), 2: np.array(7, np.uint8)}, 17, {}),
    ("QuantizeLinear", ["f32[2,3]"], {1: _floats(0.004, 0.5, 2.0), 2: np.array([0, 3, -4], np.int8)}, 17, {}),
    ("ArgMax", [X4], {}, 13, {"axis": 1}),
    ("ArgMax", ["i32[3,9]"], {}, 13, {"axis": -1, "keepdims": 0}),
    ("ArgMax", ["f32[5,1]"], {}, 11, {"axis": 1}),
    ("ArgMax", ["i64[2,30,3]"], {}, 12, {"axis": 1, "select_last_index": 1}),
    ("ArgMin", [X4], {}, 13, {"axis": 2, "keepdims": 0}),
    ("ArgMin", ["i32[40]"], {}, 12, {"axis": 0, "select_last_index": 1}),
    # normalizations, odd shapes, axes of size 1
    ("Softmax", [X4], {}, 17, {"axis": 1}),
    ("Softmax", [X4], {}, 11, {"axis": 2}),
    ("Softmax", ["f32[3,1]"], {}, 13, {}),
    ("Softmax", ["f32[5]"], {}, 11, {"axis": 0}),
    ("LogSoftmax", [X4], {}, 11, {"axis": 1}),
    ("LogSoftmax", [X4], {}, 13, {"axis": -2}),
    ("LayerNormalization", ["f32[2,3,7]", "f32[7]", "f32[7]"], {}, 17, {"axis": -1}),
    ("LayerNormalization", ["f32[2,3,7]", "f32[3,7]"], {}, 17, {"axis": 1, "epsilon": 1e-2}),
    ("InstanceNormalization", ["f32[2,3,5,1]", "f32[3]", "f32[3]"], {}, 17, {"epsilon": 0.1}),
    ("InstanceNormalization", ["f32[1,3,9]", "f32[3]", "f32[3]"], {}, 11, {}),
    ("GroupNormalization", ["f32[2,6,5,3]", "f32[6]", "f32[6]"], {}, 21, {"num_groups": 3}),
    ("MeanVarianceNormalization", ["f32[2,3,4,5]"], {}, 13, {}),
    ("LpNormalization", [X4], {}, 11, {"axis": 1, "p": 1}),
    ("LpNormalization", [X4], {}, 11, {"axis": -1, "p": 2}),
    ("LRN", ["f32[1,5,3,4]"], {}, 13, {"size": 3, "alpha": 0.1, "beta": 0.6, "bias": 1.5}),
    ("LRN", ["f32[1,5,3,4]"], {}, 13, {"size": 7, "alpha": 0.1}),
    # pooling
    ("MaxPool", [X4], {}, 12, {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("MaxPool", [X4], {}, 12, {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 1, 0, 0]}),
    ("MaxPool", ["f32[1,2,9]"], {}, 11, {"kernel_shape": [3], "auto_pad": "SAME_LOWER", "strides": [2]}),
    ("AveragePool", [X4], {}, 17, {"kernel_shape": [3, 3], "pads": [1, 0, 1, 1]}),
    (
        "AveragePool",
        [X4],
        {},
        17,
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1, "strides": [2, 1]},
    ),
    ("AveragePool", ["f32[1,2,8]"], {}, 19, {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}),
    ("AveragePool", [X4], {}, 17, {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("LpPool", [X4], {}, 18, {"kernel_shape": [2, 2], "p": 2}),
    ("MaxPool", ["f32[1,3,4]"], {}, 20, {"kernel_shape": [1], "strides": [4]}),
    ("AveragePool", ["f32[1,3,2,13]"], {}, 20, {"kernel_shape": [1, 1], "strides": [3, 3], "ceil_mode": 1}),
    *(
        (op, [text], {}, 20, {"kernel_shape": kernel, "strides": strides, "auto_pad": auto})
        for op in ("AveragePool", "LpPool")
        for text, kernel, strides in (("f32[1,2,9]", [1], [5]), ("f32[1,2,5,6,7]", [2, 1, 1], [5, 4, 5]))
        for auto in ("SAME_UPPER", "SAME_LOWER")
    ),
    ("GlobalAveragePool", [X4], {}, 17, {}),
    ("GlobalMaxPool", ["f32[1,3,5]"], {}, 17, {}),
    ("GlobalLpPool", [X4], {}, 17, {}),
    ("GlobalLpPool", ["f32[1,3,5]"], {}, 17, {"p": 1}),
    ("GlobalLpPool", [X4], {}, 17, {"p": 3}),
    # linear
    (
        "Conv",
        ["f32[1,4,9,6]", "f32[6,2,3,3]", "f32[6]"],
        {},
        17,
        {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]},
    ),
    ("Conv", ["f32[2,3,9]", "f32[4,3,3]"], {}, 11, {"auto_pad": "SAME_LOWER", "strides": [2]}),
    ("Conv", ["f32[1,2,4,5,3]", "f32[3,2,2,2,2]"], {}, 11, {"auto_pad": "VALID"}),
    (
        "ConvTranspose",
        ["f32[1,4,3,5]", "f32[4,3,3,2]", "f32[6]"],
        {},
        17,
        {"group": 2, "strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 2]},
    ),
    ("ConvTranspose", ["f32[1,2,5]", "f32[2,3,3]"], {}, 11, {"auto_pad": "SAME_UPPER", "strides": [2]}),
    ("ConvTranspose", ["f32[1,2,5]", "f32[2,3,3]"], {}, 11, {"output_shape": [10], "strides": [2]}),
    *(
        ("ConvTranspose", [x, w], {}, 20, {"output_shape": out, **attributes})
        for x, w, out, attributes in (
            ("f32[1,1,6]", "f32[1,1,3]", [5], {}),
            ("f32[1,1,6]", "f32[1,1,1]", [5], {}),
            ("f32[1,2,6]", "f32[2,3,3]", [4], {"auto_pad": "SAME_UPPER"}),
            ("f32[1,2,6]", "f32[2,3,3]", [5], {"auto_pad": "SAME_LOWER"}),
            ("f32[2,4,5,4]", "f32[4,1,3,2]", [4, 6], {"group": 2, "strides": [1, 2], "dilations": [2, 1]}),
            ("f32[1,2,3,4,5]", "f32[2,1,1,2,3]", [2, 3, 9], {"strides": [1, 1, 2], "output_padding": [0, 0, 1]}),
        )
    ),
    ("ConvTranspose", ["f32[1,1,4]", "f32[1,1,2]"], {}, 20, {"auto_pad": "SAME_LOWER", "strides": [3]}),
    ("ConvTranspose", ["f32[1,1,4,3]", "f32[1,2,2,3]", "f32[2]"], {}, 17, {"strides": [3, 4], "dilations": [2, 2]}),
    ("ConvTranspose", ["f32[1,1,4,1]", "f32[1,2,4,3]"], {}, 17, {"strides": [2, 10000], "pads": [1, 0, 1, 1]}),
    *(
        (
            "ConvTranspose",
            ["f32[1,1,4]", "f32[1,1,3]"],
            {},
            20,
            {"auto_pad": auto, "strides": [2], "output_padding": [1]},
        )
        for auto in ("SAME_UPPER", "SAME_LOWER")
    ),
    ("MatMul", ["f32[3]", "f32[3]"], {}, 17, {}),
    ("MatMul", ["f32[2,5,3]", "f32[3]"], {}, 17, {}),
    ("MatMul", ["f32[3]", "f32[2,3,4]"], {}, 17, {}),
    ("MatMul", ["f32[2,1,5,3]", "f32[4,3,2]"], {}, 17, {}),
    ("Gemm", ["f32[3,4]", "f32[5,3]", "f32[5]"], {}, 17, {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", ["f32[4,3]", "f32[3,5]", "f32[4,1]"], {}, 11, {}),
    ("Gemm", ["f32[4,3]", "f32[3,5]"], {}, 13, {"alpha": 3.0}),
    ("Einsum", ["f32[2,3,4]", "f32[2,4,5]"], {}, 12, {"equation": "bij, bjk -> bik"}),
    ("Einsum", ["f32[2,3,4,5]", "f32[2,6,4,5]"], {}, 12, {"equation": "bhid,bkid->bikh"}),
    ("Einsum", ["f32[3,4]", "f32[5]"], {}, 12, {"equation": "ij,k->jki"}),
    ("Einsum", ["f32[3,4]"], {}, 12, {"equation": "ij->j"}),
    # layout
    ("Slice", [X4], {1: _ints(-1, 1), 2: _ints(-100, 3), 3: _ints(2, 1), 4: _ints(-2, 1)}, 13, {}),
    ("Slice", [X4], {1: _ints(3), 2: _ints(1)}, 11, {}),
    ("Split", [X4], {1: _ints(1, 0, 3)}, 13, {"axis": 1, "_outputs": 3}),
    ("Split", ["f32[7,2]"], {}, 18, {"num_outputs": 3, "_outputs": 3}),
    ("Split", ["f32[6,2]"], {}, 11, {"_outputs": 2}),
    ("Pad", [X4], {1: _ints(0, 0, 2, 1, 0, 0, 1, 3)}, 13, {"mode": "reflect"}),
    ("Pad", [X4], {1: _ints(0, 0, -2, 1, 0, 1, 1, -1), 2: _floats(1.5)[0]}, 13, {}),
    ("Pad", [X4], {1: _ints(1, 2), 3: _ints(-1)}, 18, {"mode": "edge"}),
    ("Pad", [X4], {1: _ints(0, 1, 3, 2, 1, 0, 0, 4)}, 19, {"mode": "wrap"}),
    ("Pad", [X4], {1: _ints(0, -1, 2, -1, 1, 0, -2, 3)}, 13, {"mode": "edge"}),
    ("Pad", [X4], {1: _ints(0, -1, 2, -1, 1, 0, -2, 2)}, 13, {"mode": "reflect"}),
    ("Pad", [X4], {1: _ints(0, -1, 2, -1, 1, 0, -2, 3)}, 19, {"mode": "wrap"}),
    ("Tile", ["f32[2,1,3]"], {1: _ints(2, 3, 1)}, 13, {}),
    ("Expand", ["f32[3,1]"], {1: _ints(2, 1, 4)}, 13, {}),
    ("Transpose", [X4], {}, 13, {}),
    ("Reshape", [X4], {1: _ints(0, -1, 5)}, 13, {}),
    ("Flatten", [X4], {}, 13, {"axis": -1}),
    ("Squeeze", ["f32[1,3,1]"], {1: _ints(0)}, 13, {}),
    ("Unsqueeze", ["f32[3]"], {}, 11, {"axes": [0, 2]}),
    ("Concat", ["f32[2,3]", "f32[2,0]", "f32[2,1]"], {}, 13, {"axis": -1}),
    ("Gather", [X4], {1: np.array([[-1, 0], [3, 3]])}, 13, {"axis": 2}),
    ("Gather", [X4], {1: np.array(1)}, 13, {"axis": 1}),
    ("GatherElements", ["f32[3,4]"], {1: np.array([[1, -1], [0, 2]])}, 13, {"axis": 1}),
    ("GatherND", ["f32[3,4,2]"], {1: np.array([[1, -1], [0, 2]])}, 13, {}),
    ("DepthToSpace", ["f32[1,8,2,3]"], {}, 13, {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", ["f32[1,2,4,6]"], {}, 13, {"blocksize": 2}),
    ("Trilu", ["f32[2,4,5]"], {1: np.array(-1)}, 14, {"upper": 0}),
    ("ReverseSequence", ["f32[4,3,2]"], {1: _ints(1, 4, 2)}, 10, {}),
    # reductions
    ("ReduceSum", [X4], {1: _ints(-1, 1)}, 13, {"keepdims": 0}),
    ("ReduceSum", [X4], {}, 13, {"noop_with_empty_axes": 1}),
    ("ReduceMean", [X4], {}, 11, {"axes": [2, 3]}),
    ("ReduceMax", [X4], {}, 11, {"axes": [-3], "keepdims": 0}),
    ("ReduceMin", ["i32[3,4]"], {}, 13, {}),
    ("ReduceProd", ["f32[3,4]"], {}, 13, {"axes": [1]}),
    ("ReduceL1", [X4], {}, 13, {"axes": [1]}),
    ("ReduceL2", [X4], {}, 13, {"axes": [1]}),
    ("ReduceSumSquare", [X4], {}, 13, {"axes": [1]}),
    ("ReduceLogSumExp", [X4], {}, 13, {"axes": [1, 2]}),
    # elementwise with broadcasting
    ("Add", ["f32[3,1,2]", "f32[4,1]"], {}, 14, {}),
    ("Sub", ["f32[]", "f32[2,3]"], {}, 14, {}),
    ("Div", ["i32[2,3]", "i32[1]"], {1: np.array([-3], np.int32)}, 14, {}),
    ("Pow", ["f32[2,3]", "f32[]"], {1: np.array(3.0, np.float32)}, 15, {}),
    ("Pow", ["f32[2,3]", "i64[3]"], {}, 15, {}),
    ("Mod", ["i64[7]", "i64[1]"], {1: _ints(-3)}, 13, {}),
    ("Mod", ["i64[7]", "i64[1]"], {1: _ints(-3)}, 13, {"fmod": 1}),
    ("Mod", ["f32[7]", "f32[7]"], {}, 13, {"fmod": 1}),
    ("Max", ["f32[3,1]", "f32[2]", "f32[]"], {}, 13, {}),
    ("Mean", ["f32[3,1]", "f32[2]", "f32[]"], {}, 13, {}),
    ("Sum", ["f32[3]"], {}, 13, {}),
    ("Where", ["bool[3,1]", "f32[2]", "f32[]"], {}, 16, {}),
    ("Clip", [X4], {1: np.array(-0.5, np.float32)}, 13, {}),
    ("Clip", [X4, "", "f32[]"], {}, 13, {}),
    ("Cast", ["f32[9]"], {}, 13, {"to": 7}),
    ("PRelu", [X4, "f32[4,1,1]"], {}, 16, {}),
    ("Gelu", [X4], {}, 20, {"approximate": "tanh"}),
    ("Celu", [X4], {}, 12, {"alpha": 2.0}),
    ("Shrink", [X4], {}, 9, {"bias": 0.5, "lambd": 0.3}),
    ("ThresholdedRelu", [X4], {}, 10, {"alpha": 0.4}),
    ("LeakyRelu", [X4], {}, 16, {"alpha": 1.5}),
    ("Greater", ["f32[3,1]", "f32[2]"], {}, 13, {}),
    ("Equal", ["i32[3,1]", "i32[2]"], {}, 13, {}),
    ("IsInf", ["f32[3]"], {}, 10, {"detect_negative": 0}),
    ("Dropout", ["f32[3]"], {}, 13, {"_outputs": 2}),
]


@pytest.mark.parametrize(
    ("op", "texts", "constants", "opset", "attributes"),
    CASES,
    ids=[f"{i}-{case[0]}-{case[3]}" for i, case in enumerate(CASES)],
)
def test_agrees_with_onnxruntime(op, texts, constants, opset, attributes):
    attributes = dict(attributes)
    outputs = attributes.pop("_outputs", 1)
    _check(op, texts, constants, opset, outputs, **attributes)


RESIZES = [
    (mode, coordinates, rounding, opset)
    for opset in (11, 19)
    for mode in ("nearest", "linear", "cubic")
    for coordinates in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    for rounding in (("floor", "ceil", "round_prefer_floor", "round_prefer_ceil") if mode == "nearest" else ("floor",))
]


@pytest.mark.parametrize(("mode", "coordinates", "rounding", "opset"), RESIZES)
@pytest.mark.parametrize("size", [(8, 14), (3, 5), (4, 9), (1, 14)])
def test_resize_agrees_with_onnxruntime(mode, coordinates, rounding, opset, size):
    constants = {1: _floats(), 2: _floats(), 3: _ints(1, 2, *size)}
    _check(
        "Resize",
        ["f32[1,2,4,7]", "", ""],
        constants,
        opset,
        mode=mode,
        nearest_mode=rounding,
        coordinate_transformation_mode=coordinates,
    )


def test_upsample_9_and_scales():
    scales = _floats(1, 1, 2, 3)
    graph = _check("Upsample", ["f32[1,2,3,4]"], {1: scales}, 9, mode="nearest")
    assert {p.op for p in graph.primitives} == {"take"}
    _check("Resize", ["f32[1,2,3,4]", ""], {2: scales}, 13, mode="linear")


def test_rounding_errors_of_scales_do_not_choose_other_elements():
    for rounding, scale in itertools.product(
        ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"), (1 / 3, 2 / 3)
    ):
        more = {"mode": "nearest", "nearest_mode": rounding, "coordinate_transformation_mode": "asymmetric"}
        _check("Resize", ["f32[1,1,9]", ""], {2: _floats(1, 1, scale)}, 13, **more)


@pytest.mark.parametrize(
    ("dtype", "more", "found"),
    [
        (np.float64, {}, DType.F32),
        (np.float32, {"stash_type": TensorProto.BFLOAT16}, DType.BF16),
        (np.float16, {}, DType.F32),
    ],
)
def test_statistics_of_a_normalization_have_their_own_type(dtype, more, found):
    x = np.arange(6, dtype=dtype).reshape(2, 3)
    graph, _ = _split(one_operator("LayerNormalization", [x, x[0]], outputs=3, **more))
    assert [graph.types[value].dtype for _, value in graph.outputs][1:] == [found, found]
    y, mean, inverse = (array.astype(np.float64) for array in run(graph, {"x0": x, "x1": x[0]}).values())
    np.testing.assert_allclose(mean, [[1], [4]])
    np.testing.assert_allclose(inverse, [[1.5**0.5]] * 2, rtol=5e-3)
    np.testing.assert_allclose(y[:, 1:], [[0, 2 * 1.5**0.5]] * 2, rtol=2e-3, atol=1e-3)


SPECIAL_OPERATORS = [
    "Abs",
    "Neg",
    "Relu",
    "Sigmoid",
    "Tanh",
    "Erf",
    "Exp",
    "Sqrt",
    "Sign",
    "Floor",
    "Round",
    "Softplus",
    "Softsign",
    "Elu",
    "Selu",
    "HardSigmoid",
    "HardSwish",
    "IsNaN",
    "IsInf",
    "LeakyRelu",
    "Reciprocal",
    "ReduceMax",
    "ReduceSum",
    "Softmax",
]


@pytest.mark.parametrize("op", SPECIAL_OPERATORS)
def test_nan_and_infinities_travel_as_in_onnx(op):
    x = _floats(1, -1, 0, -0.0, 88, -200, np.inf, -np.inf, np.nan, 1e-3)[:, None]
    attributes = {"axis": 1} if op == "Softmax" else {}
    attributes = {"keepdims": 1} if op.startswith("Reduce") else attributes
    model = one_operator(op, [x], **attributes)
    graph, _ = _split(model)
    with np.errstate(all="ignore"):
        (expected,) = ReferenceEvaluator(model).run(None, {"x0": x})
    found = run(graph, {"x0": x}, exact=False)["y0"]
    if op in ("HardSwish", "Softsign", "Elu", "Selu"):  # NumPy's own formula may make NaN of inf
        finite = np.isfinite(x)
        found, expected = found[finite], expected[finite]
    assert_same(found, expected, terms=4, scale=1.0)


@pytest.mark.parametrize("more", [{}, {"max": 0.5}])
def test_bounds_of_early_clips_are_finite_by_default(more):
    x, most = _floats(-np.inf, 1, np.inf, np.nan, -3), np.finfo(np.float32).max
    graph, _ = _split(one_operator("Clip", [x], opset=10, **more))
    wanted = [-most, 0.5, 0.5] if more else [-most, 1, most]
    np.testing.assert_array_equal(run(graph, {"x0": x})["y0"], [*wanted, np.nan, -3])


def test_an_element_of_a_transposed_convolution_has_no_products_but_its_own():
    """With stride 2, a window of three taps has one or two of them: no product of zero and infinity is added."""
    inputs = [np.array([[[np.inf, 1, np.nan, 2]]], np.float32), np.ones((1, 1, 3), np.float32)]
    graph, report = _split(one_operator("ConvTranspose", inputs, opset=17, strides=[2]))
    assert not report.kept and all(p.op != "opaque" for p in graph.primitives)
    (found,) = run(graph, feeds_of(inputs)).values()
    np.testing.assert_array_equal(found.ravel(), [np.inf, np.inf, np.inf, 1, np.nan, np.nan, np.nan, 2, 2])


def test_windows_of_transposed_convolutions_that_reach_too_far_are_refused():
    inputs = [np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 2), np.float32)]
    with pytest.raises(ModelError, match=r"its windows reach over 2199023255\d\d\d elements"):
        _split(one_operator("ConvTranspose", inputs, opset=17, dilations=[2**41], pads=[2**40, 2**40]))
    _, report = _split(one_operator("ConvTranspose", inputs, opset=17, strides=[2**20], pads=[2**19, 2**19]))
    assert [item.reason for item in report.kept] == ["a long stride"]


def test_softmax_of_large_logits_is_finite_and_of_a_masked_row_is_nan():
    x = np.array([[1000, 999, -np.inf], [-np.inf] * 3], np.float32)
    graph, _ = _split(one_operator("Softmax", [x]))
    with np.errstate(invalid="ignore"):
        found = run(graph, {"x0": x}, exact=False)["y0"]
    np.testing.assert_allclose(found[0], [0.7310586, 0.26894143, 0], rtol=1e-6)
    assert np.isnan(found[1]).all()


def test_log_sum_exp_of_infinities_is_infinite():
    x = np.array([[-np.inf, -np.inf], [np.inf, 0], [1000, 1000]], np.float32)
    graph, _ = _split(one_operator("ReduceLogSumExp", [x], axes=[1]))
    found = run(graph, {"x0": x}, exact=False)["y0"]
    np.testing.assert_allclose(found, [[-np.inf], [np.inf], [1000 + np.log(2)]], rtol=1e-6)


def test_variance_does_not_cancel_where_the_mean_is_large():
    x = (10_000 + np.random.default_rng(0).standard_normal((1, 64))).astype(np.float32)
    ones, zeros = np.ones(64, np.float32), np.zeros(64, np.float32)
    graph, _ = _split(one_operator("LayerNormalization", [x, ones, zeros], axis=-1))
    feeds = {"x0": x, "x1": ones, "x2": zeros}
    narrow, exact = run(graph, feeds, exact=False)["y0"], run(graph, feeds)["y0"]
    np.testing.assert_allclose(narrow, exact, atol=2e-3)


@pytest.mark.parametrize(("zeros", "is_stored"), [([128, 128, 100], True), ([128, 128, 0], False)])
def test_zero_points_of_constants_are_subtracted_where_bytes_remain(zeros, is_stored):
    q = np.array([[0, 255, 200], [128, 1, 130]], np.uint8)
    scale, zero = np.array([0.5, 2, 1], np.float32), np.array(zeros, np.uint8)
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x) => (float[1,3] y) {
             w = DequantizeLinear <axis = 1> (q, scale, zero)
             y = MatMul(x, w)
           }"""
    )
    constants = {"q": q, "scale": scale, "zero": zero}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    graph, _ = _split(model)
    signed = [c.array.tolist() for c in graph.constants.values() if c.type.dtype is DType.I8]
    assert signed == ([(q.astype(int) - zero).tolist()] if is_stored else [])
    x = np.array([[1, -3]], np.float32)
    np.testing.assert_array_equal(run(graph, {"x": x})["y"], x @ ((q.astype(np.float32) - zero) * scale))


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize("block", [0, 16, 5])
def test_weights_of_four_bits_stay_packed(kind, block):
    rng, low = np.random.default_rng(3), -8 if kind == TensorProto.INT4 else 0
    shape = (-(-33 // block), 3) if block else (3,)
    numbers = rng.integers(low, low + 16, (33, 3))
    points = rng.integers(low, low + 16, shape)
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], **attributes),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    tensors = [
        helper.make_tensor("q", kind, (33, 3), numbers.reshape(-1).tolist()),
        helper.make_tensor("z", kind, shape, points.reshape(-1).tolist()),
        numpy_helper.from_array(rng.uniform(0.1, 1, shape).astype(np.float32), "s"),
    ]
    x, y = (helper.make_tensor_value_info(name, 1, sizes) for name, sizes in (("x", (2, 33)), ("y", (2, 3))))
    made = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    graph, _ = _split(model)
    assert any(c.type == ValueType((33, 2, 1), DType.U8) for c in graph.constants.values())
    scale, zero = (np.repeat(a, block, 0)[:33] if block else a for a in (numpy_helper.to_array(tensors[2]), points))
    data = rng.normal(size=(2, 33)).astype(np.float32)
    np.testing.assert_allclose(run(graph, {"x": data})["y"], data @ ((numbers - zero) * scale), rtol=1e-4, atol=1e-4)


def test_constants_of_one_axis_have_blocks():
    constants = {0: np.arange(8, dtype=np.uint8), 1: _floats(0.5, 2), 2: np.array([3, 5], np.uint8)}
    graph, _ = _split(one_operator("DequantizeLinear", [], constants=constants, opset=21, axis=0, block_size=4))
    np.testing.assert_array_equal(run(graph, {})["y0"], [-1.5, -1, -0.5, 0, -2, 0, 2, 4])


@pytest.mark.parametrize(
    ("shape", "attributes", "text"),
    [
        ((4,), {}, r"the shape \[4\] do not fit axis 1 of \[8, 5\]; expected one number, or 5"),
        ((5,), {"axis": 2}, "the axis 2 is none of the 2 axes of the data"),
        ((5,), {"axis": -3}, "the axis -1 is none of the 2 axes of the data"),
        ((2, 5), {"axis": 0, "block_size": -4}, "block_size is -4, not at least 0"),
        ((3, 5), {"axis": 0, "block_size": 4}, r"blocks of 4 have the shape \[3, 5\], not \[2, 5\]"),
    ],
)
def test_scales_that_do_not_fit_are_one_clear_error(shape, attributes, text):
    inputs = [np.zeros((8, 5), np.int8), np.ones(shape, np.float32)]
    with pytest.raises(ModelError, match=f"DequantizeLinear .*{text}"):
        _split(one_operator("DequantizeLinear", inputs, opset=21, **attributes))


@pytest.mark.parametrize("op", ["Add", "Mul", "Softmax", "ReduceMax", "Transpose", "Relu"])
def test_empty_tensors(op):
    x = np.zeros((2, 0, 3), np.float32)
    inputs = [x, x] if op in ("Add", "Mul") else [x]
    graph, _ = _split(one_operator(op, inputs, **({"axes": [1]} if op == "ReduceMax" else {})))
    (found,) = run(graph, feeds_of(inputs), exact=False).values()
    if op == "ReduceMax":
        assert np.isneginf(found).all()
    else:
        assert found.size == 0


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("op", ["Add", "Softmax", "Gelu", "ReduceMean"])
def test_half_precision_stays_in_its_type(dtype, op):
    x = random_array(np.random.default_rng(0), ValueType((3, 8), dtype))
    inputs = [x, x] if op == "Add" else [x]
    graph, report = _split(one_operator(op, inputs, opset=20))
    assert not report.kept
    found, exact = (run(graph, feeds_of(inputs), exact=e)["y0"] for e in (False, True))
    assert found.dtype == dtype.numpy
    assert_same(found, exact, scale=1.0)


@pytest.mark.parametrize("shape", [(), (3,), (1, 1, 1, 1, 2)])
@pytest.mark.parametrize("op", ["Relu", "Sigmoid", "ReduceSum", "Identity"])
def test_every_rank(shape, op):
    x = random_array(np.random.default_rng(0), ValueType(shape, DType.F32))
    model = one_operator(op, [x], opset=13)
    graph, _ = _split(model)
    (expected,) = ReferenceEvaluator(model).run(None, {"x0": x})
    assert_same(run(graph, {"x0": x}, exact=False)["y0"], np.asarray(expected), terms=4)


def test_a_window_of_channels_is_no_larger_than_they_are_many():
    x = random_array(np.random.default_rng(7), next(iter(_types(["f32[1,5,3,4]"]))))
    model = one_operator("LRN", [x], opset=13, size=2**63 - 1, alpha=3.0, bias=2.0, beta=1.0)
    graph, _ = _split(model)
    (found,) = run(graph, feeds_of([x], None)).values()
    np.testing.assert_allclose(found, x / 2, rtol=1e-6)
    with pytest.raises(ModelError, match=r"contradict the operator's definition \(size is 0\)"):
        _split(one_operator("LRN", [x], opset=13, size=0))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2**40, 1], "auto_pad": "SAME_UPPER"},
        {"kernel_shape": [2**40, 1], "pads": [2**39, 0, 2**39, 0]},
        {"kernel_shape": [2, 2], "dilations": [2**40, 1], "pads": [2**39, 0, 2**39, 0]},
    ],
)
def test_windows_larger_than_any_memory_are_refused(op, attributes):
    x = np.zeros((1, 1, 5, 5), np.float32)
    with pytest.raises(ModelError, match=r"its windows reach over 10995116277\d\d elements"):
        _split(one_operator(op, [x], opset=19, **attributes))
