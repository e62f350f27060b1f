"""A convolution of 3x3 windows in a transformed space takes a fraction of the multiplications."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer, is_finite_in
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.winograd import TRANSFORMS, WinogradAttributes, tile_counts, transform_weights
from korch.primitive.types import pair

FEWEST_CHANNELS = 16
"""With fewer channels the transforms cost more than the products save."""

MOST_WORK = 0.7
"""The part of the multiplications that may be left, tiles beyond the border included."""

CLOSE_WORK = 1.4
"""Small tiles are tried, too, if their products are at most this multiple of those of large ones."""


@dataclass(frozen=True, slots=True)
class WinogradMatch:
    """A convolution and the outputs of a tile per axis."""

    conv: Primitive
    tile: int


@dataclass(frozen=True, slots=True, eq=False)
class WinogradWitness:
    """The image, the transformed weights in float64, and the attributes."""

    x: int
    weights: Array
    attributes: WinogradAttributes


def _match(view: View, root: Primitive) -> Iterator[WinogradMatch]:
    if view.shape(root.inputs[1])[2:] == (3, 3) and view.type(root.output).dtype.is_float:
        for tile in TRANSFORMS:
            yield WinogradMatch(root, tile)


def _refuse(view: View, match: WinogradMatch) -> WinogradWitness | RuleRefusal:
    conv = match.conv
    attributes = conv.attributes_as(ConvAttributes)
    x, weights = conv.inputs
    constant = view.constant(weights)
    if constant is None:
        return RuleRefusal("the weights of the window are not constant", conv.output)
    if attributes.groups != 1 or {*attributes.strides, *attributes.dilations} != {1}:
        return RuleRefusal("the window has groups, strides or dilations", conv.output)
    shape = view.shape(conv.output)
    if min(constant.array.shape[:2]) < FEWEST_CHANNELS:
        return RuleRefusal("there are too few channels for a transform", conv.output)
    if view.becomes_integer(conv.output):
        return RuleRefusal("the sums become integers, so they have to be exact", conv.output)
    products = {tile: _products(shape, tile) for tile in TRANSFORMS}
    if products[match.tile] > MOST_WORK * 9 * shape[2] * shape[3]:
        return RuleRefusal("the image is too small for such tiles", conv.output)
    if products[match.tile] > CLOSE_WORK * min(products.values()):
        return RuleRefusal("other tiles take far fewer products", conv.output)
    transformed = transform_weights(constant.array, match.tile)
    if not is_finite_in(transformed, view.type(conv.output).dtype):
        return RuleRefusal("a transformed weight is not finite", conv.output)
    return WinogradWitness(
        x, transformed, WinogradAttributes(match.tile, pair(attributes.pads_begin), pair(attributes.pads_end))
    )


def _products(shape: tuple[int, ...], tile: int) -> int:
    """Return the products per pair of channels."""
    return math.prod(tile_counts(shape, tile)) * (tile + 2) ** 2


def _build(writer: Writer, witness: WinogradWitness) -> int:
    weights = writer.constant(np.ascontiguousarray(witness.weights), writer.type(witness.x).dtype)
    return writer.add("winograd", (witness.x, weights), witness.attributes)


CONV3X3_IS_WINOGRAD = Rule(
    name="conv3x3-is-winograd",
    law="conv(x, g) = A ((G g G') * (B x B')) A' on tiles of m x m outputs, m = 2 or 4",
    source="Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016",
    roots=("conv",),
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
    is_local=True,
)

RULES: tuple[AnyRule, ...] = (CONV3X3_IS_WINOGRAD,)
