"""Builds small groups around products and convolutions."""

import numpy as np

from korch.candidate.candidate import Group, make_group
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import ValueType


class Graph(GraphBuilder):
    """A builder with short words for tests."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def tensor(self, *shape: int, name: str = "") -> int:
        return self.input(name or f"x{len(self._inputs)}", ValueType.parse(f"f32{list(shape)}"))

    def weights(self, *shape: int) -> int:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def full(self, value: int, number: float) -> int:
        shape = self.type(value).shape
        return self.constant(np.broadcast_to(np.float32(number), shape))

    def with_number(self, op: str, value: int, number: float, left: bool = True) -> int:
        other = self.full(value, number)
        return self.add(op, [value, other] if left else [other, value])

    def with_tensor(self, op: str, value: int, other: int, left: bool = True) -> int:
        shape = self.type(value).shape
        if self.type(other).shape != shape:
            other = self.add("broadcast", [other], BroadcastAttributes(shape))
        return self.add(op, [value, other] if left else [other, value])

    def group(self, *outputs: int) -> Group:
        for i, value in enumerate(outputs):
            self.output(f"o{i}", value)
        graph = self.freeze()
        return make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])


def conv_group(x: tuple[int, ...], w: tuple[int, ...]) -> Group:
    """Return a convolution of an image, without strides and pads."""
    g = Graph()
    none, ones = (0,) * (len(x) - 2), (1,) * (len(x) - 2)
    return g.group(g.add("conv", [g.tensor(*x), g.weights(*w)], ConvAttributes(ones, none, none, ones)))
