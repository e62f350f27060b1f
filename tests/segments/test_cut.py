"""The cuts of a graph: within the limit, sound, and at the same positions in repeated blocks."""

import numpy as np
import pytest

from benchmarks.models.transformer_block import build_transformer_block
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, ValueType
from korch.segments.cut import choose_cuts, constant_primitives, copied_primitives
from tests.support.random_graph import random_graph


def transformer(depth: int) -> PrimitiveGraph:
    model = build_transformer_block(sequence=16, width=32, heads=2, depth=depth)
    return fission(load_model(model, {}))


@pytest.mark.parametrize("limit", [1, 3, 10])
@pytest.mark.parametrize("seed", range(6))
def test_segments_hold_each_primitive_once_and_read_only_earlier_ones(seed: int, limit: int) -> None:
    graph = random_graph(np.random.default_rng(seed), primitives=25, linear=True)
    constant = constant_primitives(graph) | copied_primitives(graph)
    cuts = choose_cuts(graph, limit)
    placed = [p for segment in cuts.segments for p in segment]
    assert sorted(placed) == [p for p in range(len(graph.primitives)) if p not in constant]
    assert max(map(len, cuts.segments)) <= limit
    segment_of = {p: i for i, segment in enumerate(cuts.segments) for p in segment}
    for p in placed:
        for value in graph.primitives[p].inputs:
            for q in graph.producers[value]:
                assert q in constant or segment_of[q] <= segment_of[p]
    assert cuts.prices_bytes[-1] == 0


CASTS = {"narrow": "bf16", "widen": "f32"}


def chain(*ops: str, size: int = 4096) -> PrimitiveGraph:
    """Return a graph of primitives one after the other."""
    builder = GraphBuilder()
    value = builder.input("x", ValueType((1, 8, size // 64, 8), DType.F32))
    weights = builder.constant(np.random.default_rng(0).normal(size=(8, 8, 1, 1)).astype("f4"))
    for op in ops:
        if op == "conv":
            unit = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))
            value = builder.add("conv", (value, weights), unit)
        elif op == "pad":
            value = builder.add("pad", (value,), PadAttributes((0, 0, 1, 1), (0, 0, 0, 0)))
        elif op in CASTS:
            value = builder.add("cast", (value,), CastAttributes(CASTS[op]))
        else:
            value = builder.add(op, (value,))
    builder.output("y", value)
    return builder.freeze()


@pytest.mark.parametrize(
    ("ops", "place"),
    [
        (("tanh", "sin", "conv", "tanh"), 2),  # not behind a product: its epilogue would be lost
        (("conv", "tanh", "pad", "conv"), 2),  # not between a pad and what reads it
        (("conv", "tanh", "conv", "sin"), 2),
        (("narrow", "tanh", "widen", "conv"), 2),  # not between what widens numbers and what multiplies them
    ],
)
def test_a_cut_is_where_no_kernel_would_be(ops: tuple[str, ...], place: int) -> None:
    cuts = choose_cuts(chain(*ops), 3)
    assert [len(segment) for segment in cuts.segments] == [place, len(ops) - place]


def test_a_deeper_model_is_cut_at_the_same_places() -> None:
    shallow, deep = (choose_cuts(transformer(depth), 100) for depth in (4, 12))
    sizes = [len(segment) for segment in shallow.segments]
    longer = [len(segment) for segment in deep.segments]
    assert set(longer) == set(sizes)
    assert longer[0] == sizes[0]
    assert longer[-1] == sizes[-1]


def test_a_graph_of_constants_alone_has_no_segment() -> None:
    builder = GraphBuilder()
    builder.input("x", ValueType((2,), DType.F32))
    builder.output("y", builder.constant(np.arange(3, dtype=np.float32)))
    assert choose_cuts(builder.freeze(), 4).segments == ()
