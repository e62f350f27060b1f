"""Opaque operators as PyTorch calls on CPU tensors, compared with ONNX's test cases and reference."""

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from korch.candidate.candidate import Refusal, make_group
from korch.cuda.target import NOMINAL
from korch.errors import KorchError
from korch.fission import fission, fission_with_report
from korch.frontend.onnx import load_model
from korch.primitive import reference
from korch.primitive.ops.opaque import onnx_type, opaque_model
from korch.primitive.torch_calls import TABLE
from korch.primitive.types import DType
from korch.provider.torch_opaque import TorchOpaqueProvider
from korch.testing.tolerance import assert_same
from tests.support.models import chain
from tests.support.node_cases import _arrays, _results, node_cases, with_constants

PROVIDER = TorchOpaqueProvider()
REFUSED = {
    "Attention",
    "BatchNormalization",
    "CausalConvWithState",
    "DeformConv",
    "Dropout",
    "If",
    "LinearAttention",
    "LpPool",
    "OptionalGetElement",
    "Resize",
    "RoiAlign",
    "Scan",
    "TfIdfVectorizer",
    "Adagrad",
    "Adam",
    "Momentum",
    "ArrayFeatureExtractor",
    "Binarizer",
    "TreeEnsemble",
}
"""Operators of ONNX's cases that are left to the host in every form."""

SOME_FORMS = {
    "Col2Im": {"test_col2im_5d"},
    "LSTM": {"test_lstm_with_peepholes"},
    "MaxPool": {"test_maxpool_with_argmax_2d_precomputed_strides"},
    "TopK": {"test_top_k_uint64"},
    "ReduceMax": {"test_reduce_max_empty_set_bool"},
    "ReduceMin": set(),
}
"""And those that are left to it in some."""

SIGNED = {np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64, np.bool_: np.int8}


def tensor(array: Any) -> Any:
    """Return an array as calls see it on a device."""
    dense = np.array(array, order="C")
    if dense.dtype.name == "bfloat16":
        return torch.from_numpy(dense.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(dense.view(SIGNED.get(dense.dtype.type, dense.dtype)))


def run_call(group: Any, arrays: list[Any]) -> list[Any]:
    """Return what a group's call gives, twice the same; it must not hand on its inputs' memory."""
    (offer,) = PROVIDER.offer(group, NOMINAL[90])
    (call,) = PROVIDER.build(group, offer, NOMINAL[90]).steps
    names: dict[str, Any] = {}
    exec(call.source, names)
    tensors = [tensor(array) for array in arrays]
    before = [t.clone() for t in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, again = (names[call.symbol](torch, *tensors) for _ in range(2))
    results = []
    for result, same, type_ in zip(found, again, group.output_types, strict=True):
        assert result.is_contiguous() and tuple(result.shape) == type_.shape
        assert result.element_size() == type_.dtype.size_bytes
        own = result.untyped_storage().data_ptr()
        assert own == 0 or all(own != t.untyped_storage().data_ptr() for t in tensors)
        flat = result.reshape(-1)
        assert torch.equal(flat.view(torch.uint8), same.reshape(-1).view(torch.uint8))
        wide = flat.view(torch.uint16) if type_.dtype is DType.BF16 else flat
        results.append(wide.numpy().view(type_.dtype.numpy).reshape(type_.shape))
    for t, old in zip(tensors, before, strict=True):
        assert torch.equal(t.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8))
    return results


def cases() -> dict[str, list[tuple[str, Any, list[Any], dict[str, Any]]]]:
    """Return ONNX's cases that are one opaque operator, by it: name, group, inputs, outputs."""
    found: dict[str, list[Any]] = {}
    for case in node_cases():
        inputs, expected = case.data_sets[0]
        arrays = _arrays(inputs, [item.name for item in case.model.graph.input])
        if arrays is None:
            continue
        try:
            graph, report = fission_with_report(load_model(with_constants(case.model, arrays)), with_loops=False)
        except (KorchError, ValueError, TypeError):
            continue
        if not report.kept or {p.op for p in graph.primitives} != {"opaque"}:
            continue
        group = make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])
        named = {value: name for name, value in graph.inputs}
        given = [arrays[named[v]] if v in named else graph.constants[v].array for v in group.inputs]
        outputs = [item.name for item in case.model.graph.output]
        wanted = dict(zip(outputs, _results(expected), strict=True))
        found.setdefault(report.kept[0].op_type, []).append(
            (case.name, group, given, {name: wanted[name] for name, _ in graph.outputs})
        )
    return found


