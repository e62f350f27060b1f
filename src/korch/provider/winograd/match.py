"""Group -> a convolution in Winograd's space, how it reads its image, what follows it."""

from __future__ import annotations

from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.ops.winograd import WinogradAttributes, tile_counts
from korch.provider.epilogue import ConvEpilogue
from korch.provider.image import ZERO, read_image
from korch.schedule.contraction import NotFusedError, refuse_types


@dataclass(frozen=True, slots=True)
class WinogradConv:
    """What a kernel computes.

    Attributes:
        primitive: the convolution.
        image: the position of the image among the group's inputs.
        weights: the position of the transformed weights.
        sources: per spatial axis, the image's row or column that each padded position reads (see
            `korch.provider.image`).
        fill: the value of pads before the convolution.
        steps: the lines of `finish`.
        full: positions of the inputs that are read in the output's layout.
    """

    primitive: Primitive
    image: int
    weights: int
    sources: tuple[tuple[int, ...], tuple[int, ...]]
    fill: float
    steps: tuple[str, ...]
    full: frozenset[int]


def match_group(group: Group) -> WinogradConv | Refusal:
    """Return what a group is, or why it is not a convolution in Winograd's space."""
    body = group.body
    found = [p for p in body.primitives if p.op == "winograd"]
    if len(found) != 1:
        return Refusal("it is not one convolution in Winograd's space")
    refusal = refuse_types(body, found[0])
    if refusal is not None:
        return refusal
    anchor = found[0]
    position = group.position
    weights = position.get(anchor.inputs[1])
    if weights is None or weights not in group.constant_inputs:
        return Refusal("the weights are not constant")
    image = read_image(group, anchor.inputs[0])
    if isinstance(image, Refusal):
        return image
    try:
        epilogue = ConvEpilogue(group, anchor)
        steps = epilogue.stores()
    except NotFusedError as error:
        return Refusal(str(error))
    attributes = anchor.attributes_as(WinogradAttributes)
    counts = tile_counts(body.types[anchor.output].shape, attributes.tile)
    padded = []
    for table, begin, count in zip((image.rows, image.columns), attributes.pads_begin, counts, strict=True):
        line = [ZERO] * begin + list(table)
        size = (count - 1) * attributes.tile + attributes.tile + 2
        padded.append(tuple(line + [ZERO] * (size - len(line))))
    return WinogradConv(
        anchor, image.position, weights, (padded[0], padded[1]), image.fill, steps, frozenset(epilogue.full)
    )
