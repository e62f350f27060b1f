"""References that differ: two that agree decide, whatever their order; a dispute without a decision is noted as one."""

import sys

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from korch.primitive.agreed import NUMPY, REFERENCE, RUNTIME, TORCH, agreed, largest_difference, opinions_of
from korch.primitive.definitions import by_definition
from korch.primitive.dispute import noted_disputes
from korch.primitive.ops import OPS, opaque
from korch.primitive.ops.opaque import OpaqueAttributes
from tests.support.models import feeds_of, in_onnxruntime, one_operator

ONE, TWO = [np.array([1.0, 2.0], np.float32)], [np.array([1.0, 3.0], np.float32)]


def opinion(outputs):
    def computed(like):
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    return computed


@pytest.mark.parametrize(
    ("outputs", "followed", "others"),
    [
        ([ONE, ONE, TWO], "ab", ""),
        ([ONE, TWO, TWO], "bc", "a"),
        ([ONE, TWO, ONE], "ac", "b"),
        ([None, TWO, ValueError(), TWO], "bd", ""),
        ([ONE], "a", ""),
        ([ONE, TWO], "a", "b"),
    ],
)
def test_two_that_agree_are_followed(outputs, followed, others) -> None:
    with noted_disputes() as disputes:
        found, names = agreed("Op", {name: opinion(o) for name, o in zip("abcd", outputs, strict=False)})
    assert "".join(names) == followed
    assert found is outputs["abcd".index(followed[0])]
    assert ["".join(d.others) for d in disputes.values()] == [others] * bool(others)
    assert all(d.is_decided == (len(followed) > 1) for d in disputes.values())


def test_no_reference_is_asked_after_two_agree() -> None:
    def fail(like):
        raise AssertionError

    assert agreed("Op", {"a": opinion(ONE), "b": opinion(ONE), "c": fail})[1] == ("a", "b")
    assert agreed("Op", {"a": opinion(None), "b": fail}) is None


def test_lines_for_users() -> None:
    with noted_disputes() as outside, noted_disputes() as disputes:
        agreed("Det d", {RUNTIME: opinion(ONE), REFERENCE: opinion(TWO), NUMPY: opinion(ONE)})
        agreed("Det e", {RUNTIME: opinion(ONE), REFERENCE: opinion([np.zeros(3)])})
    assert [d.text for d in disputes.values()] == [
        "Det d: ONNX Runtime and NumPy agree and were followed; onnx.reference differs by 5.0e-01 of the largest",
        "Det e: ONNX Runtime was followed; onnx.reference differs in shape or special numbers, "
        "and no third reference decides",
    ]
    assert outside == disputes


@pytest.mark.parametrize(("of_runtime", "others"), [(None, ()), (TWO, (RUNTIME,))])
def test_an_opaque_node_of_one_reference_is_noted(monkeypatch, of_runtime, others) -> None:
    opinions = {RUNTIME: opinion(of_runtime), REFERENCE: opinion(ONE)}
    monkeypatch.setattr(opaque, "opinions_of", lambda *_: opinions)
    node = onnx.helper.make_node("Elu", ["x0"], ["y0"])
    attributes = OpaqueAttributes("Elu", "", 17, node.SerializeToString().hex(), ("f32[2]",), ("f32[2]",), 0)
    with noted_disputes() as disputes:
        found = OPS["opaque"].reference(ONE, attributes)
    assert found is ONE[0]  # that of the runtime is not followed, because it runs the node in plans
    assert [(d.node, d.followed, d.others) for d in disputes.values()] == [("Elu", (REFERENCE,), others)]


def test_a_reference_that_takes_too_long_is_given_up() -> None:
    rows = np.eye(3, dtype=np.float32)
    opinions = opinions_of(one_operator("NonZero", [rows]), feeds_of([rows]), limit_s=0)
    with pytest.raises(TimeoutError):
        opinions[REFERENCE](None)
    assert sys.getprofile() is None
    assert agreed("NonZero", opinions)[1] == (RUNTIME,)