@pytest.mark.long
def test_the_standards_cases():
    """One test, because the cases take long to make: parameters of a test are made in each process."""
    for operator, found in cases().items():
        left = set()
        for name, group, arrays, expected in found:
            if isinstance(PROVIDER.offer(group, NOMINAL[90]), Refusal):
                left.add(name)
                continue
            for actual, (output, wanted) in zip(run_call(group, arrays), expected.items(), strict=True):
                assert_same(actual, wanted, terms=64, name=f"{name}: {output}")
        if operator in REFUSED:
            assert len(left) == len(found) and operator not in TABLE, operator
        else:
            assert left == SOME_FORMS.get(operator, set()), operator


def one(
    op: str,
    inputs: dict[str, Any],
    constants: dict[str, Any] | None = None,
    outputs: int = 1,
    opset: int = 20,
    given: list[str] | None = None,
    **attributes: Any,
):
    """Return the group of one operator."""
    known = constants or {}
    order = given if given is not None else [*inputs, *known]
    results = [f"y{i}" for i in range(outputs)]
    kinds = {n: (onnx_type(DType.of(a.dtype)), a.shape) for n, a in inputs.items()}
    model = chain([helper.make_node(op, order, results, **attributes)], kinds, results, known, opset)
    found = fission(load_model(onnx.shape_inference.infer_shapes(model).SerializeToString()), with_loops=False)
    assert all(p.op == "opaque" for p in found.primitives)
    return make_group(found, range(len(found.primitives)), [v for _, v in found.outputs]), found


