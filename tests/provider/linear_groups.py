"""Builds small groups around products and convolutions."""

import numpy as np

from korch.candidate.candidate import Group
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from tests.tile import tile_groups


class Graph(tile_groups.Graph):
    """A builder with weights, and with float32 as the type of all tensors."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def tensor(self, *shape: int, name: str = "") -> int:
        return self.input(name or f"x{len(self._inputs)}", ValueType.parse(f"f32{list(shape)}"))

    def weights(self, *shape: int) -> int:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def with_number(self, op: str, value: int, number: float, left: bool = True) -> int:
        other = self.number(value, number)
        return self.add(op, [value, other] if left else [other, value])

    def with_tensor(self, op: str, value: int, other: int, left: bool = True) -> int:
        other = self.wide(other, self.shape(value))
        return self.add(op, [value, other] if left else [other, value])


def conv_group(x: tuple[int, ...], w: tuple[int, ...]) -> Group:
    """Return a convolution of an image, without strides and pads."""
    g = Graph()
    none, ones = (0,) * (len(x) - 2), (1,) * (len(x) - 2)
    return g.group(g.add("conv", [g.tensor(*x), g.weights(*w)], ConvAttributes(ones, none, none, ones)))
