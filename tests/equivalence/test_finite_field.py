"""Rules on polynomials are polynomial identities: they also hold modulo a large prime."""

from typing import Any

import numpy as np
import pytest

from korch.equivalence.rules import RULES
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import SliceAttributes
from korch.primitive.text import parse_graph
from korch.primitive.types import DType, ValueType
from tests.equivalence.equivalence_examples import FIRING
from tests.equivalence.equivalence_oracle import apply_rules, holds_in_a_finite_field
from tests.support import finite_field
from tests.support.samples_of_ops import LEGAL

BY_NAME = {rule.name: rule for rule in RULES}
NO_POLYNOMIALS = {
    "pool-is-one-axis-after-another": "a maximum compares",
    "large-pool-is-pool-of-small-pool": "a maximum compares",
    "div-by-constant-is-mul": "a reciprocal is rounded",
    "tanh-of-softplus-is-a-quotient": "an exponential and its inverse have no relation",
    "product-of-dequantized-is-integer": "integers are converted",
    "bias-joins-integer-sums": "integers are converted",
    "scales-of-sums-compose": "integers are converted",
    "stored-weights-lie-by-columns": "integers are converted",
    "stored-scale-moves-behind-matmul": "integers are converted",
    "stored-weights-are-computed-once": "integers are converted",
    "move-comes-before-dequantization": "integers are converted",
    "largest-comes-before-dequantization": "a maximum compares",
    "bound-comes-before-dequantization": "a maximum compares",
    "quantization-of-dequantized-is-nothing": "a quotient is rounded",
    "signed-bytes-are-unsigned-ones-less-128": "a quotient is rounded",
    "quantization-moves-into-concat": "a quotient is rounded",
    "bound-before-quantization-is-its-own": "a quotient is rounded",
}
WINOGRAD = 24 * 24
"""Weights that are multiples of it stay whole numbers in the transformed space."""


def whole_numbers(graph: PrimitiveGraph) -> PrimitiveGraph:
    """Return a graph with whole numbers for its constants; binary fractions stay as they are."""
    rng, builder = np.random.default_rng(7), GraphBuilder()
    value_of = {v: builder.input(name, graph.types[v]) for name, v in graph.inputs}
    for value, constant in graph.constants.items():
        array = constant.array
        if not np.array_equal(array * 1024.0, np.rint(array * 1024.0)):
            array = rng.integers(1, 6, array.shape).astype(array.dtype) * WINOGRAD
        value_of[value] = builder.constant(array)
    for p in graph.primitives:
        value_of[p.output] = builder.add(p.op, [value_of[v] for v in p.inputs], p.attributes)
    for name, value in graph.outputs:
        builder.output(name, value_of[value])
    return builder.freeze()


@pytest.mark.parametrize(("name", "text"), FIRING)
def test_rules_hold(name: str, text: str) -> None:
    graph = whole_numbers(parse_graph(text))
    result, report = apply_rules(graph, [BY_NAME[name]])
    assert report.rules[0].fired >= 1
    has_meaning = holds_in_a_finite_field(result, graph, seed=len(text))
    assert has_meaning == (name not in NO_POLYNOMIALS)


@pytest.mark.parametrize("op", ["conv", "matmul", "winograd", "reduce_sum", "pool_sum"])
def test_an_operation_means_the_same_on_small_numbers(op: str) -> None:
    rng = np.random.default_rng(1)
    for sample in LEGAL[op]:
        types: list[ValueType] = [t if isinstance(t, ValueType) else ValueType.parse(t) for t in sample.types]
        builder = GraphBuilder()
        values = [builder.input(f"x{i}", ValueType(t.shape, DType.F64)) for i, t in enumerate(types)]
        builder.output("y", builder.add(op, values, sample.attributes))
        graph = builder.freeze()
        feeds = {f"x{i}": rng.integers(-5, 6, t.shape) for i, t in enumerate(types)}
        expected = reference.run(graph, {k: v.astype(float) for k, v in feeds.items()}, exact=True)
        found = finite_field.alternatives_agree(graph, feeds)
        whole = np.rint(expected["y"]).astype(np.int64) % finite_field.PRIME
        assert np.array_equal(found["y"], whole)


def two_ways(factor: float) -> PrimitiveGraph:
    """Return x + x with an alternative: x * factor."""
    builder = GraphBuilder()
    x = builder.input("x", ValueType((2, 3), DType.F64))
    total = builder.add("add", (x, x))
    c = builder.constant(np.full((2, 3), factor))
    builder.merge(total, builder.add("mul", (x, c)))
    builder.output("y", total)
    return builder.freeze()


def test_a_wrong_alternative_is_found() -> None:
    rng = np.random.default_rng(0)
    right, wrong = two_ways(2.0), two_ways(3.0)
    finite_field.alternatives_agree(right, finite_field.random_elements(right, rng))
    with pytest.raises(AssertionError, match="an alternative differs"):
        finite_field.alternatives_agree(wrong, finite_field.random_elements(wrong, rng))


def unary(op: str, attributes: Any = None) -> PrimitiveGraph:
    builder = GraphBuilder()
    x = builder.input("x", ValueType((4,), DType.F64))
    first = builder.add("slice", (x,), SliceAttributes((0,), (2,), (1,)))
    builder.output("y", builder.add(op, (x,), attributes))
    builder.output("z", builder.add(op, (first,), attributes))
    return builder.freeze()


def test_a_function_that_is_no_polynomial_is_unknown_but_a_function() -> None:
    elements = {"x": np.array([5, 6, 5, 2**31 - 2])}
    found = finite_field.alternatives_agree(unary("exp"), elements)["y"]
    assert found[0] == found[2] and len({*found.tolist()}) == 3
    other = finite_field.alternatives_agree(unary("tanh"), elements)
    assert other["y"][0] != found[0] and np.array_equal(other["z"], other["y"][:2])


def test_what_has_no_meaning_is_refused() -> None:
    graph = two_ways(0.3)
    with pytest.raises(finite_field.NotPolynomialError):
        finite_field.alternatives_agree(graph, {"x": np.zeros((2, 3), np.int64)})
