"""Operators of ONNX Runtime's own domain, defined by standard operators, compared with ONNX Runtime.

Weights have 7 bits, because ONNX Runtime's sums of pairs saturate on some CPUs.
"""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from korch.errors import ModelError, UnsupportedError
from korch.fission import fission_with_report
from korch.frontend import load_model
from korch.host.engine import HostEngine
from korch.primitive.check import check_graph
from korch.primitive.lowering import lower_products
from korch.primitive.op import Array
from korch.primitive.reference import run
from tests.support.models import in_onnxruntime, one_operator

RNG = np.random.default_rng(3)


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def scalar(value: float, dtype: type = np.float32) -> Array:
    return np.array(value, dtype)


def u8(*shape: int) -> Array:
    return RNG.integers(0, 256, shape, np.uint8)


def weights(*shape: int, dtype: type = np.int8) -> Array:
    return RNG.integers(-64, 64, shape).astype(dtype) if dtype is np.int8 else RNG.integers(0, 128, shape, np.uint8)


def real(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def node_model(op: str, inputs: list[Array | None], known: set[int], **attributes: object) -> onnx.ModelProto:
    """Return a model of one node; the inputs at the positions `known` are constants."""
    constants = {i: array for i, array in enumerate(inputs) if i in known and array is not None}
    return one_operator(op, inputs, constants=constants, domain="com.microsoft", **attributes)


X, S, Z = u8(2, 5, 3, 4), scalar(0.03137), scalar(117, np.uint8)
ADD = [X, S, Z, u8(2, 5, 3, 4), scalar(0.05), scalar(9, np.uint8), scalar(0.06), scalar(100, np.uint8)]
GEMM = [u8(3, 7), S, Z, weights(4, 7), floats(0.1, 0.2, 0.3, 0.4), np.zeros(4, np.int8)]
Q_ATTENTION = [u8(2, 5, 12), weights(12, 24), real(24), scalar(0.01), scalar(0.02)]
TURNS = [real(12, 8), real(12, 8)]
IMAGE, FILTERS = real(2, 3, 5, 6), real(4, 3, 3, 3)
BITS = {"K": 37, "N": 6, "block_size": 16}


def nbits(bits: int, zeros: bool, k: int = 37) -> list[Array | None]:
    blocks = -(-k // 16)
    packed = RNG.integers(0, 256, (6, blocks, 16 * bits // 8), np.uint8)
    zero = RNG.integers(0, 256, 6 * -(-blocks * bits // 8), np.uint8) if zeros else None
    return [real(3, k), packed, np.abs(real(6 * blocks)), zero]


CASES = [
    ("QLinearAdd", ADD, {1, 2, 4, 5, 6, 7}, {}),
    ("QLinearMul", ADD, {1, 2, 4, 5, 6, 7}, {}),
    ("QLinearSigmoid", [X, S, Z, scalar(0.004013), scalar(0, np.uint8)], {1, 2, 3, 4}, {}),
    ("QLinearLeakyRelu", [X, S, Z, scalar(0.02039), scalar(50, np.uint8)], {1, 2, 3, 4}, {"alpha": 0.2}),
    ("QLinearGlobalAveragePool", [X, S, Z, scalar(0.02039), scalar(50, np.uint8)], {1, 2, 3, 4}, {"channels_last": 0}),
    ("QLinearGlobalAveragePool", [X, S, Z, scalar(0.02039), scalar(50, np.uint8)], {1, 2, 3, 4}, {"channels_last": 1}),
    ("QLinearConcat", [S, Z, X, S, Z, X, scalar(0.01), scalar(3, np.uint8)], {0, 1, 3, 4, 6, 7}, {"axis": 1}),
    (
        "QGemm",
        [*GEMM, RNG.integers(-500, 500, 4).astype(np.int32), scalar(0.7), scalar(130, np.uint8)],
        {1, 2, 3, 4, 5, 6, 7, 8},
        {"transB": 1, "alpha": 0.5},
    ),
    ("QGemm", [u8(3, 7), S, Z, weights(7, 4), S, np.zeros((), np.int8)], {1, 2, 3, 4, 5}, {}),
    ("DynamicQuantizeMatMul", [real(2, 5, 8), weights(8, 6), floats(*range(1, 7)), None, real(6)], {1, 2, 4}, {}),
    (
        "MatMulIntegerToFloat",
        [u8(2, 5, 8), weights(8, 6, dtype=np.uint8), S, floats(*range(1, 7)), Z, u8(6) // 2, real(6)],
        {1, 2, 3, 4, 5, 6},
        {},
    ),
    ("MatMulNBits", nbits(4, False), {1, 2}, {**BITS, "bits": 4}),
    ("MatMulNBits", nbits(4, True), {1, 2, 3}, {**BITS, "bits": 4}),
    ("MatMulNBits", nbits(8, True), {1, 2, 3}, {**BITS, "bits": 8}),
    ("MatMulNBits", [*nbits(4, False), None, real(6)], {1, 2, 5}, {**BITS, "bits": 4}),
    ("Gelu", [real(3, 7)], set(), {}),
    ("BiasGelu", [real(3, 7), real(7)], {1}, {}),
    ("FastGelu", [real(3, 7)], set(), {}),
    ("FastGelu", [real(3, 7), real(7)], {1}, {}),
    ("QuickGelu", [real(3, 7)], set(), {"alpha": 1.5}),
    ("FusedConv", [IMAGE, FILTERS], {1}, {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    ("FusedConv", [IMAGE, FILTERS, real(4)], {1, 2}, {"activation": "LeakyRelu", "activation_params": [0.3]}),
    (
        "FusedConv",
        [IMAGE, FILTERS, real(4), real(2, 4, 3, 4)],
        {1, 2},
        {"activation": "Clip", "activation_params": [-0.5, 0.5]},
    ),
    ("FusedConv", [IMAGE, FILTERS], {1}, {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]}),
    ("FusedGemm", [real(3, 7), real(4, 7), real(4)], {1, 2}, {"transB": 1, "alpha": 0.5, "activation": "Relu"}),
    ("FusedGemm", [real(3, 7), real(7, 4), real(4)], {1, 2}, {"activation": "LeakyRelu", "activation_alpha": 0.2}),
    ("FusedMatMul", [real(2, 5, 7), real(2, 5, 4)], set(), {"transA": 1, "alpha": 0.25}),
    ("FusedMatMul", [real(2, 5, 7), real(4, 7)], {1}, {"transB": 1}),
    ("SkipLayerNormalization", [real(2, 5, 8), real(2, 5, 8), real(8), real(8), real(8)], {2, 3, 4}, {}),
    ("SkipLayerNormalization", [real(2, 5, 8), real(2, 5, 8), real(8)], {2}, {"epsilon": 0.1}),
    ("SkipSimplifiedLayerNormalization", [real(2, 5, 8), real(2, 5, 8), real(8)], {2}, {}),
    ("SkipSimplifiedLayerNormalization", [real(2, 5, 8), real(2, 5, 8), real(8), real(8)], {2}, {"epsilon": 0.1}),
    ("RotaryEmbedding", [real(2, 3, 32), np.array([[4, 0, 9], [1, 2, 3]]), *TURNS], {1, 2, 3}, {"num_heads": 2}),
    ("RotaryEmbedding", [real(2, 3, 32), np.array([4]), *TURNS], {1, 2, 3}, {"num_heads": 2, "interleaved": 1}),
    ("RotaryEmbedding", [real(2, 4, 3, 16), np.array([4]), *TURNS], {1}, {}),
    ("QAttention", Q_ATTENTION, {1, 2, 3, 4}, {"num_heads": 2}),
    (
        "QAttention",
        [*Q_ATTENTION, np.array([3, 5], np.int32), Z, np.zeros((), np.int8)],
        {1, 2, 3, 4, 6, 7},
        {"num_heads": 2, "unidirectional": 1},
    ),
    (
        "QAttention",
        [*Q_ATTENTION, np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32), Z, np.zeros((), np.int8)],
        {1, 2, 3, 4, 6, 7},
        {"num_heads": 2},
    ),
]


def computed(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    """Return what Korch's interpreter computes; no operator may be kept whole."""
    split, report = fission_with_report(load_model(model))
    assert not report.kept, report.kept
    graph = lower_products(split)
    check_graph(graph)
    return run(graph, feeds, exact=False)["y0"]


@pytest.mark.parametrize(("op", "inputs", "known", "attributes"), CASES)
def test_it_means_what_it_means_in_onnx_runtime(op, inputs, known, attributes):
    model = node_model(op, inputs, known, **attributes)
    feeds = {f"x{i}": a for i, a in enumerate(inputs) if a is not None and i not in known}
    found = computed(model, feeds)
    (expected,) = in_onnxruntime(model, feeds)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    difference = np.abs(found.astype(np.float64) - expected)
    if found.dtype == np.uint8:  # a quotient near the border between two steps
        assert difference.max() <= 1 and (difference > 0).mean() <= 0.02
    else:
        assert difference.max() <= 2e-6 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("k", [16, 33])
def test_weights_of_few_bits_are_their_definition(bits, k):
    inputs = nbits(bits, True, k)
    blocks = -(-k // 16)
    q = np.unpackbits(inputs[1].reshape(6, -1), axis=1, bitorder="little").reshape(6, -1, bits)
    q = (q * (1 << np.arange(bits))).sum(-1)
    z = np.unpackbits(inputs[3].reshape(6, -1), axis=1, bitorder="little").reshape(6, -1, bits)
    z = (z * (1 << np.arange(bits))).sum(-1)[:, :blocks]
    w = (q - np.repeat(z, 16, 1)) * np.repeat(inputs[2].reshape(6, blocks), 16, 1).astype(np.float64)
    model = node_model("MatMulNBits", inputs, {1, 2, 3}, K=k, N=6, block_size=16, bits=bits)
    expected = inputs[0].astype(np.float64) @ w[:, :k].T
    assert np.abs(computed(model, {"x0": inputs[0]}) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_packed_weights_stay_packed():
    inputs = nbits(4, False)
    split, _ = fission_with_report(load_model(node_model("MatMulNBits", inputs, {1, 2}, **BITS, bits=4)))
    sizes = [c.array.nbytes for c in split.constants.values() if not c.is_uniform]
    assert max(sizes) == inputs[1].nbytes


FEW = [scalar(1.0)] * 3
BAD = [
    ("QLinearAdd", [X, None, Z, X, S, Z, S, Z], {}, ModelError, "its input 1, the scale of an operand, is missing"),
    ("QLinearMul", [X, S, Z, X, S, Z], {}, ModelError, "its input 6, the scale of the result, is missing"),
    ("QLinearAdd", [X, floats(1, 2), Z, X, S, Z, S, Z], {}, ModelError, "do not fit axis"),
    ("MatMulNBits", nbits(4, False), {**BITS, "bits": 3}, UnsupportedError, "its weights have 3 bits"),
    ("MatMulNBits", nbits(4, False), {**BITS, "bits": 4, "K": 50}, ModelError, r"bytes of the shape \[6, 4, 8\]"),
    (
        "MatMulNBits",
        [*nbits(4, False), np.zeros(48, np.int32)],
        {**BITS, "bits": 4},
        UnsupportedError,
        "in groups of any order",
    ),
    ("MatMulNBits", nbits(4, False), {**BITS, "bits": 4, "block_size": 0}, ModelError, "its attribute block_size is 0"),
    ("MatMulNBits", nbits(4, False), {"K": 49, "N": 6, "bits": 4}, ModelError, "its attribute block_size is 0"),
    (
        "MatMulNBits",
        [*nbits(4, False)[:3], u8(2)],
        {**BITS, "bits": 4},
        ModelError,
        "zero points have the shape .*uint8",
    ),
    ("MatMulNBits", [*nbits(4, False)[:3], real(3)], {**BITS, "bits": 4}, ModelError, "zero points have .* elements"),
    ("QLinearConcat", [S, Z, X, S, Z], {}, ModelError, "its attribute axis is missing"),
    ("QAttention", Q_ATTENTION, {"num_heads": 0}, ModelError, "its attribute num_heads is 0"),
    ("QAttention", Q_ATTENTION, {"num_heads": 5}, ModelError, "its data has the shape .* and its weights"),
    ("QAttention", [u8(5, 24), *Q_ATTENTION[1:]], {"num_heads": 2}, ModelError, r"its data has the shape \[5, 24\]"),
    (
        "QAttention",
        [*Q_ATTENTION, None, None, None, real(2)],
        {"num_heads": 2},
        UnsupportedError,
        "it has an input of past states",
    ),
    ("QLinearSoftmax", [X, S, Z, S, Z], {}, UnsupportedError, "the domain 'com.microsoft' is unknown"),
]


@pytest.mark.parametrize(("op", "inputs", "attributes", "error", "text"), BAD)
def test_what_is_wrong_is_one_clear_error(op, inputs, attributes, error, text):
    known = {i for i, array in enumerate(inputs) if array is not None and i}
    model = node_model(op, inputs, known, **attributes)
    with pytest.raises(error, match=text):
        fission_with_report(load_model(model))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_operator_that_onnx_runtime_adds_to_the_standard(dtype):
    inputs = [real(2, 5, 8).astype(dtype), real(8).astype(dtype)]
    model = node_model("SimplifiedLayerNormalization", inputs, {1})
    model.graph.node[0].domain = ""
    feeds = {"x0": inputs[0]}
    (wanted,) = in_onnxruntime(model, feeds)
    np.testing.assert_allclose(computed(model, feeds), wanted, rtol=2e-3, atol=1e-3)


def test_weights_that_are_no_constants_are_refused():
    model = node_model("MatMulNBits", nbits(4, False), {2}, **BITS, bits=4)
    with pytest.raises(UnsupportedError, match="its input 1, the weights, is no constant"):
        load_model(model)


def test_errors_of_standard_nodes_have_the_name_of_the_node_that_they_define():
    model = node_model("QLinearAdd", ADD, set())
    model.graph.node[0].name = "sum"
    model.graph.input[5].type.tensor_type.elem_type = TensorProto.INT8
    with pytest.raises(ModelError, match=r"node 'sum/DequantizeLinear_1' .*zero_point has inconsistent type"):
        load_model(model)


def test_an_operator_that_onnxruntime_refuses_is_not_called_unknown():
    inputs = nbits(4, False)[:3]
    inputs[1] = u8(6, 3, 6)
    model = node_model("MatMulNBits", inputs, {1, 2}, **BITS, bits=3)
    with pytest.raises(UnsupportedError, match="ONNX Runtime does not run it: ") as caught:
        HostEngine(model, 1)
    assert "neither" not in str(caught.value)
