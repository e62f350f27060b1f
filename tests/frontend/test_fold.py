"""Constants that the frontend computes, compared with NumPy by the operators' definitions."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from korch.frontend import load_model
from korch.primitive.dispute import noted_disputes
from korch.primitive.op import Array
from korch.testing.tolerance import assert_same
from tests.support.models import one_operator
from tests.support.node_cases import _arrays, _results, node_cases

CUBIC = np.array([[[[0, 3, 1, 2], [5, 1, 4, 4], [2, 2, 0, 1]]]], np.float32)
X = np.linspace(-2, 3, 24, dtype=np.float32).reshape(2, 3, 4)
IMAGE = np.linspace(-1, 2, 24, dtype=np.float32).reshape(1, 6, 2, 2)


def folded(op: str, arrays: Sequence[Array], opset: int, outputs: int = 1, **attributes: object) -> list[Array]:
    """Return the constants into which a node with constant inputs is folded."""
    model = one_operator(op, [], constants=dict(enumerate(arrays)), opset=opset, outputs=outputs, **attributes)
    constants = load_model(model).constants
    return [constants[item.name] for item in model.graph.output]


def softmax(x: Array, axis: int) -> Array:
    """Return the operator before opset 13: the axes from `axis` on are flattened."""
    rows = np.exp(x.astype(np.float64).reshape(int(np.prod(x.shape[:axis])), -1))
    return (rows / rows.sum(1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize("opset", [7, 11, 12])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_flattens_axes_before_opset_13(opset: int, axis: int) -> None:
    assert_same(folded("Softmax", [X], opset, axis=axis)[0], softmax(X, axis), terms=24)
    assert_same(folded("LogSoftmax", [X], opset, axis=axis)[0], np.log(softmax(X, axis)), terms=24)


@pytest.mark.parametrize("opset", [9, 13, 15])
def test_batch_normalization_of_all_opsets(opset: int) -> None:
    scale, bias, mean, variance = (np.arange(1, 7, dtype=np.float32) / d for d in (3, 4, 5, 6))
    column = [a.astype(np.float64)[:, None, None] for a in (scale, bias, mean, variance)]
    wanted = column[0] * (IMAGE - column[2]) / np.sqrt(column[3] + 1e-5) + column[1]
    found = folded("BatchNormalization", [IMAGE, scale, bias, mean, variance], opset)[0]
    assert_same(found, wanted, terms=8)


@pytest.mark.parametrize(("axis", "p"), [(0, 1), (1, 1), (2, 1), (1, 2)])
def test_a_normalization_by_the_sum_of_absolute_values(axis: int, p: int) -> None:
    norm = np.linalg.norm(X.astype(np.float64), p, axis, keepdims=True)
    assert_same(folded("LpNormalization", [X], 22, p=p, axis=axis)[0], X / norm, terms=8)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_normalization_over_neighbouring_channels(size: int) -> None:
    x, wanted = IMAGE.astype(np.float64), np.empty(IMAGE.shape)
    for c in range(6):
        window = x[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1]
        wanted[:, c] = x[:, c] / (2 + 0.5 / size * (window**2).sum(1)) ** 0.25
    assert_same(folded("LRN", [IMAGE], 13, size=size, alpha=0.5, beta=0.25, bias=2.0)[0], wanted, terms=8)


def test_a_cubic_resize_to_one_row_reads_the_first_row() -> None:
    none = np.array([], np.float32)
    sizes, mode = np.array([1, 1, 1, 4]), {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}
    (found,) = folded("Resize", [CUBIC, none, none, sizes], 13, **mode)  # pixel 0 of one row is at 0, not in the middle
    assert_same(found, CUBIC[:, :, :1], terms=8)


@pytest.mark.parametrize("opset", [7, 10, 11])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_hardmax_flattens_axes_before_opset_13(opset: int, axis: int) -> None:
    rows = X.reshape(int(np.prod(X.shape[:axis])), -1)
    wanted = np.arange(rows.shape[1]) == rows.argmax(1)[:, None]
    assert np.array_equal(folded("Hardmax", [X], opset, axis=axis)[0], wanted.reshape(X.shape))


@pytest.mark.parametrize("size", [4, 5])
def test_an_unpooling_has_positions_in_the_output(size: int) -> None:
    x = np.arange(1, 1 + size * size, dtype=np.float32).reshape(1, 1, size, size)
    kept = x[:, :, 1:4:2, 1:4:2]
    positions = (np.arange(size * size).reshape(x.shape))[:, :, 1:4:2, 1:4:2]
    wanted = np.where(np.isin(x, kept), x, 0)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    assert np.array_equal(folded("MaxUnpool", [kept, positions, np.array(x.shape)], 11, **window)[0], wanted)


@pytest.mark.parametrize("corners", [0, 1])
def test_a_cubic_grid_sample_repeats_the_border(corners: int) -> None:
    torch = pytest.importorskip("torch")
    grid = np.random.default_rng(1).uniform(-1.4, 1.4, (1, 3, 3, 2)).astype(np.float32)
    given = torch.from_numpy(IMAGE), torch.from_numpy(grid)
    wanted = torch.nn.functional.grid_sample(*given, "bicubic", "border", bool(corners)).numpy()
    options = {"mode": "cubic", "padding_mode": "border", "align_corners": corners}
    assert_same(folded("GridSample", [IMAGE, grid], 20, **options)[0], wanted, terms=64)


def test_unique_elements_in_the_order_of_their_first_places() -> None:
    elements = np.array([[2, 1, 1, 3], [4, 3, 5, 2]], np.float32)
    values, first, inverse, counts = folded("Unique", [elements], 11, outputs=4, sorted=0)
    assert values.tolist() == [2, 1, 3, 4, 5]
    assert first.tolist() == [0, 1, 3, 4, 6]
    assert inverse.tolist() == [0, 1, 1, 2, 3, 2, 4, 0]
    assert counts.tolist() == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("operator", "gates", "outputs"), [("LSTM", 4, 3), ("GRU", 3, 2), ("RNN", 1, 2)])
@pytest.mark.parametrize("layout", [0, 1])
def test_recurrences_end_with_their_sequences(
    operator: str, gates: int, outputs: int, direction: str, layout: int
) -> None:
    rng, count, lengths = np.random.default_rng(3), 1 + (direction == "bidirectional"), [4, 1, 3]
    x, w, r = (rng.normal(size=n).astype(np.float32) for n in ((4, 3, 2), (count, 5 * gates, 2), (count, 5 * gates, 5)))
    bias = rng.normal(size=(count, 10 * gates)).astype(np.float32)
    options = {"hidden_size": 5, "direction": direction}
    given = [x.swapaxes(0, 1) if layout else x, w, r, bias, np.array(lengths, np.int32)]
    y, h, *_ = folded(operator, given, 14, outputs, layout=layout, **options)
    y, h = (y.transpose(1, 2, 0, 3), h.swapaxes(0, 1)) if layout else (y, h)
    for k, length in enumerate(lengths):  # a sequence alone needs no length
        part = x[:length, k : k + 1]
        alone = folded(operator, [part, w, r, bias], 14, outputs, **options)
        assert_same(y[:length, :, k], alone[0][:, :, 0], terms=64)
        assert_same(h[:, k], alone[1][:, 0], terms=64)
        assert not y[length:, :, k].any()


@pytest.mark.parametrize("length", [3, 4, 7, 8, 9, 11])
def test_an_inverse_transform_of_half_a_spectrum(length: int) -> None:
    half = np.random.default_rng(4).normal(size=(1, length // 2 + 1, 2)).astype(np.float32)
    given = [half, np.array(length), np.array(1)]
    (found,) = folded("DFT", given, 20, inverse=1, onesided=1)
    assert_same(found[..., 0], np.fft.irfft(half[..., 0] + 1j * half[..., 1], length), terms=64)


def test_a_random_constant_is_not_folded() -> None:
    given = [X, np.array(0.5, np.float32), np.array(True)]
    with noted_disputes() as disputes, pytest.raises(KeyError):  # no two references agree
        folded("Dropout", given, 13, seed=1)
    assert [dispute.is_decided for dispute in disputes.values()] == [False]


def test_a_constant_of_one_reference_is_noted() -> None:
    rois, batch = np.array([[0, 0, 3, 3]], np.float32), np.array([0])
    with noted_disputes() as disputes:
        folded("RoiAlign", [IMAGE, rois, batch], 22)
    (text,) = (dispute.text for dispute in disputes.values())
    assert "RoiAlign" in text and text.endswith("computes it, so no other reference confirms its result")
    with noted_disputes() as disputes:
        folded("LRN", [IMAGE], 13, size=3)
    assert not disputes


def test_integers_are_exact() -> None:
    big, one = np.array([2**62 + 1, -(2**62) - 3]), np.array([1])
    assert folded("Add", [big, one], 14)[0].tolist() == [2**62 + 2, -(2**62) - 2]
    assert folded("Sub", [big, one], 14)[0].dtype == np.int64
    assert folded("Div", [np.array([-7, 7]), np.array([2])], 14)[0].tolist() == [-3, 3]
    large = np.arange(3 * 2048).reshape(3, 2048) + 2**60
    assert np.array_equal(folded("Transpose", [large], 13)[0], large.T)


def test_float16_is_rounded_once() -> None:
    x = np.full((2, 8), 60000, np.float16)  # the sum is larger than the largest float16
    assert folded("ReduceMean", [x, np.array([1])], 18, keepdims=0)[0].tolist() == [60000, 60000]


def test_moved_elements_keep_their_bits() -> None:
    x = np.array([[np.nan, -0.0, 1e-45], [np.inf, 3, -np.inf]], np.float32)
    x.view(np.uint32)[0, 0] = 0x7FC12345
    (found,) = folded("Transpose", [x], 13)
    assert np.array_equal(found.view(np.uint32), x.view(np.uint32).T)


def foldable(case) -> bool:
    """Return whether a case has tensors of types that Korch computes with, and a result that is not random."""
    inputs, _ = case.data_sets[0]
    types = [item.type.tensor_type.elem_type for item in case.model.graph.output]
    is_random = case.name.startswith(("test_training_dropout", "test_bernoulli"))
    is_tensor = _arrays(inputs, [item.name for item in case.model.graph.input]) is not None
    return is_tensor and not is_random and not {0, 8, *range(17, 27)}.intersection(types)


def test_cases_of_onnx_as_constants() -> None:
    """One test, because ONNX takes seconds to compute its cases: parameters of a test are made in each process."""
    for case in [c for c in node_cases() if foldable(c)][::9]:
        inputs, expected = case.data_sets[0]
        arrays = _arrays(inputs, [item.name for item in case.model.graph.input])
        assert arrays is not None
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        del model.graph.input[:]  # an initializer that is an input is not a constant
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
        constants = load_model(model).constants
        for item, wanted in zip(model.graph.output, _results(expected), strict=True):
            if item.name in constants:  # a dequantized weight is not folded
                assert_same(constants[item.name], wanted, terms=64, name=f"{item.name} of {case.name}")
