"""Laws of convolutions: one without a window is a matrix product, zero pads are its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from korch.equivalence.rule import AnyRule, Refusal, Rule, View, Writer
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes


@dataclass(frozen=True, slots=True)
class PointwiseWitness:
    """A convolution whose window is one element: image, weights, type of the output."""

    x: int
    weights: int
    channels_in: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PadMatch:
    """A convolution that reads a pad's output."""

    conv: Primitive
    pad: Primitive


@dataclass(frozen=True, slots=True)
class PadWitness:
    """The convolution to write."""

    x: int
    weights: int
    attributes: ConvAttributes


def _match_pointwise(view: View, root: Primitive) -> Iterator[Primitive]:
    if all(k == 1 for k in view.shape(root.inputs[1])[2:]):
        yield root


def _refuse_pointwise(view: View, root: Primitive) -> PointwiseWitness | Refusal:
    attributes: Any = root.attributes
    x, weights = root.inputs
    if attributes.groups != 1:
        return Refusal("the convolution has groups", root.output)
    if set(attributes.strides) != {1}:
        return Refusal("the convolution has strides", root.output)
    if any((*attributes.pads_begin, *attributes.pads_end)):
        return Refusal("the convolution is padded", root.output)
    if view.shape(x)[0] != 1:
        return Refusal("the batch is not 1", root.output)
    return PointwiseWitness(x, weights, view.shape(x)[1], view.shape(root.output))


def _build_pointwise(writer: Writer, witness: PointwiseWitness) -> int:
    _, channels_out, *spatial = witness.shape
    flat = writer.reshape(witness.x, (witness.channels_in, math.prod(spatial)))
    weights = writer.reshape(witness.weights, (channels_out, witness.channels_in))
    return writer.reshape(writer.add("matmul", (weights, flat)), witness.shape)


def _match_pad(view: View, root: Primitive) -> Iterator[PadMatch]:
    for pad in view.producers(root.inputs[0], "pad"):
        yield PadMatch(root, pad)


def _refuse_pad(view: View, match: PadMatch) -> PadWitness | Refusal:
    conv: Any = match.conv.attributes
    pad: Any = match.pad.attributes
    if pad.mode != "constant" or pad.value != 0:
        return Refusal("the pad is not of zeros", match.conv.output)
    if any((*pad.before[:2], *pad.after[:2])):
        return Refusal("the pad adds images or channels", match.conv.output)
    begin = tuple(a + b for a, b in zip(conv.pads_begin, pad.before[2:], strict=True))
    end = tuple(a + b for a, b in zip(conv.pads_end, pad.after[2:], strict=True))
    attributes = replace(conv, pads_begin=begin, pads_end=end)
    return PadWitness(match.pad.inputs[0], match.conv.inputs[1], attributes)


CONV1X1_IS_MATMUL = Rule(
    name="conv1x1-is-matmul",
    law="conv(x, W) = reshape(W[o,i] @ reshape(x, [i,hw])) for a window of one element",
    source="definition of the convolution",
    roots=("conv",),
    match=_match_pointwise,
    refuse=_refuse_pointwise,
    build=_build_pointwise,
)
ZERO_PAD_FOLDS_INTO_CONV = Rule(
    name="zero-pad-folds-into-conv",
    law="conv(pad(x, p, 0), W, q) = conv(x, W, p + q)",
    source="definition of the convolution's pads",
    roots=("conv",),
    match=_match_pad,
    refuse=_refuse_pad,
    build=lambda writer, w: writer.add("conv", (w.x, w.weights), w.attributes),
)

RULES: tuple[AnyRule, ...] = (CONV1X1_IS_MATMUL, ZERO_PAD_FOLDS_INTO_CONV)
