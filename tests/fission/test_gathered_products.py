"""Products of rows by matrices that are gathered at run time become one primitive, without copies of the matrices."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from korch.errors import ModelError
from korch.fission import fission
from korch.frontend import load_model
from korch.primitive.as_onnx import OnnxNodes
from korch.primitive.check import check_graph
from korch.primitive.gathers import gather_matrices
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.reference import run
from tests.support.models import chain

F32, I64 = TensorProto.FLOAT, TensorProto.INT64


def model(
    gather: str = "Gather",
    lead: tuple[int, ...] = (5,),
    first: bool = False,
    turned: bool = False,
    rows: int = 1,
    constant: bool = True,
    dtype: int = F32,
    narrow: bool = False,
) -> onnx.ModelProto:
    """Return a batch of products of vectors of 4 terms by matrices of 6 columns, gathered of three."""
    rng = np.random.default_rng(0)
    shape = (3, 4, 6) if first == turned else (3, 6, 4)
    w = rng.normal(size=shape).astype(helper.tensor_dtype_to_np_dtype(dtype))
    index = (*lead, 1) if gather == "GatherND" else lead
    nodes = [helper.make_node(gather, ["w", "i"], ["own"])]
    if turned:
        rank = len(lead) + 2
        nodes.append(helper.make_node("Transpose", ["own"], ["m"], perm=[*range(rank - 2), rank - 1, rank - 2]))
    m = "m" if turned else "own"
    nodes.append(helper.make_node("MatMul", [m, "x"] if first else ["x", m], ["y"]))
    own = (1,) * len(lead) if narrow else lead
    inputs = {"x": (dtype, [*own, 4, rows] if first else [*own, rows, 4]), "i": (I64, index)}
    if not constant:
        inputs["w"] = (dtype, shape)
    return chain(nodes, inputs, ["y"], {"w": w} if constant else {}, opset=13)


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(1), {}
    for info in proto.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        found[info.name] = (rng.integers(-3, 3, shape) if info.name == "i" else rng.normal(size=shape)).astype(dtype)
    return found


def ops(graph: PrimitiveGraph) -> list[str]:
    return [p.op for p in graph.primitives if p.op not in ("reshape", "broadcast", "cast")]


FORMS = [
    {},
    {"first": True},
    {"turned": True},
    {"first": True, "turned": True},
    {"gather": "GatherND", "first": True},
    {"lead": (2, 3)},
    {"lead": (2, 3), "first": True},
    {"lead": (2, 3), "narrow": True},
    {"dtype": TensorProto.FLOAT16},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gathered_matrices_are_not_copied(form):
    proto = model(**form)
    graph = fission(load_model(proto))
    check_graph(graph)
    assert ops(graph) == ["matmul_gathered"]
    feeds = feeds_of(proto)
    (expected,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    close = {"rtol": 1e-2, "atol": 1e-2} if form.get("dtype") else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(run(graph, feeds)["y"], expected, **close)
    copied = gather_matrices(graph, lambda primitive: False)
    check_graph(copied)
    assert "opaque" in ops(copied) and "matmul_gathered" not in ops(copied)
    np.testing.assert_allclose(run(copied, feeds)["y"], expected, **close)
    assert gather_matrices(graph, lambda primitive: True) is graph


@pytest.mark.parametrize("form", [{"rows": 2}, {"constant": False}, {"dtype": TensorProto.DOUBLE}], ids=str)
def test_other_products_gather_first(form):
    graph = fission(load_model(model(**form)))
    assert "opaque" in ops(graph)
    assert "matmul_gathered" not in ops(graph)


def test_as_onnx_it_gathers():
    proto = model(lead=(4,))
    graph = fission(load_model(proto))
    found = OnnxNodes(graph, "a test").model()
    feeds = feeds_of(proto)
    (expected,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    (result,) = onnx.reference.ReferenceEvaluator(found).run(None, feeds)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_copies_that_no_memory_holds_are_not_made(rows):
    w = np.broadcast_to(np.float32(1), (2, 512, 512)).copy()
    nodes = [helper.make_node("Gather", ["w", "i"], ["m"]), helper.make_node("MatMul", ["x", "m"], ["y"])]
    proto = chain(nodes, {"x": (F32, [1 << 15, rows, 512]), "i": (I64, [1 << 15])}, ["y"], {"w": w})
    if rows == 1:
        assert ops(fission(load_model(proto))) == ["matmul_gathered"]
        return
    with pytest.raises(ModelError) as error:
        fission(load_model(proto))
    assert str(error.value) == (
        "Gather m: it is f32[32768,512,512], 32 GiB; expected at most 16 GiB. Check the sizes in the model"
    )
