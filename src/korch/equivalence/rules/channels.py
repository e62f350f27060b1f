"""Moves a linear map of channels to its cheapest place, such as before an upsampling or into other weights."""

import math
from collections.abc import Iterator

import numpy as np

from korch.equivalence.channel_map import ChannelMap, cheapest_place
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, is_finite_in
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes

MOST_COST = 0.9
"""An alternative is added only if it takes at most this share of the work that it replaces."""


MapMatch = tuple[Primitive, int]
"""A linear primitive and the position of its weights."""


def _match(view: View, root: Primitive) -> Iterator[MapMatch]:
    if root.op == "matmul":
        for position in (1, 0):
            if view.constant(root.inputs[position]) is not None:
                yield root, position
    elif all(k == 1 for k in view.shape(root.inputs[1])[2:]):
        yield root, 1


def _map_of(view: View, match: MapMatch) -> ChannelMap | RuleRefusal:
    root, weights_at = match
    constant = view.constant(root.inputs[weights_at])
    if constant is None:
        return RuleRefusal("the weights of the map are not constant", root.output)
    array = constant.array.astype(np.float64)
    rank = array.ndim
    if root.op == "matmul":
        if math.prod(array.shape[:-2]) != 1:
            return RuleRefusal("the map differs along the batch", root.output)
        matrix = array.reshape(array.shape[-2:])
        matrix = matrix.T if weights_at == 1 else matrix
        axis = rank - 1 if weights_at == 1 else rank - 2
        return ChannelMap(axis, matrix, (0, matrix.shape[1]))
    a = root.attributes_as(ConvAttributes)
    if a.groups != 1 or set(a.strides) != {1} or any((*a.pads_begin, *a.pads_end)):
        return RuleRefusal("the map has groups, strides or pads", root.output)
    return ChannelMap(1, array.reshape(array.shape[:2]), (0, array.shape[1]))


def _rewrite(view: View, match: MapMatch) -> Write | RuleRefusal:
    (root, weights_at), channel_map = match, _map_of(view, match)
    if isinstance(channel_map, RuleRefusal):
        return channel_map
    type_ = view.type(root.output)
    if not type_.dtype.is_float or type_.size == 0:
        return RuleRefusal("the map is of integers or of nothing", root.output)
    if not is_finite_in(channel_map.weights, type_.dtype):
        return RuleRefusal("a weight of the map is not finite", root.output)
    place = cheapest_place(view, root.inputs[1 - weights_at], channel_map, root.output)
    if place is None:
        return RuleRefusal("the map can be done nowhere else", root.output)
    types = [view.type(value) for value in root.inputs]
    flop = root.row.work_flop(types, root.attributes, type_)
    if sum(place.costs.values()) > MOST_COST * (flop + sum(place.saved.values())):
        return RuleRefusal("no place for the map is cheaper", root.output)
    return place.write


CHANNEL_MAP_MOVES_TO_ITS_CHEAPEST_PLACE = Rule(
    name="channel-map-moves-to-its-cheapest-place",
    law="W f(x) = f(W x), W (A x) = (W A) x, W [x; y] = W1 x + W2 y, for f equal on all channels",
    source="linearity; a map of channels commutes with what acts on other axes",
    roots=("conv", "matmul"),
    match=_match,
    rewrite=_rewrite,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (CHANNEL_MAP_MOVES_TO_ITS_CHEAPEST_PLACE,)
