import ml_dtypes
import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.primitive.check import check_graph
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.reference import run
from korch.primitive.text import format_graph, parse_graph
from korch.primitive.types import DType, ValueType
from tests.support.random_graph import random_graph, random_inputs


def _constants(graph):
    return {c.digest: c.array for c in graph.constants.values()}


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_print_parse_back_and_mean_the_same(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 14, linear=seed % 2 == 0)
    text = format_graph(graph)
    parsed = parse_graph(text, _constants(graph))
    check_graph(parsed)
    assert parsed == graph
    assert format_graph(parsed) == text
    inputs = random_inputs(graph, rng, specials=True)
    first, second = run(graph, inputs), run(parsed, inputs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def _with_alternatives():
    builder = GraphBuilder()
    x = builder.input("x", ValueType((4,), DType.F32))
    twice = builder.add("add", (x, x), origin="Add twice")
    two = builder.constant(np.full(4, 2, np.float32))
    builder.merge(twice, builder.add("mul", (x, two), origin="by add-is-double"))
    builder.output("y", twice)
    return builder.freeze()


def test_alternatives_are_lines_with_a_bar_and_origins_are_comments():
    graph = _with_alternatives()
    text = format_graph(graph)
    assert "   | mul(%0, %" in text
    assert "   # by add-is-double" in text
    assert parse_graph(text) == graph
    assert graph.alternatives == 1


ODD_NAMES = ['a"b', "a\\b", "a, b: f32[2]) -> (", "ä/b:0", "", "two\nlines", "a\u2028b", "\\u000a"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_survive(name):
    builder = GraphBuilder()
    x = builder.input(name, ValueType((), DType.F32))
    builder.output(name, builder.add("neg", (x,)))
    graph = builder.freeze()
    parsed = parse_graph(format_graph(graph))
    assert parsed.inputs == ((name, 0),)
    assert parsed == graph


NUMBERS = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38, 0.1]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_constants_keep_their_bits(dtype, count):
    with np.errstate(all="ignore"):
        arrays = [np.array([number, 1, 2][:count]).astype(dtype) for number in NUMBERS]
    for array in arrays:
        builder = GraphBuilder()
        builder.output("y", builder.constant(array))
        graph = builder.freeze()
        (constant,) = parse_graph(format_graph(graph)).constants.values()
        assert constant.array.tobytes() == array.tobytes()
        assert constant == next(iter(graph.constants.values()))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.uint64])
def test_integer_constants_keep_their_elements(dtype):
    array = np.array([0, 1, np.iinfo(dtype).max if dtype is not np.bool_ else 1], dtype)
    builder = GraphBuilder()
    builder.output("y", builder.constant(array))
    (constant,) = parse_graph(format_graph(builder.freeze())).constants.values()
    np.testing.assert_array_equal(constant.array, array)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.5])
def test_attributes_that_are_not_finite_survive(value):
    builder = GraphBuilder()
    x = builder.input("x", ValueType((2,), DType.F32))
    builder.output("y", builder.add("pad", (x,), PadAttributes((1,), (0,), "constant", value)))
    text = format_graph(builder.freeze())
    parsed = parse_graph(text)
    np.testing.assert_equal(parsed.primitives[0].attributes.value, value)
    assert format_graph(parsed) == text


def test_large_constants_are_digests_and_unknown_ones_get_seeded_elements():
    builder = GraphBuilder()
    builder.output("y", builder.constant(np.arange(100, dtype=np.float32)))
    graph = builder.freeze()
    text = format_graph(graph)
    assert "digest=" in text
    first, second = parse_graph(text), parse_graph(text)
    np.testing.assert_array_equal(first.constants[0].array, second.constants[0].array)
    exact = parse_graph(text, _constants(graph))
    np.testing.assert_array_equal(exact.constants[0].array, np.arange(100))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nothing", "begin with"),
        ("graph(", r"line 1: can't read 'graph\('"),
        ('graph(%0 "x": f32[2]) ->', "line 1: can't read"),
        ('graph(%0 "x") -> ()', "line 1: can't read"),
        ('graph(%0 "x": f32[2]) -> (%1 "y")\n%1: f32[2] = fly(%0)\n', "line 2"),
        ('graph(%0 "x": f32[2]) -> (%1 "y")\n%1: f31[2] = neg(%0)\n', "line 2"),
        ('graph(%0 "x": f32[2]) -> (%1 "y")\n%1 f32[2] = neg(%0)\n', "expected '%N: TYPE"),
        ('graph(%0 "x": f32[2]) -> (%2 "y")\n%2: f32[2] = neg(%0)\n', "not numbered"),
        ('graph(%0 "x": f32[2]) -> (%1 "y")\n%1: f32[2] = neg %0\n', "expected 'op"),
        ('graph(%0 "x": f32[2]) -> (%1 "y")\n%1: f32[2] = neg(%0) {a=1}\n', "line 2"),
    ],
)
def test_what_can_t_be_read_is_refused_with_its_line(text, complaint):
    with pytest.raises(InvalidGraphError, match=complaint):
        parse_graph(text)


def test_attributes_are_part_of_the_text():
    builder = GraphBuilder()
    x = builder.input("x", ValueType((2, 3), DType.F32))
    builder.output("y", builder.add("reduce_sum", (x,), ReduceAttributes((1,)), origin="R r"))
    expected = 'graph(%0 "x": f32[2,3]) -> (%1 "y")\n%1: f32[2,1] = reduce_sum(%0) {axes=(1,)}   # R r\n'
    assert format_graph(builder.freeze()) == expected
