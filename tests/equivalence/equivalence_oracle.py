"""Shared code of the tests of equivalence rules: an oracle that runs all alternatives of all values."""

from collections.abc import Sequence

import numpy as np

from korch.equivalence.rule import AnyRule, RuleRefusal, View
from korch.equivalence.saturate import SaturationReport, saturate
from korch.primitive.check import check_graph
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.reference import apply
from korch.primitive.types import DType, ValueType
from tests.support import finite_field

# Sums of at most 2^12 products of numbers of at most 2^10, in float64: 2^-52 * 2^12 * slack.
RELATIVE = 2.0**-52 * 2**12


def apply_rules(
    graph: PrimitiveGraph, rules: Sequence[AnyRule], *, strict: bool = False
) -> tuple[PrimitiveGraph, SaturationReport]:
    """Saturate with some rules only and check the result."""
    result, report = saturate(graph, strict=strict, rules=rules)
    check_graph(result)
    return result, report


def refusals(graph: PrimitiveGraph, rule: AnyRule) -> list[str | None]:
    """Return per match of a rule the reason why it refuses; None where it applies."""
    view = View(GraphBuilder.from_graph(graph), [value for _, value in graph.outputs])
    matches = (match for root in view.primitives if root.op in rule.roots for match in rule.match(view, root))
    answers = (rule.rewrite(view, match) for match in matches)
    return [answer.reason if isinstance(answer, RuleRefusal) else None for answer in answers]


def random_inputs(graph: PrimitiveGraph, seed: int, *, integers: bool) -> dict[str, Array]:
    """Return seeded inputs, whole numbers in -9..9 if `integers`."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, v in graph.inputs:
        shape, dtype = graph.types[v].shape, graph.types[v].dtype.numpy
        limits = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else None
        if limits is not None and limits.max < 1 << 16:
            found[name] = rng.integers(limits.min, limits.max + 1, shape, dtype)
        else:
            drawn = rng.integers(-9, 10, shape) if integers else rng.uniform(-2, 2, shape)
            found[name] = drawn.astype(dtype)
    return found


def assert_alternatives_agree(
    graph: PrimitiveGraph, reference: PrimitiveGraph, *, seed: int = 0, integers: bool = False
) -> None:
    """Compute every primitive; each must agree with its value and the outputs with `reference`.

    With `integers` all numbers are small and whole, float64 holds them exactly, and equality is
    asserted: by Schwartz and Zippel a polynomial identity of degree d that is wrong survives one
    run with probability d/19 at most.
    """
    inputs = random_inputs(graph, seed, integers=integers)
    values = _all_values(graph, inputs, integers)
    expected = _all_values(reference, inputs, integers)
    for (name, v), (other, w) in zip(graph.outputs, reference.outputs, strict=True):
        assert name == other
        _assert_close(values[v], expected[w], integers)
    if integers:
        holds_in_a_finite_field(graph, reference, seed=seed)


def holds_in_a_finite_field(graph: PrimitiveGraph, reference: PrimitiveGraph, *, seed: int = 0) -> bool:
    """Return whether all primitives have a meaning modulo 2^31 - 1; if so, assert that they agree.

    The error probability is (n + 1) / 2^31 per element, n being the number of linear primitives.
    """
    elements = finite_field.random_elements(reference, np.random.default_rng(seed))
    try:
        found = finite_field.alternatives_agree(graph, elements)
        expected = finite_field.alternatives_agree(reference, elements)
    except finite_field.NotPolynomialError:
        return False
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
    return True


def _all_values(graph: PrimitiveGraph, inputs: dict[str, Array], integers: bool) -> dict[int, Array]:
    values = {v: _exact(inputs[name]) for name, v in graph.inputs}
    values |= {v: _exact(c.array) for v, c in graph.constants.items()}
    waiting = list(graph.primitives)
    while waiting:
        rest = []
        for primitive in waiting:
            if not all(v in values for v in primitive.inputs):
                rest.append(primitive)
                continue
            result = apply(graph, primitive, values, exact=True)
            if primitive.output in values:
                _assert_close(result, values[primitive.output], integers)
            values.setdefault(primitive.output, result)
        assert len(rest) < len(waiting), "primitives that nothing can compute"
        waiting = rest
    return values


def _exact(array: Array) -> Array:
    """Return floats in float64; integers are exact in their own type."""
    return array.astype(np.float64) if DType.of(array.dtype).is_float else array


def _assert_close(found: Array, expected: Array, integers: bool) -> None:
    assert found.shape == expected.shape
    if integers:
        assert np.array_equal(found, expected)
    elif expected.size:
        expected = expected.astype(np.float64)
        scale = max(1.0, float(np.abs(expected).max()))
        assert float(np.abs(found - expected).max()) <= RELATIVE * scale


class Draft:
    """A graph of float64 with seeded constants, whole numbers if `integers`."""

    def __init__(self, seed: int, *, integers: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.integers = integers
        self.builder = GraphBuilder()
        self.add = self.builder.add

    def input(self, *shape: int) -> int:
        return self.builder.input("x", ValueType(shape, DType.F64))

    def array(self, *shape: int) -> Array:
        if self.integers:
            return self.rng.integers(1, 6, shape).astype(np.float64)
        return self.rng.uniform(0.5, 1.5, shape) * self.rng.choice([-1, 1], shape)

    def constant(self, *shape: int) -> int:
        return self.builder.constant(self.array(*shape))

    def shape(self, value: int) -> tuple[int, ...]:
        return self.builder.type(value).shape

    def finish(self, value: int) -> PrimitiveGraph:
        self.builder.output("y", value)
        return self.builder.freeze()
