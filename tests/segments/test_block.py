"""Segments are one block if they differ only in names, order and weights."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from korch.equivalence.saturate import saturate
from korch.errors import InvalidGraphError
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.segments.block import find_blocks, form
from korch.segments.join import join
from korch.segments.segment import extract, whole_segment
from korch.segments.text import format_partition, parse_partition
from korch.segments.with_alternatives import split_segments
from tests.partition_oracle import assert_computes
from tests.support.random_graph import random_graph

SHAPE = (4, 8)
REWRITE = partial(saturate, strict=False)
Change = Callable[[dict[str, object]], None]


def block(rng: np.random.Generator, **change: object) -> PrimitiveGraph:
    """Return y = tanh(x w1) w2 + c x, and s = sum(x), with something changed."""
    known = {
        "first": "w",
        "order": "ys",
        "axis": 0,
        "factor": 2.0,
        "columns": 8,
        "same": False,
        "swap": False,
        "op": "tanh",
        "second": True,
    }
    known |= change
    builder = GraphBuilder()
    x = builder.input("any name", ValueType(SHAPE, DType.F32))
    inner = int(known["columns"])  # type: ignore[call-overload]
    w1 = builder.constant(rng.standard_normal((8, inner)).astype(np.float32))
    w2 = builder.constant(rng.standard_normal((inner, 8)).astype(np.float32))
    if known["same"]:
        w2 = w1
    factor = builder.constant(np.broadcast_to(np.float32(known["factor"]), SHAPE))  # type: ignore[arg-type]

    def product() -> int:
        hidden = builder.add(str(known["op"]), (builder.add("matmul", (x, w1)),))
        scaled = builder.add("mul", (factor, x) if known["swap"] else (x, factor))
        return builder.add("add", (builder.add("matmul", (hidden, w2)), scaled))

    def total() -> int:
        return builder.add("reduce_sum", (x,), ReduceAttributes((int(known["axis"]),)))  # type: ignore[call-overload]

    makers = {"y": product, "s": total}
    made = {name: makers[name]() for name in str(known["order"])}
    for name in str(known["order"]) if known["second"] else "y":
        builder.output(name + " is a name", made[name])
    return builder.freeze()


def form_of(graph: PrimitiveGraph) -> object:
    segment = extract(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])
    return form(segment.graph)


def test_other_weights_names_and_order_are_the_same_block() -> None:
    rng = np.random.default_rng(0)
    first = form_of(block(rng))
    assert form_of(block(rng)) == first
    assert form_of(block(rng, order="sy")) == first


@pytest.mark.parametrize(
    "change",
    [{"axis": 1}, {"factor": 3.0}, {"columns": 16}, {"same": True}, {"swap": True}, {"op": "sin"}, {"second": False}],
)
def test_what_a_kernel_could_tell_apart_is_another_block(change: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    assert form_of(block(rng, **change)) != form_of(block(rng))


def test_weights_that_are_uniform_are_another_block() -> None:
    rng = np.random.default_rng(0)
    graph = block(rng)
    ones = GraphBuilder.from_graph(graph).constant(np.ones((8, 8), np.float32))
    assert ones >= 0
    value = next(v for v, c in graph.constants.items() if not c.is_uniform)
    changed = dict(graph.constants)
    changed[value] = type(changed[value]).of(np.ones((8, 8), np.float32))
    other = PrimitiveGraph(graph.types, graph.primitives, graph.inputs, graph.outputs, changed)
    assert form_of(other) != form_of(graph)


def layers(depth: int, seed: int = 0) -> PrimitiveGraph:
    """Return a model of equal layers with weights of their own, and a table that all share."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder()
    x = builder.input("x", ValueType(SHAPE, DType.F32))
    table = builder.constant(rng.standard_normal((1, 8)).astype(np.float32))
    for _ in range(depth):
        weights = builder.constant(rng.standard_normal((8, 8)).astype(np.float32))
        wide = builder.add("broadcast", (table,), BroadcastAttributes(SHAPE))
        hidden = builder.add("tanh", (builder.add("add", (x, wide)),))
        x = builder.add("sigmoid", (builder.add("matmul", (hidden, weights)),))
    builder.output("y", x)
    return builder.freeze()


def test_equal_layers_are_one_block_and_share_what_the_model_shares() -> None:
    graph = layers(5)
    partition = find_blocks(graph, split_segments(graph, 4), REWRITE)
    # A layer is cut before its product, so the first and the last segment are parts of layers.
    assert [len(block.instances) for block in partition.blocks] == [1, 4, 1]
    assert [len(instance.graph.constants) for instance in partition.instances] == [1, 2, 2, 2, 2, 1]
    joined = join(partition).graph
    assert len(joined.constants) == 1 + 5


@pytest.mark.parametrize("limit", [3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_joined_segments_compute_what_the_graph_does(seed: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, primitives=20, linear=True)
    partition = find_blocks(graph, split_segments(graph, limit), REWRITE)
    assert_computes(partition, graph, rng)


def test_a_small_model_stays_as_it_is() -> None:
    graph = layers(2)
    (segment,) = split_segments(graph, 100)
    assert segment == whole_segment(graph)
    partition = find_blocks(graph, [segment], REWRITE)
    assert partition.is_whole
    assert join(partition).graph is partition.instances[0].graph


@pytest.mark.parametrize("seed", range(6))
def test_a_model_in_segments_is_read_as_it_was_written(seed: int) -> None:
    graph = layers(5, seed) if seed < 2 else random_graph(np.random.default_rng(seed), primitives=20, linear=True)
    partition = find_blocks(graph, split_segments(graph, 4), REWRITE)
    assert not partition.is_whole
    text = format_partition(partition)
    again = parse_partition(text)
    assert format_partition(again) == text
    assert [block.instances for block in again.blocks] == [block.instances for block in partition.blocks]
    assert [form(i.graph) for i in again.instances] == [form(i.graph) for i in partition.instances]
    joined, given = join(again).graph, join(partition).graph
    assert (joined.types, joined.primitives, joined.outputs) == (given.types, given.primitives, given.outputs)
    assert len(joined.constants) == len(given.constants)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph() -> ()", "line 1: the text does not begin with 'model(', or has no segments"),
        ('model(%0 "x": f32[4]) -> (%0 "y")\nsegment(%0) -> ()', "can't read 'segment(%0) -> ()'"),
        (
            'model(%0 "x": f32[4]) -> (%1 "y")\nsegment(%0) -> (%1) price=0\ngraph() -> ()',
            "'segment(%0) -> (%1) price=0' has other numbers of values than its graph",
        ),
        (
            'model(%0 "x": f32[4]) -> (%2 "y")\nsegment() -> () price=0\ngraph() -> ()',
            'model(%0 "x": f32[4]) -> (%2 "y"): the values of the model are not numbered 0, 1, 2, ...',
        ),
    ],
)
def test_a_text_that_is_no_model_in_segments_is_refused(text: str, message: str) -> None:
    if "%2" in text:
        text = text.replace("segment() -> ()", "segment(%0) -> (%2)").replace(
            "graph() -> ()", 'graph(%0 "a": f32[4]) -> (%1 "b")\n%1: f32[4] = neg(%0)'
        )
    with pytest.raises(InvalidGraphError) as info:
        parse_partition(text)
    assert str(info.value).startswith(message)
