"""A convolution -> the axes of its images, and where its windows lie along them."""

from __future__ import annotations

from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.tile.index import ZERO, Expr, Ranges, add, constant, scale, substitute


@dataclass(frozen=True, slots=True)
class Side:
    """An axis of images: its sizes in the image and in the result, and the window along it."""

    size: int
    out: int
    window: int
    stride: int
    dilation: int
    pad: int

    def reach(self, places: int) -> int:
        """Return from how many neighbours some places are computed."""
        return (places - 1) * self.stride + (self.window - 1) * self.dilation + 1

    def met_again(self, places: int) -> int:
        """Return how many of these neighbours the next places are computed from, too."""
        return max(0, self.reach(places) - places * self.stride)

    def met(self, place: Expr, tap: Expr) -> Expr:
        """Return which element of the image a place of the result meets with a place of its window."""
        return add(scale(place, self.stride), scale(tap, self.dilation), constant(-self.pad))


def sides_of(group: Group, root: Primitive) -> tuple[Side, ...]:
    """Return the axes of a convolution's images."""
    image, weights, out = (group.body.types[value].shape for value in (*root.inputs, root.output))
    at = root.attributes_as(ConvAttributes)
    parts = (image[2:], out[2:], weights[2:], at.strides, at.dilations, at.pads_begin)
    return tuple(Side(*numbers) for numbers in zip(*parts, strict=True))


def without_units(expr: Expr, ranges: Ranges) -> Expr:
    """Return an expression without the variables of axes that have one element."""
    return substitute(expr, {name: ZERO for name, (_, high) in ranges.items() if high == 0}, ranges)
