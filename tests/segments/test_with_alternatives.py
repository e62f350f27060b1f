"""Rewrites across cuts: none is lost, repeated parts stay equal, and values stay correct."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from korch.equivalence.rules import RULES
from korch.equivalence.saturate import saturate
from korch.options import Options
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import ConcatAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import DType, ValueType
from korch.segments.block import Partition, find_blocks
from korch.segments.choose import choose, estimated_cost
from korch.segments.extract import extract
from korch.segments.with_alternatives import split_segments
from tests.partition_oracle import assert_computes
from tests.support.random_graph import random_graph, random_inputs

UNIT = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))
WIDE = [rule for rule in RULES if not rule.is_local]
LOCAL = partial(saturate, strict=False, rules=[rule for rule in RULES if rule.is_local])


def partitioned(graph: PrimitiveGraph, limit: int) -> tuple[PrimitiveGraph, Partition]:
    whole, _ = saturate(graph, strict=False, rules=WIDE)
    return whole, find_blocks(whole, split_segments(whole, limit), LOCAL)


def branches(count: int) -> PrimitiveGraph:
    """Return a map of the channels of a concatenation of images that are few channels made wide.

    W [A1 x1; A2 x2; ...] = (W1 A1) x1 + (W2 A2) x2 + ...: far less, if all of it is in one graph.
    """
    rng = np.random.default_rng(0)
    builder = GraphBuilder()
    x = builder.input("x", ValueType((1, 4, 16, 16), DType.F32))

    def conv(value: int, outputs: int, inputs: int) -> int:
        weights = rng.standard_normal((outputs, inputs, 1, 1)).astype(np.float32)
        return builder.add("conv", (value, builder.constant(weights)), UNIT)

    parts = []
    for op in ("tanh", "sin", "cos", "sigmoid")[:count]:
        parts.append(conv(builder.add(op, (x,)), 64, 4))
    whole = builder.add("concat", parts, ConcatAttributes(1))
    builder.output("y", builder.add("tanh", (conv(whole, 16, 64 * count),)))
    return builder.freeze()


def flop(graphs: Sequence[PrimitiveGraph]) -> int:
    return sum(sum(map(found.work_flop, found.primitives)) for found in (choose(g) for g in graphs))


def test_a_map_of_channels_moves_across_cuts() -> None:
    graph = branches(4)
    whole, partition = partitioned(graph, 4)
    assert len(partition.instances) > 2
    in_segments = flop([instance.graph for instance in partition.instances])
    assert in_segments <= 1.03 * flop([whole]) < flop([graph]) / 4
    # Cut first, every segment is left with the work that it was given.
    apart = find_blocks(graph, split_segments(graph, 4), partial(saturate, strict=False))
    assert flop([instance.graph for instance in apart.instances]) > 4 * in_segments


@pytest.mark.parametrize("limit", [3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_segments_of_a_saturated_graph_compute_what_the_graph_does(seed: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, primitives=20, linear=True)
    _, partition = partitioned(graph, limit)
    assert_computes(partition, graph, rng)


def test_every_alternative_of_a_segment_has_the_value_of_the_whole_graph() -> None:
    graph = branches(3)
    whole, partition = partitioned(graph, 4)
    inputs = random_inputs(graph, np.random.default_rng(1))
    expected = reference.run(graph, inputs)
    for p in range(len(whole.primitives)):  # each alternative in turn
        kept = [
            q
            for q in range(len(whole.primitives))
            if whole.primitives[q].output != whole.primitives[p].output or q == p
        ]
        for name, array in reference.run(whole.with_primitives(kept), inputs).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-4)
    assert sum(instance.graph.alternatives for instance in partition.instances)


def layers(depth: int) -> PrimitiveGraph:
    """Return equal layers in each of which a scale of channels folds into two products."""
    rng = np.random.default_rng(depth)
    builder = GraphBuilder()
    shape = (32, 16)
    x = builder.input("x", ValueType(shape, DType.F32))

    def weights(*sizes: int) -> int:
        return builder.constant(rng.standard_normal(sizes).astype(np.float32))

    for _ in range(depth):
        wide = builder.add("broadcast", (weights(1, 16),), BroadcastAttributes(shape))
        scaled = builder.add("mul", (builder.add("tanh", (x,)), wide))
        a = builder.add("sin", (builder.add("matmul", (scaled, weights(16, 16))),))
        b = builder.add("cos", (builder.add("matmul", (scaled, weights(16, 16))),))
        x = builder.add("add", (x, builder.add("sigmoid", (builder.add("mul", (a, b)),))))
    builder.output("y", x)
    return builder.freeze()


def test_rewritten_layers_stay_equal_so_depth_adds_no_block() -> None:
    blocks = []
    for depth in (8, 20):
        graph = layers(depth)
        partition = partitioned(graph, 24)[1]
        assert any(block.graph.alternatives for block in partition.blocks)
        blocks.append(len(partition.blocks))
    assert blocks[0] == blocks[1] <= 4


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_before_cuts_is_about_as_cheap_as_the_solvers(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), primitives=20, linear=True)
    whole, _ = saturate(graph, strict=False, rules=WIDE)

    def cost(found: PrimitiveGraph) -> int:
        return sum(estimated_cost(found, p) for p in range(len(found.primitives)))

    chosen = choose(whole)
    assert not chosen.alternatives
    assert cost(extract(whole, Options())) <= cost(chosen) <= min(cost(graph), 1.1 * cost(extract(whole, Options())))


def test_segments_enlarge_masks_themselves_and_are_equal() -> None:
    rng = np.random.default_rng(0)
    builder = GraphBuilder()
    x = builder.input("x", ValueType((8, 16), DType.F32))
    mask = builder.input("mask", ValueType((1, 16), DType.F32))
    for _ in range(6):
        product = builder.add("matmul", (x, builder.constant(rng.standard_normal((16, 16)).astype(np.float32))))
        zeros = builder.constant(np.zeros((8, 16), np.float32))
        wide = builder.add("broadcast", (mask,), BroadcastAttributes((8, 16)))
        x = builder.add("tanh", (builder.add("where", (builder.add("less", (zeros, wide)), product, zeros)),))
    builder.output("y", x)
    graph = builder.freeze()
    partition = find_blocks(graph, split_segments(graph, 3), LOCAL)
    assert len(partition.instances) == 6
    assert len(partition.blocks) == 1
    read = {type_ for i in partition.instances for _, v in i.graph.inputs if (type_ := i.graph.types[v]).size < 128}
    assert read == {ValueType((1, 16), DType.F32)}
    assert all(i.graph.types[v].dtype is DType.F32 for i in partition.instances for _, v in i.graph.inputs)
    assert_computes(partition, graph, rng)
