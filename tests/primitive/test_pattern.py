"""Patterns are matched through all alternatives, and nowhere else."""

import math

import numpy as np
import pytest

from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.pattern import Found, Number, Pattern, either, find, find_at, op
from korch.primitive.types import ValueType


class Net(GraphBuilder):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.z = (self.input(name, ValueType.parse("f32[4]")) for name in "xz")

    def full(self, number: float) -> int:
        return self.constant(np.broadcast_to(np.float32(number), (4,)))

    def graph(self, value: int) -> tuple[PrimitiveGraph, int]:
        self.output("y", value)
        graph = self.freeze()
        return graph, graph.outputs[0][1]


def count(net: Net, value: int, pattern: Pattern) -> int:
    return len(list(find(net.graph(value)[0], pattern, net.graph(value)[1])))


def test_a_name_is_one_value():
    net = Net()
    square = net.add("mul", [net.x, net.x])
    assert count(net, square, op("mul", "a", "a")) == 1
    assert count(net, square, op("mul", "a", "b")) == 1
    assert count(net, net.add("mul", [net.x, net.z]), op("mul", "a", "a")) == 0


def test_a_commutative_operation_matches_in_either_order_others_in_one():
    net = Net()
    assert count(net, net.add("add", [net.full(1), net.x]), op("add", "x", 1.0)) == 1
    assert count(net, net.add("sub", [net.full(1), net.x]), op("sub", "x", 1.0)) == 0
    assert count(net, net.add("add", [net.x, net.z]), op("add", "a", "b")) == 2


def test_every_alternative_is_tried_also_inside():
    net = Net()
    inner = net.add("tanh", [net.x])
    net.merge(inner, net.add("sigmoid", [net.z]))
    graph, y = net.graph(net.add("exp", [inner]))
    found = list(find(graph, op("exp", op("tanh|sigmoid", "v", name="curve")), y))
    assert [each.primitives["curve"].op for each in found] == ["tanh", "sigmoid"]
    assert [p.op for p in found[1].used] == ["sigmoid", "exp"]
    assert list(find(graph, op("exp", op("sigmoid", "v")), y))
    assert not list(find(graph, op("exp", op("neg", "v")), y))


def test_either_pattern_is_tried_in_order_at_any_depth():
    net = Net()
    inner = net.add("tanh", [net.x])
    net.merge(inner, net.add("sigmoid", [net.z]))
    graph, y = net.graph(net.add("exp", [inner]))
    curve = either(op("sigmoid", "a"), op("tanh", "b"), op("neg", "c"))
    assert [list(each.values) for each in find(graph, op("exp", curve), y)] == [["a"], ["b"]]
    (root,) = graph.producing(y)
    assert [each.root for each in find_at(graph, either(op("neg", "x"), op("exp", curve)), root)] == [root, root]
    assert len({*find_at(graph, op("exp", curve), root)}) == 2
    assert not list(find_at(graph, op("neg", curve), root))


def test_a_named_primitive_is_a_value_that_may_stand_again():
    pattern = op("mul", op("exp", "x", name="e"), op("neg", "e"))
    net = Net()
    power = net.add("exp", [net.x])
    assert count(net, net.add("mul", [power, net.add("neg", [power])]), pattern) == 1
    assert count(net, net.add("mul", [power, net.add("neg", [net.x])]), pattern) == 0


def test_what_is_known_limits_what_is_found():
    net = Net()
    graph, y = net.graph(net.add("add", [net.x, net.z]))
    inputs = dict(graph.inputs)
    (found,) = find(graph, op("add", "a", "b"), y, Found(values={"a": inputs["z"]}))
    assert found.values == {"a": inputs["z"], "b": inputs["x"]}


@pytest.mark.parametrize(
    ("number", "wanted", "is_found"),
    [
        (1.0, 1.0, True),
        (1.0000001, 1.0, False),
        (math.sqrt(0.5), math.sqrt(0.5), True),
        (0.7071, math.sqrt(0.5), False),
        (0.0, 0.0, True),
        (math.nan, 0.0, False),
    ],
)
def test_numbers_are_equal_up_to_the_rounding_of_the_pattern(number, wanted, is_found):
    net = Net()
    assert count(net, net.add("sub", [net.x, net.full(number)]), op("sub", "x", wanted)) == is_found


def test_a_named_number_is_one_number():
    pattern = op("add", op("sub", "x", Number("a")), Number("a"))
    net = Net()
    less = net.add("sub", [net.x, net.full(3)])
    assert count(net, net.add("add", [less, net.full(3)]), pattern) == 1
    assert count(net, net.add("add", [less, net.full(4)]), pattern) == 0
    assert (
        count(net, net.add("sub", [net.x, net.constant(np.arange(4, dtype=np.float32))]), op("sub", "x", Number("a")))
        == 0
    )
