"""Walks over directed graphs."""

from korch.primitive.walks import depth_first, reached

GRAPH = {1: [2, 3], 2: [4], 3: [4, 5], 4: [], 5: [], 6: [1]}


def test_what_can_be_reached_is_found_once() -> None:
    """Starts are included; what leads to them is not."""
    assert set(reached([2, 3], GRAPH.__getitem__)) == {2, 3, 4, 5}
    assert list(reached([2, 2], GRAPH.__getitem__)) == [2, 4]


def test_each_node_comes_after_those_before_it() -> None:
    """Nodes before one keep their order, and each node is visited once."""
    assert list(depth_first([6], GRAPH.__getitem__)) == [4, 2, 5, 3, 1, 6]
    assert list(depth_first([4, 3, 2], GRAPH.__getitem__)) == [4, 5, 3, 2]


def test_cycles_end() -> None:
    """The first node of a cycle comes last, and all nodes of a cycle are reached."""
    cycle = {1: [2], 2: [3], 3: [1]}
    assert list(depth_first([1], cycle.__getitem__)) == [3, 2, 1]
    assert set(reached([1], cycle.__getitem__)) == {1, 2, 3}
