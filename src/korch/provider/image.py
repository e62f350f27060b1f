"""How a convolution reads its image through pads, slices, takes and widening casts before it.

Moves become one table of sources per spatial axis, so that none of them is a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import PadAttributes, SliceAttributes, TakeAttributes, pad_source

MOVES = ("pad", "slice", "take")
FILL, ZERO = -1, -2
"""What a table has for a row or column of the pad's value, and for one of zeros."""


@dataclass(frozen=True, slots=True)
class Image:
    """What a convolution reads.

    Attributes:
        position: of the image among the group's inputs.
        rows: the image's row that each row which the convolution reads is; FILL or ZERO in pads.
        columns: the same for columns.
        fill: the value of pads that are not zero.
        moves: the primitives before the convolution.
    """

    position: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    fill: float
    moves: tuple[Primitive, ...]

    @property
    def is_moved(self) -> bool:
        """Whether the convolution reads anything but the image as it is."""
        return bool(self.moves)


def image_position(group: Group, value: int) -> int | Refusal:
    """Return the position of the input that `value` is, perhaps moved or widened."""
    body = group.body
    while value not in group.position:
        found = [p for p in body.primitives if p.output == value and (p.op in MOVES or body.is_widening(p))]
        if not found:
            return Refusal("the image is computed in the group")
        value = found[0].inputs[0]
    return group.position[value]


def read_image(group: Group, value: int) -> Image | Refusal:
    """Return how `value`, what a convolution with axes n, c, h and w reads, is made of an input."""
    body = group.body
    position = group.position
    chain: list[Primitive] = []
    while value not in position:
        found = [p for p in body.primitives if p.output == value and (p.op in MOVES or body.is_widening(p))]
        if not found:
            return Refusal("the image is computed in the group")
        chain.append(found[0])
        value = found[0].inputs[0]
    fills = {p.attributes_as(PadAttributes).value for p in chain if _is_filled(p)}
    if len(fills) > 1:
        return Refusal("two pads have different values")
    shape = body.types[value].shape
    tables = [list(range(n)) for n in shape]
    for step in reversed(chain):
        for axis in range(4):
            size = len(tables[axis])
            tables[axis] = [i if i < 0 else tables[axis][i] for i in _moved(step, axis, size)]
    if any(tables[axis] != list(range(shape[axis])) for axis in (0, 1)):
        return Refusal("images or channels are moved")
    rows, columns = (tuple(table) for table in tables[2:])
    return Image(position[value], rows, columns, fills.pop() if fills else 0.0, tuple(chain))


def _is_filled(step: Primitive) -> bool:
    attributes = step.attributes
    return isinstance(attributes, PadAttributes) and attributes.mode == "constant" and attributes.value != 0


def _moved(step: Primitive, axis: int, size: int) -> list[int]:
    """Return where a step's output reads its input along an axis of `size` elements."""
    match step.attributes:
        case SliceAttributes(start, sizes, steps):
            return [start[axis] + i * steps[axis] for i in range(sizes[axis])]
        case TakeAttributes(taken, indices):
            return list(indices) if taken == axis else list(range(size))
        case PadAttributes(before, after, mode):
            places = range(before[axis] + size + after[axis])
            fill = FILL if _is_filled(step) else ZERO
            found = (pad_source(i, size, before[axis], mode) for i in places)
            return [fill if i < 0 else i for i in found]
        case CastAttributes():
            return list(range(size))
    raise AssertionError(f"{step.op} is no move of an image")
