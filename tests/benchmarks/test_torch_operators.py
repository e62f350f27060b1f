import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from korch.errors import UnsupportedError
from tests.support.models import one_operator, parsed

torch = pytest.importorskip("torch", reason="the PyTorch peers need PyTorch, which is optional")

from benchmarks.peers.torch_operators import TRANSLATORS  # noqa: E402
from benchmarks.peers.torch_operators.module import load_module  # noqa: E402


def _floats(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _positive(*shape):
    return np.abs(_floats(*shape)) + 0.5


def _ints(*values):
    return np.array(values, np.int64)


X = _floats(1, 4, 6, 6)
# operator, inputs (arrays: the first is the model's input, others constants; "" none), attributes
CASES = [
    *[(op, [X], {}) for op in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSigmoid")],
    *[(op, [X], {}) for op in ("HardSwish", "Identity", "LeakyRelu", "Neg", "Relu")],
    *[(op, [X], {}) for op in ("Round", "Sigmoid", "Sign", "Sin", "Softplus", "Tanh")],
    *[(op, [_positive(2, 3)], {}) for op in ("Log", "Reciprocal", "Sqrt")],
    *[(op, [X, _positive(4, 1, 1)], {}) for op in ("Add", "Sub", "Mul", "Div", "Max")],
    *[(op, [X, _positive(6), _floats(6, 6)], {}) for op in ("Min", "Sum", "Max")],
    ("Pow", [_positive(2, 3), np.array(1.5, np.float32)], {}),
    ("Div", [_ints(-7, 7, 5), _ints(2, -2, 3)], {}),
    ("Clip", [X, np.array(-0.5, np.float32), np.array(0.25, np.float32)], {}),
    ("Clip", [X, "", np.array(0.25, np.float32)], {}),
    ("Clip", [_ints(-3, 0, 9), np.array(0, np.int64), np.array(5, np.int64)], {}),
    ("Gelu", [X], {"approximate": "tanh"}),
    ("Gelu", [X], {}),
    ("Cast", [X], {"to": TensorProto.INT64}),
    *[(op, [_floats(6, 6), _floats(6)], {}) for op in ("Greater", "Less", "GreaterOrEqual")],
    ("LessOrEqual", [_ints(1, 2, 3), _ints(2, 2, 2)], {}),
    ("Equal", [_ints(1, 2, 3), _ints(2, 2, 2)], {}),
    ("Not", [np.array([True, False])], {}),
    *[(op, [np.array([True, False]), np.array([True, True])], {}) for op in ("And", "Or")],
    ("Where", [_floats(3, 3) > 0, _floats(3, 3), np.array(9, np.float32)], {}),
    ("Conv", [X, _floats(8, 4, 3, 3), _floats(8)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("Conv", [X, _floats(8, 2, 3, 3)], {"group": 2, "pads": [0, 1, 2, 1], "dilations": [2, 1]}),
    ("Conv", [_floats(1, 4, 9), _floats(8, 4, 3)], {"pads": [1, 1]}),
    ("Gemm", [_floats(3, 4), _floats(5, 4), _floats(5)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", [_floats(4, 3), _floats(4, 5)], {"transA": 1}),
    ("MatMul", [_floats(2, 3, 4), _floats(4, 5)], {}),
    ("MaxPool", [X], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [X], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
    ("MaxPool", [X], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("GlobalAveragePool", [X], {}),
    ("BatchNormalization", [X, _floats(4), _floats(4), _floats(4), _positive(4)], {}),
    ("InstanceNormalization", [X, _floats(4), _floats(4)], {"epsilon": 1e-3}),
    ("LayerNormalization", [X, _floats(6, 6), _floats(6, 6)], {"axis": -2}),
    ("LayerNormalization", [X, _floats(6)], {}),
    ("Softmax", [X], {"axis": 1}),
    *[(op, [X, _ints(1, -1)], {}) for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")],
    ("ReduceMean", [X, _ints(1, -1)], {"keepdims": 0}),
    ("ReduceMean", [X], {}),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}),
    ("ArgMax", [X], {"axis": 2, "keepdims": 0}),
    ("Reshape", [X, _ints(0, -1, 9)], {}),
    ("Transpose", [X], {"perm": [0, 2, 3, 1]}),
    ("Transpose", [_floats(2, 3)], {}),
    *[("Flatten", [X], {"axis": axis}) for axis in (0, 2, -1)],
    ("Unsqueeze", [_floats(3, 2), _ints(0, -1)], {}),
    ("Concat", [X, _floats(1, 2, 6, 6)], {"axis": 1}),
    ("Slice", [X, _ints(1, -3), _ints(3, 2**40), _ints(1, 3)], {}),
    ("Slice", [X, _ints(-1), _ints(-(2**40)), _ints(2), _ints(-2)], {}),
    ("Gather", [X, np.array([[0, -1], [1, 2]], np.int64)], {"axis": 1}),
    ("Gather", [X, np.array(1, np.int64)], {"axis": 2}),
    ("Pad", [X, _ints(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "reflect"}),
    ("Pad", [X, _ints(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "edge"}),
    ("Pad", [X, _ints(0, 1, 0, 2, 0, 0, 0, 1), np.array(3, np.float32)], {}),
    ("Pad", [X, _ints(1, 2), "", _ints(-1)], {}),
    ("Expand", [_floats(3, 1), _ints(2, 1, 4)], {}),
    (
        "Resize",
        [X, "", np.array([1, 1, 2, 3], np.float32)],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    ("Resize", [X, "", np.array([1, 1, 2, 3], np.float32)], {}),
    ("Resize", [X, "", "", _ints(1, 4, 9, 4)], {"mode": "linear"}),
    ("Resize", [X, "", np.array([1, 1, 2, 3], np.float32)], {"mode": "cubic"}),
    (
        "Resize",
        [X, "", np.array([1, 1, 1.5, 2], np.float32)],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
]


def _model(op_type, inputs, attributes, opset, outputs=1):
    constants = {i: a for i, a in enumerate(inputs) if i and not isinstance(a, str)}
    model = one_operator(op_type, inputs[:1], constants=constants, opset=opset, outputs=outputs, **attributes)
    return onnx.shape_inference.infer_shapes(model)


def _check(model, x, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x0": x})
    with torch.no_grad():
        got = load_module(path, {"x0": x.shape})(torch.from_numpy(x))
    assert len(got) == len(expected)
    for value, reference in zip(got, expected, strict=True):
        assert value.numpy().dtype == reference.dtype
        assert tuple(value.shape) == reference.shape
        np.testing.assert_allclose(value.numpy(), reference, rtol=1e-4, atol=1e-5)


def _name(case):
    return case[0]


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_operator_means_what_onnxruntime_computes(case, tmp_path):
    op_type, inputs, attributes = case
    _check(_model(op_type, inputs, attributes, 21), inputs[0], tmp_path)


def test_constants_are_folded_by_the_meaning_of_the_models_opset(tmp_path):
    text = "(float[3,4] x0) => (float[3,4] y) { column = Unsqueeze<axes = [1]>(c) y = Mul(x0, column) }"
    model = parsed(text, 11, c=_floats(3))  # axes are an input from opset 13 on
    _check(model, _floats(3, 4), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        ("Split", [X, _ints(1, 3)], {"axis": 1}, 17, 2),
        ("Split", [X], {"axis": 1}, 13, 2),
        ("Split", [X], {"axis": 1, "split": [3, 1]}, 11, 2),
        ("Softmax", [X], {"axis": 2}, 11, 1),
        ("ReduceMean", [X], {"axes": [2, 3]}, 13, 1),
        ("Unsqueeze", [_floats(3)], {"axes": [0, 2]}, 11, 1),
        ("Clip", [X], {"min": 0.0}, 10, 1),
        ("Slice", [X], {"starts": [1], "ends": [3]}, 9, 1),
    ],
    ids=_name,
)
def test_older_forms_of_operators(case, tmp_path):
    op_type, inputs, attributes, opset, outputs = case
    _check(_model(op_type, inputs, attributes, opset, outputs), inputs[0], tmp_path)


def test_each_translator_is_tested():
    assert {case[0] for case in CASES} | {"Split"} == set(TRANSLATORS)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "reason"),
    [
        ("Conv", [X, _floats(8, 4, 3, 3)], {"auto_pad": "SAME_UPPER"}, "auto_pad='SAME_UPPER'"),
        ("Pad", [X, _ints(0, 0, 1, 1, 0, 0, 1, 1)], {"mode": "wrap"}, "mode='wrap'"),
        (
            "Resize",
            [X, "", np.array([1, 1, 2, 2], np.float32)],
            {"mode": "cubic", "exclude_outside": 1},
            "exclude_outside=1",
        ),
        (
            "Resize",
            [X, "", np.array([1, 1, 2, 2], np.float32)],
            {"nearest_mode": "floor"},
            "mode='nearest', half_pixel and floor",
        ),
        (
            "Resize",
            [X, "", np.array([1, 1, 2, 2], np.float32)],
            {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
            "mode='linear' and asymmetric",
        ),
        ("Resize", [X, "", np.array([1, 2, 2, 2], np.float32)], {}, "a scale of the batch or the channels"),
        ("Resize", [X, "", np.array([1, 1, 2, 2], np.float32)], {"antialias": 1}, "antialias=1"),
        ("ArgMax", [X], {"select_last_index": 1}, "select_last_index=1"),
    ],
)
def test_forms_without_a_translation_are_refused(op_type, inputs, attributes, reason, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(_model(op_type, inputs, attributes, 19), path)
    with pytest.raises(UnsupportedError, match=f"^it: the PyTorch peers don't run {op_type} with {reason}. "):
        load_module(path, {"x0": X.shape})


def test_an_operator_without_a_translator_and_a_computed_shape_are_refused(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(_model("Det", [_floats(3, 3)], {}, 17), path)
    with pytest.raises(UnsupportedError, match="it: the PyTorch peers have no operator Det"):
        load_module(path, {"x0": (3, 3)})
    onnx.save(parsed("(float[4] x0, int64[2] shape) => (float[2,2] y) { y = Reshape(x0, shape) }"), path)
    with pytest.raises(UnsupportedError, match="the shape of its output 'y' depends on data"):
        load_module(path, {"x0": (4,), "shape": (2,)})


def test_shape_computations_are_folded_for_the_given_shapes(tmp_path):
    """x reshaped to (batch, -1) by Shape, Gather, Unsqueeze and Concat, as exporters write it."""
    text = """(float[batch,3,4] x0) => (float[] y) {
        shape = Shape(x0)
        batch = Gather(shape, zero)
        target = Concat<axis = 0>(batch, rest)
        y = Reshape(x0, target)
    }"""
    model = parsed(text, zero=_ints(0), rest=_ints(-1))
    _check(model, _floats(2, 3, 4), tmp_path)
