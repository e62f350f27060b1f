"""Group -> a chain of convolutions, each with the elementwise steps after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType
from korch.provider.image import Image, read_image
from korch.provider.steps import Steps

WIDEST_DEPTHWISE = 7
"""Columns of a window of one channel: its loop is unrolled."""


@dataclass(frozen=True, eq=False)
class Link:
    """A convolution of the chain.

    Attributes:
        primitive: it.
        weights: the position of its weights among the group's inputs.
        is_depthwise: whether each channel is computed from one, else each from all.
        result: the variable of `finish` that the next convolution reads; "" for the last.
        steps: the lines of `finish`.
    """

    primitive: Primitive
    weights: int
    is_depthwise: bool
    result: str
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
    if any(type_.dtype is not DType.F32 for type_ in body.types):
        return Refusal("the elements are not all float32")
    if any(body.types[p.output].rank != 4 for p in anchors):
        return Refusal("it does not have two spatial axes")
    return _Matcher(group, anchors).run()


class _Matcher:
    def __init__(self, group: Group, anchors: Sequence[Primitive]) -> None:
        self.group = group
        self.body = group.body
        self.anchors = anchors  # in order: each reads what the one before it gives
        self.steps = [Steps(group, anchor) for anchor in anchors]
        self.position = group.position

    def run(self) -> ConvChain | Refusal:
        image = read_image(self.group, self.anchors[0].inputs[0])
        if isinstance(image, Refusal):
            return image
        for primitive in self.body.primitives:
            if primitive not in (*image.moves, *self.anchors):
                refusal = self._step(primitive)
                if refusal is not None:
                    return refusal
        refusal = self.steps[-1].store()
        if refusal is not None:
            return refusal
        links = []
        for i in range(len(self.anchors)):
            link = self._link(i)
            if isinstance(link, Refusal):
                return link
            links.append(link)
        if any(steps.full for steps in self.steps[:-1]):
            return Refusal("a tensor is read between two convolutions")
        return ConvChain(image, tuple(links), frozenset(self.steps[-1].full))

    def _step(self, primitive: Primitive) -> Refusal | None:
        """Add an elementwise primitive to the convolution whose results it reads."""
        if primitive.op == "broadcast":
            return None
        owners = [s for s in self.steps if any(s.knows(value) for value in primitive.inputs)]
        if len(owners) != 1:
            return Refusal(f"{primitive.op} does not read exactly one convolution")
        return owners[0].add(primitive)

    def _link(self, i: int) -> Link | Refusal:
        anchor = self.anchors[i]
        weights = self.position.get(anchor.inputs[1])
        if weights is None or weights not in self.group.constant_inputs:
            return Refusal("the weights are not constant")
        channels = self.body.types[anchor.inputs[0]].shape[1]
        kind = is_depthwise(anchor, channels)
        if kind is None:
            return Refusal("the channels are in groups")
        if kind and self.body.types[anchor.output].shape[1] != channels:
            return Refusal("channels are multiplied")
        if kind and self.body.types[anchor.inputs[1]].shape[3] > WIDEST_DEPTHWISE:
            return Refusal("the window is too wide")
        result = ""
        if i + 1 < len(self.anchors):
            value = self.anchors[i + 1].inputs[0]
            if not self.steps[i].knows(value):
                return Refusal("the convolutions are not a chain")
            result = self.steps[i].name(value)
        return Link(anchor, weights, kind, result, tuple(self.steps[i].lines))
