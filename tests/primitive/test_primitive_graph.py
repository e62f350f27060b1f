import dataclasses
import tracemalloc

import numpy as np
import pytest

from korch.errors import InputError, InvalidGraphError
from korch.primitive.check import (
    check_graph,
    given_values_have_no_producer,
    no_equal_primitives,
    no_unbound_value,
    outputs_computable,
    types_agree,
)
from korch.primitive.graph import Constant, GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import NONE
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.reference import first_alternatives, run
from korch.primitive.text import format_graph, parse_graph
from korch.primitive.types import DType, ValueType
from tests.support.random_graph import random_graph, random_inputs

F4 = ValueType((4,), DType.F32)


def _small():
    builder = GraphBuilder()
    x = builder.input("x", F4)
    builder.output("y", builder.add("tanh", (builder.add("neg", (x,)),)))
    return builder.freeze()


def _change(graph, p, **changes):
    primitives = list(graph.primitives)
    primitives[p] = dataclasses.replace(primitives[p], **changes)
    return dataclasses.replace(graph, primitives=tuple(primitives))


def test_the_checks_accept_what_is_legal():
    check_graph(_small())


@pytest.mark.parametrize("changes", [{"inputs": (9,)}, {"inputs": (-1,)}, {"output": 7}])
def test_a_value_that_is_not_in_the_graph_is_refused(changes):
    with pytest.raises(InvalidGraphError, match="not in the graph"):
        no_unbound_value(_change(_small(), 0, **changes))


def test_an_output_that_is_not_in_the_graph_is_refused():
    graph = dataclasses.replace(_small(), outputs=(("y", 5),))
    with pytest.raises(InvalidGraphError, match="'y' is value %5"):
        no_unbound_value(graph)


def test_computing_an_input_is_refused():
    with pytest.raises(InvalidGraphError, match="a model input or a constant"):
        given_values_have_no_producer(_change(_small(), 0, output=0))


def test_computing_a_constant_is_refused():
    graph = dataclasses.replace(_small(), constants={1: Constant.of(np.zeros(4, np.float32))})
    with pytest.raises(InvalidGraphError, match="a model input or a constant"):
        given_values_have_no_producer(graph)


@pytest.mark.parametrize(
    "changes", [{"op": "isnan"}, {"op": "not"}, {"op": "add"}, {"op": "cast", "attributes": CastAttributes("i32")}]
)
def test_a_wrong_type_or_arity_is_refused(changes):
    with pytest.raises(InvalidGraphError, match="primitive 0"):
        types_agree(_change(_small(), 0, **changes))


def test_a_constant_of_another_type_is_refused():
    graph = PrimitiveGraph((F4,), (), (), (("y", 0),), {0: Constant.of(np.zeros(3, np.float32))})
    with pytest.raises(InvalidGraphError, match=r"f32\[3\]"):
        types_agree(graph)


def test_equal_primitives_are_refused():
    twice = Primitive("neg", (0,), NONE, 1), Primitive("neg", (0,), NONE, 2)
    graph = PrimitiveGraph((F4, F4, F4), twice, (("x", 0),), (("y", 1), ("z", 2)))
    with pytest.raises(InvalidGraphError, match="equals primitive 0"):
        no_equal_primitives(graph)


def test_an_output_that_only_a_cycle_computes_is_refused():
    cycle = Primitive("neg", (1,), NONE, 0), Primitive("neg", (0,), NONE, 1)
    with pytest.raises(InvalidGraphError, match="can't be computed"):
        outputs_computable(PrimitiveGraph((F4, F4), cycle, (), (("y", 0),)))


def test_equal_primitives_are_one_value():
    builder = GraphBuilder()
    x = builder.input("x", F4)
    assert builder.add("neg", (x,)) == builder.add("neg", (x,))


def test_equal_primitives_of_a_graph_become_one_value():
    """Parts of a graph that were made apart may compute the same; none of what reads them loses its operand."""
    exp = Primitive("exp", (0,), NONE, 1), Primitive("exp", (0,), NONE, 2)
    graph = PrimitiveGraph((F4,) * 4, (*exp, Primitive("add", (1, 2), NONE, 3)), (("x", 0),), (("y", 3),))
    found = graph.with_primitives(range(3))
    assert [primitive.op for primitive in found.primitives] == ["exp", "add"]
    data = np.array([0.0, 1.0, -2.0, 3.0], np.float32)
    np.testing.assert_array_equal(run(found, {"x": data})["y"], run(graph, {"x": data})["y"])


