"""A convolution -> the axes of its images, and the positions of its windows along them."""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.ranges.live import affine
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, scale, substitute
from korch.tile.ir.program import Axis, Inside


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
        """Return how many adjacent elements of the image some adjacent results are computed from."""
        return (places - 1) * self.stride + (self.window - 1) * self.dilation + 1

    @property
    def reaches(self) -> int:
        """How many elements of the padded image all results are computed from."""
        return affine(self.out, self.stride, self.reach(1) - self.stride)

    def met(self, place: Expr, tap: Expr) -> Expr:
        """Return the position in the image that a position of the result reads at a position of its window."""
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


def can_clip(guards: Sequence[Inside], taps: Sequence[Axis], x: str) -> bool:
    """Return whether each guard increases with exactly one tap, and depends on x only and always with the last tap.

    `x`: the name of the axis of result positions along the last axis of the window.
    """
    *_, last = names = [tap.name for tap in taps]
    for guard in guards:
        own = guard.expr.variables & {*names}
        if len(own) != 1 or any((guard.expr.coefficient(name) or 0) <= 0 for name in own):
            return False
        on_row = guard.expr.variables & {x, "j", last}
        if last not in own and on_row:
            return False
        if last in own and (guard.expr.variables != {x, last} or (guard.expr.coefficient(x) or 0) <= 0):
            return False
    return True
