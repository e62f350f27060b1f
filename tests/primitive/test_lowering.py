"""Linear primitives of types that no kernel multiplies are replaced by equivalent ones of other types."""

import numpy as np
import pytest

from korch.primitive import lowering
from korch.primitive.check import check_graph
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.lowering import lower_products
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.reference import run
from korch.primitive.types import DType, ValueType
from korch.testing.samples import random_array
from korch.testing.tolerance import assert_same

CONV = ConvAttributes((2, 1), (1, 0), (0, 2), (1, 2), 2)


def linear(op: str, texts: tuple[str, str], attributes=None) -> PrimitiveGraph:
    builder = GraphBuilder()
    inputs = [builder.input(name, ValueType.parse(text)) for name, text in zip("xw", texts, strict=True)]
    builder.output("y", builder.add("neg", [builder.add(op, inputs, attributes, origin="node")]))
    return builder.freeze()


CASES = [("matmul", ("[2,3,4]", "[1,4,5]"), None), ("conv", ("[2,4,6,7]", "[6,2,2,3]"), CONV)]


@pytest.mark.parametrize(("op", "shapes", "attributes"), CASES)
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_the_meaning_stays_and_no_linear_primitive_of_another_type_does(op, shapes, attributes, dtype, rng):
    graph = linear(op, tuple(dtype + shape for shape in shapes), attributes)
    lowered = lower_products(graph)
    check_graph(lowered)
    ops = [p.op for p in lowered.primitives]
    assert (op in ops) == (dtype != "f64")
    assert all(lowered.types[p.output].dtype is DType.F32 for p in lowered.primitives if p.op == op)
    feeds = {name: random_array(rng, graph.types[value]) for name, value in graph.inputs}
    (expected,), (found,) = run(graph, feeds).values(), run(lowered, feeds).values()
    assert_same(found, expected, terms=64, name=op)


def test_what_a_target_multiplies_stays_as_it_is():
    graph = linear("matmul", ("f32[3,4]", "f32[4,5]"))
    assert lower_products(graph) is graph
    half = linear("matmul", ("f16[3,4]", "f16[4,5]"))
    assert lower_products(half, (DType.F32, DType.F16)) is half


def test_origins_stay():
    lowered = lower_products(linear("matmul", ("f64[3,4]", "f64[4,5]")))
    assert set(lowered.origins) == {"node", ""}


def test_too_many_products_stay_one_primitive(monkeypatch):
    monkeypatch.setattr(lowering, "MOST_PRODUCTS", 59)
    graph = linear("matmul", ("f64[3,4]", "f64[4,5]"))
    assert [p.op for p in lower_products(graph).primitives] == ["matmul", "neg"]


def test_integers_wrap_alike():
    graph = linear("matmul", ("i32[3,4]", "i32[4,5]"))
    feeds = {name: np.full(graph.types[value].shape, 1 << 20, np.int32) for name, value in graph.inputs}
    (expected,), (found,) = run(graph, feeds).values(), run(lower_products(graph), feeds).values()
    np.testing.assert_array_equal(found, expected)


BYTES = [*CASES, ("matmul", ("[2,600]", "[600,3]"), None), ("matmul", ("[2,5000]", "[5000,2]"), None)]


@pytest.mark.parametrize(("op", "shapes", "attributes"), BYTES)
@pytest.mark.parametrize("dtypes", [("u8", "i8"), ("i8", "u8"), ("u8", "u8"), ("i8", "i8")])
def test_products_of_bytes_get_an_alternative_of_exact_sums(op, shapes, attributes, dtypes, rng):
    graph = linear(op, tuple(dtype + shape for dtype, shape in zip(dtypes, shapes, strict=True)), attributes)
    lowered = lower_products(graph)
    check_graph(lowered)
    assert {lowered.types[p.output].dtype for p in lowered.primitives if p.op == op} == {DType.I32, DType.F32}
    only_floats = lowered.with_primitives(
        [i for i, p in enumerate(lowered.primitives) if p.op != op or lowered.types[p.output].dtype is DType.F32]
    )
    limits = [np.iinfo(graph.types[value].dtype.numpy) for _, value in graph.inputs]
    for ends in ((0, 0), (0, 1), (1, 0), (1, 1), None):
        feeds = {name: random_array(rng, graph.types[value]) for name, value in graph.inputs}
        if ends is not None:
            for (name, value), limit, end in zip(graph.inputs, limits, ends, strict=True):
                feeds[name] = np.full(graph.types[value].shape, (limit.min, limit.max)[end], limit.dtype)
        (expected,) = run(graph, feeds).values()
        for exact in (True, False):
            (found,) = run(only_floats, feeds, exact=exact).values()
            np.testing.assert_array_equal(found, expected)


def test_constant_weights_bound_the_sums(rng):
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("u8[2,2000]"))
    builder.output("y", builder.add("matmul", [x, builder.constant(np.ones((2000, 3), np.int8))]))
    assert [p.op for p in lower_products(builder.freeze()).primitives].count("matmul") == 2