def test_merging_inputs_merges_what_is_computed_from_them():
    builder = GraphBuilder()
    x = builder.input("x", F4)
    a, b = builder.add("neg", (x,)), builder.add("abs", (x,))
    c, d = builder.add("exp", (a,)), builder.add("exp", (b,))
    e, f = builder.add("tanh", (c,)), builder.add("tanh", (d,))
    assert builder.find(e) != builder.find(f)
    builder.merge(a, b)
    builder.rebuild()
    assert builder.find(c) == builder.find(d)
    assert builder.find(e) == builder.find(f)
    builder.output("y", f)
    graph = builder.freeze()
    check_graph(graph)
    assert len(graph.primitives) == 4
    assert graph.alternatives == 1


def test_merging_keeps_what_is_given_and_refuses_other_types():
    builder = GraphBuilder()
    x = builder.input("x", F4)
    y = builder.add("neg", (x,))
    z = builder.add("neg", (y,))
    assert builder.merge(z, x) == x
    builder.output("z", z)
    graph = builder.freeze()
    check_graph(graph)
    assert graph.outputs == (("z", 0),)
    assert not graph.primitives
    with pytest.raises(InvalidGraphError, match="can't be equal"):
        builder.merge(x, builder.add("isnan", (x,)))


def test_an_illegal_primitive_is_refused_when_it_is_added():
    builder = GraphBuilder()
    x = builder.input("x", F4)
    with pytest.raises(InvalidGraphError, match="not bool"):
        builder.add("not", (x,), origin="Not n")


@pytest.mark.parametrize("seed", range(20))
def test_freezing_is_deterministic_and_stable(seed):
    first = random_graph(np.random.default_rng(seed))
    second = random_graph(np.random.default_rng(seed))
    assert format_graph(first) == format_graph(second)
    again = GraphBuilder.from_graph(first).freeze()
    assert format_graph(again) == format_graph(first)


def test_dead_code_is_dropped_but_inputs_stay():
    builder = GraphBuilder()
    x, _ = builder.input("x", F4), builder.input("unused", F4)
    builder.add("exp", (x,))
    builder.output("y", builder.add("neg", (x,)))
    graph = builder.freeze()
    assert [name for name, _ in graph.inputs] == ["x", "unused"]
    assert [p.op for p in graph.primitives] == ["neg"]


def test_constants_are_folded_but_not_enlarged():
    builder = GraphBuilder()
    bias = builder.constant(np.arange(3, dtype=np.float32).reshape(3, 1))
    half = builder.constant(np.array(0.5, np.float32))
    assert builder.constant_of(builder.add("neg", (bias,))) is not None
    wide = builder.add("broadcast", (half,), BroadcastAttributes((1000, 1000)))
    assert builder.constant_of(wide).is_uniform
    assert builder.constant_of(builder.add("exp", (wide,))).is_uniform
    large = builder.add("broadcast", (bias,), BroadcastAttributes((3, 100)))
    assert builder.constant_of(large) is None


def test_equal_constants_are_one_value_however_they_are_stored():
    builder = GraphBuilder()
    ones = np.ones((3, 4), np.float32)
    assert builder.constant(ones) == builder.constant(np.broadcast_to(np.float32(1), (3, 4)))
    column = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert builder.constant(column) == builder.constant(np.asfortranarray(column))
    assert builder.constant(np.ones((1, 1), np.float32)) == builder.constant(ones[:1, :1].T)
    assert builder.constant(np.zeros(2, np.float32)) != builder.constant(-np.zeros(2, np.float32))
    assert builder.constant(np.zeros(2, np.float32)) != builder.constant(np.zeros(2, np.int32))
    assert builder.constant(np.zeros((0, 2))) != builder.constant(np.zeros((2, 0)))


def test_the_interpreter_takes_an_alternative_that_is_not_cyclic():
    builder = GraphBuilder()
    x = builder.input("x", F4)
    y = builder.add("neg", (x,))
    z = builder.add("neg", (y,))
    back = builder.add("neg", (z,))
    builder.merge(back, y)  # y = -z, z = -y
    builder.output("z", z)
    graph = builder.freeze()
    check_graph(graph)
    result = run(graph, {"x": np.arange(4, dtype=np.float32)})
    np.testing.assert_array_equal(result["z"], np.arange(4))
    assert len(first_alternatives(graph)) == 2


