"""Group -> a chain of convolutions, each with the elementwise steps after it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.provider.epilogue import RESULT, ConvEpilogue
from korch.provider.image import Image, read_image
from korch.schedule.contraction import NotFusedError, refuse_types

WIDEST_DEPTHWISE = 7
"""Columns of a window of one channel: its loop is unrolled."""


@dataclass(frozen=True, eq=False)
class Link:
    """A convolution of the chain.

    Attributes:
        primitive: it.
        weights: the position of its weights among the group's inputs.
        is_depthwise: whether each channel is computed from one, else each from all.
        steps: the lines of `finish`, which returns what the next convolution reads.
    """

    primitive: Primitive
    weights: int
    is_depthwise: bool
    steps: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ConvChain:
    """What a kernel computes: how the first convolution reads its image, and the chain.

    `full` has the positions of the inputs that are read in the output's layout.
    """

    image: Image
    links: tuple[Link, ...]
    full: frozenset[int]


def is_depthwise(primitive: Primitive, channels: int) -> bool | None:
    """Return whether a convolution is one channel by channel; None for other groups."""
    attributes = primitive.attributes_as(ConvAttributes)
    if attributes.groups == channels > 1:
        return True
    return False if attributes.groups == 1 else None


def match_group(group: Group) -> ConvChain | Refusal:
    """Return what a group is, or why it is no chain of convolutions."""
    body = group.body
    anchors = body.linear
    if not anchors or any(p.op != "conv" for p in anchors):
        return Refusal("it is not a convolution")
    refusal = refuse_types(body, *anchors)
    if refusal is not None:
        return refusal
    if any(body.types[p.output].rank != 4 for p in anchors):
        return Refusal("it does not have two spatial axes")
    image = read_image(group, anchors[0].inputs[0])
    if isinstance(image, Refusal):
        return image
    for anchor in anchors:
        refusal = _refuse(group, anchor)
        if refusal is not None:
            return refusal
    links, full = [], frozenset[int]()
    try:
        for anchor, following in itertools.zip_longest(anchors, anchors[1:]):
            epilogue = ConvEpilogue(group, anchor)
            is_last = following is None
            steps = (*epilogue.stores(), f"return {RESULT};") if is_last else epilogue.value(following.inputs[0])
            if epilogue.full and not is_last:
                return Refusal("a tensor is read between two convolutions")
            channels, weights = body.types[anchor.inputs[0]].shape[1], group.position[anchor.inputs[1]]
            links.append(Link(anchor, weights, bool(is_depthwise(anchor, channels)), steps))
            full = frozenset(epilogue.full)
    except NotFusedError as error:
        return Refusal(str(error))
    return ConvChain(image, tuple(links), full)


def _refuse(group: Group, anchor: Primitive) -> Refusal | None:
    """Return why a convolution does not fit into a chain."""
    types, weights = group.body.types, group.position.get(anchor.inputs[1])
    if weights is None or weights not in group.constant_inputs:
        return Refusal("the weights are not constant")
    channels = types[anchor.inputs[0]].shape[1]
    kind = is_depthwise(anchor, channels)
    if kind is None:
        return Refusal("the channels are in groups")
    if kind and types[anchor.output].shape[1] != channels:
        return Refusal("channels are multiplied")
    if kind and types[anchor.inputs[1]].shape[3] > WIDEST_DEPTHWISE:
        return Refusal("the window is too wide")
    return None
