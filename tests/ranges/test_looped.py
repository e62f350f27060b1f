"""Loops in ranges: their iterations have free axes, read sizes, and combine elements along free axes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.costs.operations import iterations
from korch.errors import UnsupportedError
from korch.frontend.onnx import read_model
from korch.pipeline import served as of_tasks
from korch.pipeline.source import compared_numbers
from korch.ranges import free
from korch.ranges.binding import dimensions_of
from korch.ranges.form import extent
from korch.ranges.needed import needs_of_plan
from tests.ranges.range_models import Shapes, masked_model, model, weight, worst_error

EXACT = 1e-9
N: Shapes = {"n": (range(1, 9),)}


def scan(body: str, before: str = "", x: str = "float[40,1,n] x", s: str = "float[1,1] s0", sliced: str = "x") -> bytes:
    """Return a Scan with a state s0, which becomes s, and results y, that reads slices of a value."""
    return model(
        f"g ({s}, {x}) => (float[] s, float[] y) <int64[1] one = {{1}}, int64 two = {{2}}, int64 at = {{2}}> "
        f"{{ {before} "
        f"s, y = Scan <num_scan_inputs = 1, body = b (float[] a, float[] v) => (float[] k, float[] u) {{ {body} }}> "
        f"(s0, {sliced}) }}"
    )


def right(source: bytes, shapes: Shapes, sizes: Sequence[tuple[int, ...]]) -> None:
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, own) for own in sizes) < EXACT


ALL = [(n,) for n in range(1, 9)]


@pytest.mark.parametrize("reduce", ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceMean"])
def test_an_iteration_combines_elements_along_a_free_axis(reduce: str) -> None:
    """Slices have arbitrary elements beyond the valid ones: here 2 * exp(0)."""
    axes = "r = ReduceSum(v, one)" if reduce == "ReduceSum" else f"r = {reduce} <axes = [1]> (v)"
    source = scan(f"{axes} p = Add(a, r) k = Tanh(p) u = Div(v, r)", "o = Exp(x) e = Add(o, o)", sliced="e")
    right(source, N, ALL)
    whole = masked_model(source, N)
    assert max(worst_error(source, N, whole, sizes, without_masks=True) for sizes in ALL) > 1e-3


def test_an_iteration_multiplies_over_a_free_axis() -> None:
    body = "t = Transpose <perm = [1, 0]> (v) p = MatMul(v, t) q = Softmax <axis = 1> (v) r = ReduceSum(q, one)"
    body += " m = Add(p, r) o = Add(a, m) k = Tanh(o) u = Mul(q, k)"
    right(scan(body, "e = Exp(x)", sliced="e"), N, ALL)


def test_a_state_has_arbitrary_elements_beyond_the_valid_ones() -> None:
    body = "e = Exp(a) r = ReduceSum(e, one) k = Add(e, v) q = Sub(k, e) u = Add(q, r)"
    right(scan(body.replace("k = Add(e, v)", "p = Add(e, v) k = Tanh(p)"), s="float[1,n] s0"), N, ALL)


NUMBER = "z = Shape(x) i = Gather(z, at) m = Min(i, two) c = Cast <to = 1> (m)"


@pytest.mark.parametrize("least", [1, 4])
def test_a_number_in_an_iteration_is_compared_at_the_smallest_sizes(least: int) -> None:
    source = scan("u = Mul(v, c) r = ReduceMax <axes = [1]> (u) k = Add(a, r)", NUMBER)
    shapes: Shapes = {"n": (range(least, 9),)}
    try:
        whole = masked_model(source, shapes)
    except UnsupportedError:
        assert least == 1
    else:
        assert max(worst_error(source, shapes, whole, (n,)) for n in range(least, 9)) < EXACT


def test_a_size_with_which_an_iteration_compares_is_compared() -> None:
    """At one size of many, an iteration multiplies by another number."""
    number = "z = Shape(v) i = Gather(z, place) q = Equal(i, special) c = Where(q, seven, three)"
    source = onnx.load_from_string(scan(f"{number} u = Mul(v, c) r = ReduceMax <axes = [1]> (u) k = Add(a, r)"))
    (body,) = (a.g for a in source.graph.node[-1].attribute if a.name == "body")
    numbers = {"place": np.int64(1), "special": np.int64(93), "seven": np.float32(7), "three": np.float32(3)}
    body.initializer.extend(onnx.numpy_helper.from_array(np.array(n), name) for name, n in numbers.items())
    with pytest.raises(UnsupportedError, match="it computes with"):
        masked_model(source.SerializeToString(), {"n": (range(1, 200),)})
    whole = masked_model(source.SerializeToString(), {"n": (range(1, 60),)})
    assert max(worst_error(source.SerializeToString(), N, whole, (n,)) for n in range(1, 9)) < EXACT


def test_bodies_may_give_their_numbers_the_same_name() -> None:
    source = onnx.load_from_string(scan("q = Equal(v, special) u = Cast <to = 1> (q) k = Add(a, u)"))
    first = source.graph.node[-1]
    second = source.graph.node.add()
    second.CopyFrom(first)
    second.output[:] = [f"{name} again" if name else "" for name in second.output]
    source.graph.output[0].name = second.output[0]
    for node, number in ((first, 93), (second, 500)):
        (body,) = (a.g for a in node.attribute if a.name == "body")
        body.initializer.append(onnx.numpy_helper.from_array(np.array(number), "special"))
    assert compared_numbers(read_model(source)) == {93, 500}


def test_a_loop_of_which_the_number_of_iterations_and_an_axis_are_free() -> None:
    body = "r = ReduceSum(v, one) p = Add(a, r) k = Tanh(p) u = Mul(v, k)"
    source = scan(body, "e = Exp(x)", x="float[t,1,n] x", sliced="e")
    right(source, {"n": (range(1, 9),), "t": (range(2, 50),)}, [(1, 2), (3, 49), (8, 2), (5, 30)])


LSTM = "w = Identity(m) y, h, c = LSTM <hidden_size = 3> (z, w, r)"


@pytest.mark.parametrize(
    ("before", "x"),
    [
        ("z = Reshape(x, k)", "float[5, b, n, 4] x"),
        ("t = Transpose <perm = [0, 2, 1, 3]> (x) z = Reshape(t, k)", "float[5, b, n, 4] x"),
        ("t = Transpose <perm = [0, 2, 1]> (x) p = MaxPool <kernel_shape = [2], strides = [2]> (t) "
         "z = Transpose <perm = [0, 2, 1]> (p)", "float[5, n, 4] x"),
    ],
)  # fmt: skip
def test_the_batch_of_a_recurrent_layer_is_no_dimension_of_its_own(before: str, x: str) -> None:
    source = model(
        f"g ({x}) => (float[] y, float[] h, float[] c) <int64[3] k = {{5, -1, 4}}> {{ {before} {LSTM} }}",
        m=weight(1, 12, 4),
        r=weight(1, 12, 3),
    )
    n: Shapes = {"n": (range(2, 9),)}
    is_pair = "b" in x
    shapes = {**n, "b": (range(1, 5),)} if is_pair else n
    whole = masked_model(source, shapes)
    assert any(primitive.op == "loop" for primitive in whole.graph.primitives)
    sizes = [(2, 1), (8, 4), (5, 3), (8, 2)] if is_pair else [(own,) for own in range(2, 9)]
    assert max(worst_error(source, shapes, whole, own) for own in sizes) < 1e-6


def test_a_recurrent_operator_whose_loop_is_refused_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(
        f"g (float[5, n, 4] z) => (float[] y, float[] h, float[] c) {{ {LSTM} }}",
        m=weight(1, 12, 4),
        r=weight(1, 12, 3),
    )
    monkeypatch.delitem(free.RULES, "loop")
    whole = masked_model(source, N)
    assert {p.op for p in whole.graph.primitives} >= {"opaque"}
    assert max(worst_error(source, N, whole, own) for own in ALL) < 1e-6
    with pytest.raises(UnsupportedError, match="loop has no rule"):
        masked_model(scan("k = Add(a, v) u = Neg(k)", x="float[40,1,1] x, float[n] z"), N)


@dataclass(frozen=True)
class Task:
    block: Any
    candidates: tuple[Candidate, ...]


@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_loop_is_timed_with_as_many_iterations_as_a_size_has(places: tuple[int, ...]) -> None:
    """Also one of which only final states are read: their first axis is the batch."""
    source = model(
        f"g (float[n, b, 4] z) => (float[] y, float[] h, float[] c) {{ {LSTM} }}",
        m=weight(1, 12, 4),
        r=weight(1, 12, 3),
    )
    shapes: Shapes = {"n": (range(1, 41),), "b": (range(1, 9),)}
    whole = masked_model(source, shapes)
    graph, dimension = whole.graph, [d.name for d in dimensions_of(shapes)].index("n")
    loops = [p for p, primitive in enumerate(graph.primitives) if primitive.op == "loop"]
    numbers = [loops[i] for i in places]
    group = make_group(graph, numbers, [graph.primitives[p].output for p in numbers])
    candidate = Candidate(group, "loop", Offer(*group.plain_layouts))
    trips = of_tasks._trips(graph, whole.plan)
    assert trips == dict.fromkeys(loops, extent(dimension))
    joined: Any = SimpleNamespace(values=(tuple(range(len(graph.types))),), first_primitives=(0,))
    task: Any = Task(SimpleNamespace(graph=graph, instances=(0,)), (candidate,))
    sizes = tuple(17 if d == dimension else 3 for d in (0, 1))
    needs = needs_of_plan(graph, whole.plan, {})
    (found,) = of_tasks._served(task, joined, needs, ({}, trips), sizes).candidates
    assert [own.tolist() for own in iterations(group, found.served).values()] == [[17]]
    assert [own.tolist() for own in iterations(group, None).values()] == [[40]]
    assert found.served is not None
    assert str(found.served) != str(replace(found.served, trips=None))