@pytest.mark.parametrize("seed", range(10))
def test_alternatives_that_are_true_do_not_change_the_meaning(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    builder = GraphBuilder.from_graph(graph)
    for primitive in graph.primitives:
        if primitive.op == "sub":
            minus = builder.add("neg", (primitive.inputs[1],))
            builder.merge(primitive.output, builder.add("add", (primitive.inputs[0], minus)))
    more = builder.freeze()
    check_graph(more)
    inputs = random_inputs(graph, rng)
    before, after = run(graph, inputs), run(more, inputs)
    for name in before:
        np.testing.assert_allclose(after[name], before[name], rtol=1e-12, atol=1e-12)


def test_the_interpreter_refuses_wrong_inputs():
    graph = _small()
    with pytest.raises(InputError, match="'x' is missing"):
        run(graph, {})
    with pytest.raises(InputError, match="shape"):
        run(graph, {"x": np.zeros(3, np.float32)})


def test_exact_runs_are_float64_and_others_keep_the_types():
    inputs = {"x": np.ones(4, np.float32)}
    assert run(_small(), inputs)["y"].dtype == np.float64
    assert run(_small(), inputs, exact=False)["y"].dtype == np.float32


def test_the_graph_knows_producers_consumers_and_work():
    graph = _small()
    assert graph.producers == ((), (0,), (1,))
    assert graph.consumers == ((0,), (1,), ())
    assert graph.given == frozenset({0})
    assert [graph.work_flop(p) for p in graph.primitives] == [4, 4]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_of_16_bits_are_summed_in_float32(kind):
    """In 16 bits a sum of ones would stop at 2048 and at 256."""
    builder, terms = GraphBuilder(), 4000
    x, w = (
        builder.input(name, ValueType.parse(kind + shape)) for name, shape in (("x", "[1,4000]"), ("w", "[4000,1]"))
    )
    builder.output("y", builder.add("matmul", [x, w]))
    graph = builder.freeze()
    feeds = {name: np.ones(graph.types[value].shape, DType(kind).numpy) for name, value in graph.inputs}
    found = run(graph, feeds, exact=False)["y"]
    assert found.dtype == DType(kind).numpy and found.item() == np.asarray(terms, DType(kind).numpy)
    disturbed = run(graph, feeds, exact=False, roundings=np.random.default_rng(0))["y"]
    assert abs(float(disturbed.item()) - terms) <= 0.05 * terms


WIDENED = """graph(%0 "q": u8[512,1024], %1 "z": f32[512,1024]) -> (OUTPUTS)
%2: f32[512,1024] = cast(%0) {to='f32'}
%3: f32[512,1024] = sub(%2, %1)
%4: f32[512,1024] = mul(%3, %1)
%5: f32[1024,512] = transpose(%4) {perm=(1, 0)}
%6: f32[512,1024] = add(%4, %3)
%7: f32[512,1024] = mul(%6, %6)
"""


def widened_inputs():
    rng = np.random.default_rng(0)
    return {"q": rng.integers(0, 256, (512, 1024), np.uint8), "z": rng.standard_normal((512, 1024), np.float32)}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("outputs", ["%7", "%3 %7", "%5 %7", "%4 %5", "%2 %3 %4 %5 %6 %7"])
def test_results_that_overwrite_inputs_are_right(outputs, exact):
    graph = parse_graph(WIDENED.replace("OUTPUTS", ", ".join(f'{v} "{v}"' for v in outputs.split())))
    inputs = widened_inputs()
    before = {name: array.copy() for name, array in inputs.items()}
    q, z = (array.astype(np.float64 if exact else np.float32) for array in inputs.values())
    less = q - z
    product = less * z
    total = product + less
    expected = {"%2": q, "%3": less, "%4": product, "%5": product.T, "%6": total, "%7": total * total}
    found = run(graph, inputs, exact=exact)
    assert found.keys() == set(outputs.split())
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])
    assert all(np.array_equal(inputs[name], before[name]) for name in inputs)


def test_weights_that_are_widened_are_in_memory_once():
    steps = "".join(line + "\n" for line in WIDENED.splitlines()[:4])
    graph, inputs = parse_graph(steps.replace("OUTPUTS", '%4 "y"')), widened_inputs()
    tracemalloc.start()
    run(graph, inputs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 16 << 19 <= peak < 21 << 19  # z and the result in float64, and q in float32