@pytest.mark.parametrize(
    ("a", "b", "is_equal"),
    [
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([np.nan, np.inf], [np.nan, np.inf], True),
        ([np.nan, 1.0], [1.0, 1.0], False),
        ([np.inf, 1.0], [-np.inf, 1.0], False),
        ([1, 2], [1, 3], False),
        (["a"], ["b"], False),
        ([], [], True),
        ([[1.0]], [1.0], False),
    ],
)
def test_which_results_are_equal(a, b, is_equal) -> None:
    assert (largest_difference([np.array(a)], [np.array(b)]) <= 1) == is_equal


UNIQUE = np.random.default_rng(0).integers(0, 4, (3, 4)).astype(np.float32)


@pytest.mark.parametrize("is_sorted", [0, 1])
@pytest.mark.parametrize("attributes", [{}, {"axis": 0}, {"axis": 1}])
def test_unique_elements(is_sorted: int, attributes) -> None:
    model = one_operator("Unique", [UNIQUE], opset=11, outputs=4, sorted=is_sorted, **attributes)
    expected = in_onnxruntime(model, feeds_of([UNIQUE]))
    for array, wanted in zip(by_definition(model.graph.node[0], [UNIQUE], 11), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


IMAGE = np.random.default_rng(2).standard_normal((2, 3, 5)).astype(np.float32)
PAIRS, ONES, LENGTH = IMAGE[..., :2].copy(), np.ones(3, np.float32), np.array(4)
KERNEL = np.random.default_rng(3).standard_normal((3, 2, 3)).astype(np.float32)
CROP = np.array([0, 0.2, -0.2, 1, 0.9, 1.1], np.float32)
SMALL = np.random.default_rng(4).integers(-9, 9, (1, 1, 4, 5)).astype(np.int8)
WIDER = np.array([1, 1, 1.6, 1.3], np.float32)
CROPPED = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 0.5}
DEFINED = [
    ("Softmax", [IMAGE], 13, {"axis": 1}),
    ("LogSoftmax", [IMAGE], 11, {"axis": 1}),
    ("LRN", [IMAGE[..., None]], 13, {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 2.0}),
    ("LRN", [IMAGE[..., None]], 13, {"size": 1}),
    ("DFT", [PAIRS], 17, {}),
    ("DFT", [PAIRS, LENGTH], 17, {"inverse": 1}),
    ("DFT", [IMAGE[..., :1].copy(), LENGTH, np.array(-2)], 20, {"onesided": 1}),
    ("BatchNormalization", [IMAGE, ONES, 2 * ONES, IMAGE[0, :, 0].copy(), 3 * ONES], 15, {"epsilon": 0.1}),
    ("GlobalMaxPool", [IMAGE], 22, {}),
    ("AveragePool", [IMAGE], 19, {"kernel_shape": [2], "strides": [3], "ceil_mode": 1, "pads": [1, 0]}),
    ("AveragePool", [IMAGE], 19, {"kernel_shape": [3], "dilations": [2], "pads": [2, 1], "count_include_pad": 1}),
    ("AveragePool", [IMAGE], 11, {"kernel_shape": [2], "strides": [3], "auto_pad": "SAME_LOWER"}),
    ("ConvTranspose", [IMAGE, KERNEL, ONES[:2]], 11, {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    ("ConvTranspose", [IMAGE[:, :2], KERNEL[:2]], 11, {"group": 2, "dilations": [2]}),
    ("ConvTranspose", [IMAGE, KERNEL], 22, {"strides": [3], "output_shape": [12]}),
    ("ConvTranspose", [IMAGE, KERNEL], 11, {"strides": [2], "auto_pad": "SAME_LOWER"}),
    ("LpPool", [IMAGE], 18, {"kernel_shape": [3], "p": 3, "auto_pad": "SAME_UPPER"}),
    ("LpPool", [IMAGE], 22, {"kernel_shape": [2], "p": 1, "strides": [2]}),
    ("MaxPool", [IMAGE], 12, {"kernel_shape": [2], "strides": [3], "pads": [1, 1], "ceil_mode": 1}),
    ("LpNormalization", [IMAGE], 22, {"p": 1, "axis": 1}),
    ("LpNormalization", [0 * IMAGE], 22, {}),
    ("Mean", [IMAGE, IMAGE[0], ONES[:, None]], 13, {}),
    ("ReduceSumSquare", [IMAGE.astype(np.int32), np.array([0, -1])], 18, {"keepdims": 0}),
    ("STFT", [IMAGE[0, :, :, None].copy(), np.array(2), ONES], 17, {"onesided": 0}),
    ("STFT", [PAIRS, np.array(1), None, np.array(2)], 17, {"onesided": 0}),
    ("Slice", [IMAGE, np.array([9, -9]), np.array([-9, 9]), np.array([2, -2]), np.array([-2, 2])], 13, {}),
    ("Slice", [IMAGE], 9, {"starts": [1], "ends": [-1], "axes": [2]}),
    ("Resize", [IMAGE, np.array([1, 1, 1.6], np.float32)], 10, {"mode": "linear"}),
    ("Resize", [IMAGE, None, None, np.array([3, 3, 9])], 13, {"mode": "linear"}),
    ("Resize", [IMAGE, None, None, np.array([3, 4])], 18, {"axes": [1, -1], "keep_aspect_ratio_policy": "not_smaller"}),
    ("Resize", [IMAGE[None], None, None, np.array([1, 2, 5, 8])], 13, {"mode": "cubic", "exclude_outside": 1}),
    ("Resize", [IMAGE[None], None, None, np.array([1, 2, 2, 4])], 18, {"mode": "linear", "antialias": 1}),
    ("Resize", [IMAGE, CROP, None, np.array([2, 2, 6])], 13, {"mode": "linear", **CROPPED}),
    ("Resize", [IMAGE, CROP, np.array([1, 0.7, 1.7], np.float32)], 13, {"mode": "linear", **CROPPED}),
    ("Resize", [SMALL, None, WIDER], 18, {"mode": "linear"}),
    ("MaxPool", [SMALL], 12, {"kernel_shape": [2, 2], "pads": [1, 0, 1, 1], "strides": [2, 3], "ceil_mode": 1}),
]


@pytest.mark.parametrize(("operator", "given", "opset", "attributes"), DEFINED)
def test_definitions_agree_with_the_runtime(operator: str, given, opset: int, attributes) -> None:
    model = one_operator(operator, given, opset=opset, **attributes)
    found = opinions_of(model, feeds_of(given))
    (wanted,), (array,) = found[RUNTIME](None), found[NUMPY](None)
    assert array.dtype == wanted.dtype
    np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "array", "attributes"),
    [("LpNormalization", IMAGE, {"p": 1}), ("MaxPool", IMAGE, {"kernel_shape": [2], "pads": [1, 0], "ceil_mode": 1})],
)
def test_a_third_opinion_where_the_reference_is_wrong(operator: str, array, attributes) -> None:
    model = one_operator(operator, [array], opset=18, **attributes)
    with noted_disputes() as disputes:
        assert agreed(operator, opinions_of(model, feeds_of([array])))[1] == (RUNTIME, NUMPY)
    assert [d.others for d in disputes.values()] == [(REFERENCE,)]


def test_a_third_opinion_on_a_softmax_of_several_axes() -> None:
    model = one_operator("Softmax", [IMAGE], opset=11, axis=1)  # onnx.reference takes one axis only
    with noted_disputes() as disputes:
        (found,), names = agreed("Softmax", opinions_of(model, feeds_of([IMAGE])))
    assert names == (RUNTIME, NUMPY)
    assert [d.others for d in disputes.values()] == [(REFERENCE,)]
    np.testing.assert_allclose(found.sum((1, 2)), 1, atol=1e-6)


def test_the_references_of_a_node() -> None:
    rows = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    model = one_operator("Hardmax", [rows], opset=11, axis=0)  # before opset 13 all axes from `axis` on are one
    found = opinions_of(model, feeds_of([rows]))
    assert list(found) == [RUNTIME, REFERENCE, NUMPY, TORCH]
    (right,), (wrong,) = found[RUNTIME](None), ReferenceEvaluator(model).run(None, feeds_of([rows]))
    assert right.sum() == 1
    assert wrong.sum() != 1
    pytest.importorskip("torch")
    assert np.array_equal(found[TORCH]([right])[0], right)
