"""Groups with several convolutions: which are found, and which are not."""

from __future__ import annotations

import numpy as np

from korch.candidate.enumerate import enumerate_groups
from korch.candidate.shape import COMMON
from korch.options import Options
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import ValueType
from korch.provider.conv.chains import chain_groups


class Net(GraphBuilder):
    """A graph of convolutions over 16 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.x = self.input("x", ValueType.parse("f32[1,16,8,8]"))

    def conv(self, x: int, window: int = 1, groups: int = 1) -> int:
        self.count += 1  # different weights for each
        w = np.full((16, 16 // groups, window, window), self.count, np.float32)
        w[0, 0, 0, 0] = 0
        pads = (window // 2,) * 2
        attributes = ConvAttributes((1, 1), pads, pads, (1, 1), groups)
        return self.add("conv", [x, self.constant(w)], attributes)

    def depthwise(self, x: int) -> int:
        return self.conv(x, 3, 16)

    def silu(self, y: int) -> int:
        return self.add("mul", [y, self.add("sigmoid", [y])])

    def bias(self, y: int) -> int:
        b = self.constant(np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1))
        return self.add("add", [y, self.add("broadcast", [b], BroadcastAttributes((1, 16, 8, 8)))])

    def chains(self, *outputs: int) -> set[tuple[str, ...]]:
        """The operations of each group with several convolutions, broadcasts left out."""
        for i, value in enumerate(outputs):
            self.output(f"y{i}", value)
        groups, report = enumerate_groups(self.freeze(), Options(), shapes=(*COMMON, chain_groups))
        assert report.groups == len(groups)
        ops = [[p.op for p in group.body.primitives if p.op != "broadcast"] for group in groups]
        return {tuple(names) for names in ops if names.count("conv") > 1}


def test_a_chain_that_is_reached_on_several_ways_is_made_once():
    net = Net()
    y = net.silu(net.bias(net.conv(net.x)))
    net.output("y", net.conv(net.silu(net.depthwise(y))))
    graph = net.freeze()
    groups, _ = enumerate_groups(graph, Options())
    found = [(g.primitives, g.outputs) for g in chain_groups(graph, groups)]
    assert found
    assert len(found) == len(set(found))
    assert all(list(primitives) == sorted(set(primitives)) for primitives, _ in found)


def test_an_inverted_bottleneck_is_one_group_and_so_are_its_parts():
    net = Net()
    y = net.silu(net.bias(net.conv(net.x)))
    y = net.silu(net.depthwise(y))
    y = net.add("add", [net.conv(y), net.x])
    act = ("sigmoid", "mul")
    first, middle, last = ("conv", "add", *act), ("conv", *act), ("conv",)
    assert net.chains(y) == {
        (*first, *middle),
        (*middle, *last),
        (*middle, *last, "add"),
        (*first, *middle, *last),
        (*first, *middle, *last, "add"),
    }


def test_groups_that_stop_before_a_function_of_their_result_are_not_grown():
    net = Net()
    y = net.depthwise(net.conv(net.x))
    assert net.chains(net.add("exp", [net.add("neg", [y])])) == {("conv", "conv", "neg", "exp")}


def test_what_others_read_too_is_computed_again():
    net = Net()
    y = net.silu(net.conv(net.x))
    assert ("conv", "sigmoid", "mul", "conv") in net.chains(net.depthwise(y), net.add("neg", [y]))


def test_two_dense_convolutions_are_no_chain():
    net = Net()
    assert net.chains(net.conv(net.conv(net.x), 3)) == set()


def test_an_image_that_is_not_computed_from_one_convolution_begins_no_chain():
    net = Net()
    both = net.add("add", [net.conv(net.x), net.conv(net.x)])
    mean = net.add("reduce_sum", [net.conv(net.x)], ReduceAttributes((2, 3)))
    wide = net.add("broadcast", [mean], BroadcastAttributes((1, 16, 8, 8)))
    other = net.add("add", [net.conv(net.x), net.x])
    found = net.chains(net.depthwise(both), net.depthwise(wide), net.depthwise(other))
    assert found == set()


def test_alternatives_give_each_a_chain():
    net = Net()
    y = net.conv(net.x)
    a, b = net.add("neg", [y]), net.add("mul", [y, y])
    net.merge(a, b)
    assert net.chains(net.depthwise(a)) == {("conv", "neg", "conv"), ("conv", "mul", "conv")}
