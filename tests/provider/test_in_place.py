"""Concatenations that are offered in place, and their layouts."""

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal, make_group
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import ConcatAttributes
from korch.primitive.text import parse_graph
from korch.primitive.types import DType, ValueType
from korch.provider.generated import GeneratedProvider
from korch.provider.in_place import InPlaceProvider
from korch.provider.provider import Kernel
from korch.search.instance import Answers, collect_candidates
from korch.target import Target

TARGET = Target(lanes=16)


def group_of(a: str, b: str, result: str, axis: int = 1, operands: str = "%0, %1") -> Group:
    graph = parse_graph(
        f'graph(%0 "x": {a}, %1 "y": {b}) -> (%2 "z")\n%2: {result} = concat({operands}) {{axis={axis}}}\n'
    )
    return make_group(graph, [0], [2])


@pytest.mark.parametrize(
    ("a", "b", "result", "axis", "layouts"),
    [
        ("f32[1,16,4,4]", "f32[1,32,4,4]", "f32[1,48,4,4]", 1, ["abcd", "aBcd16b"]),
        ("f32[1,16,4,4]", "f32[1,24,4,4]", "f32[1,40,4,4]", 1, ["abcd"]),
        ("f32[1,16,5,5]", "f32[1,16,5,5]", "f32[1,32,5,5]", 1, ["abcd", "aBcd16b"]),
        ("f32[1,16,1,1]", "f32[1,16,1,1]", "f32[1,32,1,1]", 1, ["abcd"]),
        ("f32[1,16,4,4]", "f32[1,16,8,4]", "f32[1,16,12,4]", 2, ["acdb", "aBcd16b"]),
        ("f32[1,1,4,4]", "f32[1,1,8,4]", "f32[1,1,12,4]", 2, ["abcd"]),
        ("f32[2,16,4,4]", "f32[1,16,4,4]", "f32[3,16,4,4]", 0, ["abcd", "acdb", "aBcd16b"]),
        ("f32[32]", "f32[3]", "f32[35]", 0, ["a"]),
        ("u8[1,64]", "u8[1,7]", "u8[1,71]", 1, ["ab"]),
        ("f32[1,16]", "f32[1,0]", "f32[1,16]", 1, ["ab"]),
        ("f32[1,16,0,4]", "f32[1,16,0,4]", "f32[1,32,0,4]", 1, ["abcd"]),
    ],
)
def test_offers(a: str, b: str, result: str, axis: int, layouts: list[str]) -> None:
    provider, group = InPlaceProvider(), group_of(a, b, result, axis)
    offers = provider.offer(group, TARGET)
    assert not isinstance(offers, Refusal)
    assert [str(offer.outputs[0]) for offer in offers] == layouts
    assert all(offer.is_in_place for offer in offers)
    for offer in offers:
        shapes = [type_.shape for type_ in group.input_types]
        assert offer.inputs == tuple(offer.outputs[0].normalized(shape) for shape in shapes)
        assert provider.build(group, offer, TARGET) == Kernel("", "")


@pytest.mark.parametrize(
    ("a", "b", "result", "axis", "operands"),
    [
        ("f32[2,16,4,4]", "f32[2,16,4,4]", "f32[2,32,4,4]", 1, "%0, %1"),  # not the outermost
        ("f32[1,3,5,5]", "f32[1,16,5,5]", "f32[1,19,5,5]", 1, "%0, %1"),  # 300 bytes
        ("f32[3]", "f32[32]", "f32[35]", 0, "%0, %1"),
        ("f32[1,16,4,4]", "f32[1,16,4,4]", "f32[1,32,4,4]", 1, "%0, %0"),
    ],
)
def test_refusals(a: str, b: str, result: str, axis: int, operands: str) -> None:
    group = group_of(a, b, result, axis, operands)
    assert isinstance(InPlaceProvider().offer(group, TARGET), Refusal)


def test_constants_are_refused() -> None:
    for array in (np.zeros((1, 16), np.float32), np.arange(16, dtype=np.float32).reshape(1, 16)):
        builder = GraphBuilder()
        x = builder.input("x", ValueType((1, 16), DType.F32))
        both = [x, builder.constant(array)]
        builder.output("y", builder.add("concat", both, ConcatAttributes(1)))
        graph = builder.freeze()
        group = make_group(graph, [0], [graph.outputs[0][1]])
        assert InPlaceProvider().offer(group, TARGET) == Refusal(
            "a concatenation of constants, or of a value twice, is not in place"
        )


def test_other_groups_are_refused() -> None:
    text = """
graph(%0 "x": f32[1,16], %1 "y": f32[1,16]) -> (%3 "z")
%2: f32[1,32] = concat(%0, %1) {axis=1}
%3: f32[1,32] = neg(%2)
"""
    graph = parse_graph(text.lstrip())
    for members in ([1], [0, 1]):
        found = InPlaceProvider().offer(make_group(graph, members, [3]), TARGET)
        assert found == Refusal("only a concatenation is done in place")


def test_what_has_memory_of_its_own_is_no_part() -> None:
    text = """
graph(%0 "x": f32[1,16], %1 "y": f32[1,16]) -> (%4 "a", %5 "b", %6 "c", %7 "d")
%2: f32[1,16] = exp(%0)
%3: f32[1,16] = neg(%0)
%4: f32[1,32] = concat(%2, %3) {axis=1}
%5: f32[1,32] = concat(%2, %1) {axis=1}
%6: f32[1,16] = abs(%2)
%7: f32[1,32] = concat(%3, %6) {axis=1}
"""
    graph = parse_graph(text.lstrip())
    groups = [make_group(graph, [p], [q.output]) for p, q in enumerate(graph.primitives)]
    found, _ = collect_candidates(graph, groups, Answers((GeneratedProvider(), InPlaceProvider()), TARGET))
    in_place = [c.group.outputs[0] for c in found if c.offer.is_in_place]
    assert in_place == [4]  # of %5 an operand is an input, of %7 one is an output