def expected_of(graph: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the reference's results; those of ONNX Runtime where the reference is wrong."""
    attributes = graph.primitives[0].attributes
    if attributes.op_type not in ("GatherElements", "MaxPool", "LSTM", "GRU", "RNN"):
        return reference.run(graph, inputs)
    session = pytest.importorskip("onnxruntime").InferenceSession(
        opaque_model(attributes).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {f"x{i}": a for i, a in enumerate(inputs.values())})
    return dict(zip([name for name, _ in graph.outputs], found, strict=True))


def agree(group: Any, graph: Any, inputs: dict[str, Any]) -> None:
    """Compare a call with the reference."""
    names = {value: name for name, value in graph.inputs}
    arrays = [inputs[names[v]] if v in names else graph.constants[v].array for v in group.inputs]
    expected = expected_of(graph, inputs)
    for actual, (name, _) in zip(run_call(group, arrays), graph.outputs, strict=True):
        assert_same(actual, expected[name], terms=1000, name=name)


RNG = np.random.default_rng(0)


def f(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(low: int, high: int, *shape: int, kind: Any = np.int64) -> Any:
    return RNG.integers(low, high, shape).astype(kind)


def special(*shape: int) -> Any:
    array = f(*shape)
    array.reshape(-1)[:4] = [np.nan, np.inf, -np.inf, -0.0]
    return array


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gather rows": ("Gather", {"x": f(7, 5), "i": ints(-7, 7, 2, 3)}, {}),
    "gather int32 along the last axis": ("Gather", {"x": f(3, 4, 9), "i": ints(-9, 9, 6, kind=np.int32)}, {"axis": -1}),
    "gather one": ("Gather", {"x": f(1, 5), "i": np.array(0)}, {}),
    "gather bool": ("Gather", {"x": f(6, 5) > 0, "i": ints(-6, 6, 4)}, {}),
    "gather special": ("Gather", {"x": special(6, 5), "i": ints(-6, 6, 4)}, {}),
    "gather elements": ("GatherElements", {"x": f(4, 300), "i": ints(-300, 300, 3, 5)}, {"axis": 1}),
    "gather elements of one": ("GatherElements", {"x": f(300, 1), "i": ints(-300, 300, 1, 1)}, {}),
    "gather tuples": ("GatherND", {"x": f(4, 5, 6), "i": ints(-4, 4, 3, 2, 2)}, {}),
    "gather all": ("GatherND", {"x": f(4, 5), "i": ints(-4, 4, 7, 2)}, {}),
    "gather tuples of batches": ("GatherND", {"x": f(2, 5, 6), "i": ints(-5, 5, 2, 3, 1)}, {"batch_dims": 1}),
    "scatter tuples": ("ScatterND", {"x": f(6, 5), "i": np.array([[1], [-2]]), "u": f(2, 5)}, {}),
    "scatter no tuples": ("ScatterND", {"x": f(6, 5), "i": ints(0, 1, 0, 1), "u": f(0, 5)}, {}),
    "add tuples": ("ScatterND", {"x": f(4, 5), "i": ints(-4, 4, 9, 2), "u": f(9)}, {"reduction": "add"}),
    "largest of tuples": ("ScatterND", {"x": special(4, 5), "i": ints(-4, 4, 9, 2), "u": f(9)}, {"reduction": "max"}),
    "scatter elements": (
        "ScatterElements",
        {"x": f(4, 6), "i": np.array([[1, -1], [0, 3]]), "u": f(2, 2)},
        {"axis": 1},
    ),
    "multiply elements": (
        "ScatterElements",
        {"x": f(4, 6), "i": ints(-4, 4, 3, 6), "u": f(3, 6)},
        {"reduction": "mul"},
    ),
    "hardmax of ties": ("Hardmax", {"x": ints(0, 3, 4, 9).astype(np.float32)}, {"axis": 0}),
    "remainder": ("Mod", {"x": f(4, 6), "y": f(4, 6) + 3}, {}),
    "grid": ("GridSample", {"x": f(2, 3, 5, 6), "g": f(2, 4, 3, 2)}, {"padding_mode": "border"}),
    "grid of one": (
        "GridSample",
        {"x": f(1, 1, 1, 1), "g": f(1, 1, 1, 2)},
        {"padding_mode": "reflection", "mode": "nearest"},
    ),
    "volume": ("GridSample", {"x": f(1, 2, 3, 4, 5), "g": f(1, 2, 3, 4, 3)}, {}),
    "determinant": ("Det", {"x": f(2, 4, 4)}, {}),
    "three factors": ("Einsum", {"a": f(2, 3), "b": f(3, 4), "c": f(4, 5)}, {"equation": "ij,jk,kl->il"}),
    "ellipsis": ("Einsum", {"a": f(2, 3, 4), "b": f(2, 4, 5)}, {"equation": "...ij,...jk->...ik"}),
    "same": ("Einsum", {"a": f(2, 3, 4)}, {"equation": "...i->...i"}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    op, inputs, attributes = FORMS[name]
    group, graph = one(op, inputs, **attributes)
    agree(group, graph, inputs)


@pytest.mark.parametrize("kind", ["float16", "int64", "uint8"])
def test_other_elements(kind):
    x = {"x": RNG.integers(0, 9, (5, 300)).astype(kind), "i": ints(-300, 300, 5, 6)}  # shorter axes are compared
    agree(*one("GatherElements", x, axis=1), x)


def test_what_is_known_is_part_of_the_call():
    """A small table is no input: it is made in the first run."""
    inputs = {"i": ints(-3, 3, 2, 5)}
    group, graph = one("Gather", inputs, {"x": f(3, 4)}, given=["x", "i"])
    assert len(group.inputs) == 1
    agree(group, graph, inputs)
    hot = {"i": ints(-6, 6, 7).astype(np.float32)}  # whole numbers are compared
    agree(*one("OneHot", hot, {"d": np.array(4), "v": np.array([0.5, 2], np.float32)}, axis=0), hot)


def test_top_of_ties():
    for x, count in ((ints(0, 3, 4, 9).astype(np.float32), 5), (f(1, 1), 1)):
        for largest in (0, 1):
            inputs = {"x": x}
            group, graph = one("TopK", inputs, {"k": np.array([count])}, 2, axis=1, largest=largest)
            agree(group, graph, inputs)


def test_positions_of_maxima():
    for x, more in (
        (f(2, 3, 7, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        (f(1, 2, 9), {"kernel_shape": [2]}),
    ):
        agree(*one("MaxPool", {"x": x}, outputs=2, **more), {"x": x})


@pytest.mark.parametrize("way", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN", "other GRU"])
def test_recurrences(operator, way):
    op = operator.split()[-1]
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 2 if way == "bidirectional" else 1
    steps, batch, width, hidden = 5, 2, 3, 4
    inputs = {
        "x": f(steps, batch, width),
        "w": f(ways, gates * hidden, width),
        "r": f(ways, gates * hidden, hidden),
        "b": f(ways, 2 * gates * hidden),
        "h": f(ways, batch, hidden),
    }
    more = {"linear_before_reset": 1} if operator == "GRU" else {}
    outputs, given = 3 if op == "LSTM" else 2, ["x", "w", "r", "b", "", "h"]
    agree(*one(op, inputs, outputs=outputs, given=given, hidden_size=hidden, direction=way, **more), inputs)


@pytest.mark.parametrize(
    ("op", "inputs", "more"),
    [
        ("GridSample", {"x": f(1, 2, 3, 4, 5), "g": f(1, 2, 3, 4, 3)}, {"mode": "cubic"}),
        ("MaxPool", {"x": f(1, 2, 8, 8)}, {"kernel_shape": [3, 3], "pads": [1, 0, 1, 1]}),
    ],
)
def test_forms_that_pytorch_does_not_have_are_refused(op, inputs, more):
    group, _ = one(op, inputs, outputs=2 if op == "MaxPool" else 1, **more)
    found = PROVIDER.offer(group, NOMINAL[90])
    assert isinstance(found, Refusal) and op in found.reason
