"""Independent groups are united and split again."""

from __future__ import annotations

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal, make_group, make_layout_change
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.unite import split, unite
from korch.limits import SearchLimits
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import parse_graph
from tests.candidate.candidate_oracle import with_operator
from tests.support.random_graph import random_graph

TWO = """
graph(%0 "x": f32[4,8], %1 "y": f32[4,8]) -> (%3 "a", %5 "b")
%2: f32[4,8] = exp(%0)
%3: f32[4,8] = tanh(%2)
%4: f32[4,8] = sigmoid(%1)
%5: f32[4,8] = add(%4, %0)
"""


def graph_of(text: str) -> PrimitiveGraph:
    return parse_graph(text.lstrip())


def test_parts_are_found_again() -> None:
    graph = graph_of(TWO)
    parts = make_group(graph, [0, 1], [3]), make_group(graph, [2, 3], [5])
    group = unite(graph, parts)
    assert isinstance(group, Group)
    assert (group.primitives, group.inputs, group.outputs) == ((0, 1, 2, 3), (0, 1), (3, 5))
    assert [part.key for part in split(group, [1, 1])] == [part.key for part in parts]


def test_a_part_with_two_outputs_and_a_shared_primitive() -> None:
    graph = graph_of(TWO)
    first, second = make_group(graph, [0, 1], [2, 3]), make_group(graph, [2, 3], [5])
    group = unite(graph, (second, first))
    assert isinstance(group, Group)
    assert group.outputs == (5, 2, 3)
    assert [part.key for part in split(group, [1, 2])] == [second.key, first.key]
    again = graph_of("""
graph(%0 "x": f32[4]) -> (%2 "a", %3 "b")
%1: f32[4] = exp(%0)
%2: f32[4] = tanh(%1)
%3: f32[4] = neg(%1)
""")
    both = make_group(again, [0, 1], [2]), make_group(again, [0, 2], [3])
    united = unite(again, both)  # each computes %1 for itself
    assert isinstance(united, Group)
    assert [part.key for part in split(united, [1, 1])] == [part.key for part in both]


def test_a_change_of_layout_is_a_part() -> None:
    graph = graph_of(TWO)
    change, other = make_layout_change(graph, 1), make_group(graph, [0, 1], [3])
    group = unite(graph, (change, other))
    assert isinstance(group, Group)
    assert group.outputs == (1, 3)
    assert [part.key for part in split(group, [1, 1])] == [change.key, other.key]


def test_constants_stay_what_they_are() -> None:
    graph = graph_of("""
graph(%0 "x": f32[4,8], %1 "y": f32[4,8]) -> (%6 "a", %7 "b")
%2: f32[8] = constant {digest=1f0c2ab4d5e6f708}
%3: f32[4,8] = constant {uniform=2.0}
%4: f32[4,8] = broadcast(%2) {shape=(4, 8)}
%5: f32[4,8] = add(%0, %4)
%6: f32[4,8] = mul(%5, %3)
%7: f32[4,8] = add(%1, %4)
""")
    parts = make_group(graph, [0, 1, 2], [6]), make_group(graph, [0, 3], [7])
    group = unite(graph, parts)
    assert isinstance(group, Group)
    assert group.constant_inputs == {group.inputs.index(2)}
    again = split(group, [1, 1])
    assert [part.key for part in again] == [part.key for part in parts]
    assert [len(part.constant_inputs) for part in again] == [1, 1]


def test_a_number_that_only_one_part_reads_from_memory() -> None:
    graph = graph_of("""
graph(%0 "x": f32[4,4], %1 "y": f32[4,4]) -> (%3 "a", %4 "b")
%2: f32[4,4] = constant {uniform=2.0}
%3: f32[4,4] = matmul(%0, %2)
%4: f32[4,4] = mul(%1, %2)
""")
    parts = make_group(graph, [0], [3]), make_group(graph, [1], [4])
    assert unite(graph, parts) == Refusal("a constant is part of one group and an input of another")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((([0], [2]), ([1], [3])), "a part computes what another reads"),
        ((([0, 1], [3]), ([0, 1], [3])), "two parts write a value"),
    ],
)
def test_refusals(parts: tuple[tuple[list[int], list[int]], ...], reason: str) -> None:
    graph = graph_of(TWO)
    groups = [make_group(graph, own, outputs) for own, outputs in parts]
    assert unite(graph, groups) == Refusal(reason)


def test_a_value_has_one_alternative() -> None:
    graph = graph_of("""
graph(%0 "x": f32[4]) -> (%2 "a", %3 "b")
%1: f32[4] = exp(%0)
   | tanh(%0)
%2: f32[4] = neg(%1)
%3: f32[4] = abs(%1)
""")
    groups = make_group(graph, [0, 2], [2]), make_group(graph, [1, 3], [3])
    assert unite(graph, groups) == Refusal("two parts compute a value in different ways")


@pytest.mark.parametrize("seed", range(12))
def test_random_groups_are_found_again(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed))
    groups, _ = enumerate_groups(graph, Options(search=SearchLimits(max_primitives=6)))
    united = 0
    for i, first in enumerate(groups[:40]):
        for second in groups[i + 1 : 40]:
            group = unite(graph, (first, second))
            if isinstance(group, Group):
                counts = [len(first.outputs), len(second.outputs)]
                keys = [part.key for part in split(group, counts)]
                assert keys == [first.key, second.key]
                united += 1
    assert united or len(groups) < 4


def test_opaque_operators_are_left_alone() -> None:
    graph = with_operator(random_graph(np.random.default_rng(0)), 0)
    opaque = [p for p, primitive in enumerate(graph.primitives) if primitive.op == "opaque"]
    part = make_group(graph, opaque[:1], [graph.primitives[opaque[0]].output])
    assert unite(graph, [part]) == Refusal("an opaque operator may have threads of its own")
