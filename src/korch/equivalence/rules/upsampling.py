"""Computes a convolution of an upsampled image at the small size, with one kernel for each phase of the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer, is_finite_in
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes


@dataclass(frozen=True, slots=True)
class UpsampledConv:
    """conv(pad(takes(x))): the takes, the last one first, and the pad, if there is one."""

    conv: Primitive
    pad: Primitive | None
    takes: tuple[Primitive, ...]


@dataclass(frozen=True, slots=True)
class AxisPhases:
    """How one axis is split into phases.

    Row m of the upsampled and padded image is row floor((m - pad) / factor) of the small image, extended
    at its ends. So tap t of phase a (the output rows factor*q + a) reads row q + floor((a + t - pad) / factor)
    of the small image.

    Attributes:
        factor: the upsampling factor.
        kernel: the number of taps of a phase's kernel.
        first: per phase, the row of the small image that its tap 0 reads for q = 0; negative is outside.
        tap_of: per phase, the tap of its kernel to which each tap of the large kernel is added.
        size: the size of the axis in the small image.
        count: the size of the axis in the output.
    """

    factor: int
    kernel: int
    first: tuple[int, ...]
    tap_of: tuple[tuple[int, ...], ...]
    size: int
    count: int

    @staticmethod
    def of(kernel: int, factor: int, pad: int, size: int, count: int) -> AxisPhases:
        """Split an axis, given the kernel's taps, the factor, the rows padded before, and the sizes in and out."""
        rows = [[(a + t - pad) // factor for t in range(kernel)] for a in range(factor)]
        first = tuple(row[0] for row in rows)
        taps = tuple(tuple(r - row[0] for r in row) for row in rows)
        return AxisPhases(factor, max(map(max, taps)) + 1, first, taps, size, count)

    @property
    def rows(self) -> int:
        """The output rows of each phase; the last row may be beyond the output."""
        return -(-self.count // self.factor)

    @property
    def before(self) -> int:
        """The rows to add before the first row of the small image."""
        return max(0, -min(self.first))

    @property
    def after(self) -> int:
        """The rows to add after the last row of the small image."""
        return max(0, max(self.first) + self.rows - 1 + self.kernel - self.size)

    @property
    def positions(self) -> int:
        """The output rows of the convolution that computes all phases."""
        return self.before + self.size + self.after - self.kernel + 1


@dataclass(frozen=True, slots=True, eq=False)
class PhaseWitness:
    """The data of the phase convolution.

    Attributes:
        x: the small image.
        axes: the phases of each spatial axis.
        weights: float64[phases*o, i, *kernel]: the kernels of all phases, concatenated.
        mode: how the small image is extended, as in `PadAttributes.mode`.
        fill: the fill value if the mode is constant.
        channels: the number of output channels, o.
    """

    x: int
    axes: tuple[AxisPhases, ...]
    weights: Array
    mode: str
    fill: float
    channels: int


def take_factor(take: Primitive) -> int:
    """Return r if the take reads each element r times in a row (nearest upsampling), else 0."""
    attributes = take.attributes_as(TakeAttributes)
    indices: tuple[int, ...] = attributes.indices
    factor = indices.count(0)
    if factor < 2 or len(indices) % factor:
        return 0
    return factor if indices == tuple(i // factor for i in range(len(indices))) else 0


def _match(view: View, root: Primitive) -> Iterator[UpsampledConv]:
    if not view.type(root.output).dtype.is_float:
        return
    for pad in (None, *view.producing(root.inputs[0], "pad")):
        top = root.inputs[0] if pad is None else pad.inputs[0]
        for takes in _take_chains(view, top, frozenset()):
            yield UpsampledConv(root, pad, takes)


def _take_chains(view: View, value: int, axes: frozenset[int]) -> Iterator[tuple[Primitive, ...]]:
    """Yield the longest chains of upsampling takes along different axes."""
    for take in view.producing(value, "take"):
        axis = getattr(take.attributes, "axis", 0)
        size = view.shape(take.inputs[0])[axis]
        factor = take_factor(take)
        if axis in axes or not factor or len(getattr(take.attributes, "indices", ())) != (factor * size):
            continue
        rest = tuple(_take_chains(view, take.inputs[0], axes | {axis}))
        for tail in rest or ((),):
            yield (take, *tail)


def _refuse(view: View, match: UpsampledConv) -> PhaseWitness | RuleRefusal:
    conv, root = match.conv, match.conv.output
    attributes = conv.attributes_as(ConvAttributes)
    weights = view.constant(conv.inputs[1])
    spatial = view.type(root).rank - 2
    factors = {getattr(t.attributes, "axis", 0): take_factor(t) for t in match.takes}
    if weights is None:
        return RuleRefusal("the weights are not constant", root)
    if attributes.groups != 1:
        return RuleRefusal("the convolution has groups", root)
    if set(attributes.strides) != {1}:
        return RuleRefusal("the convolution has strides", root)
    if set(attributes.dilations) != {1}:
        return RuleRefusal("the convolution is dilated", root)
    if set(factors) != set(range(2, 2 + spatial)):
        return RuleRefusal("the upsampled axes are not the spatial ones", root)
    factor = tuple(factors[2 + i] for i in range(spatial))
    kernel = weights.array.shape[2:]
    if any((k - 1) % r for k, r in zip(kernel, factor, strict=True)):
        return RuleRefusal("the phases' kernels differ in size", root)
    extension = _extension(match, factor)
    if isinstance(extension, RuleRefusal):
        return extension
    pads, mode, fill = extension
    x = match.takes[-1].inputs[0]
    axes = tuple(
        AxisPhases.of(*numbers)
        for numbers in zip(kernel, factor, pads, view.shape(x)[2:], view.shape(root)[2:], strict=True)
    )
    if not _is_less_work(axes, kernel):
        return RuleRefusal("no fewer operations", root)
    combined = _phase_weights(weights.array.astype(np.float64), axes)
    if not is_finite_in(combined, view.type(root).dtype):
        return RuleRefusal("a weight is not finite", root)
    return PhaseWitness(x, axes, combined, mode, fill, weights.array.shape[0])


def _extension(match: UpsampledConv, factor: tuple[int, ...]) -> tuple[tuple[int, ...], str, float] | RuleRefusal:
    """Return the rows padded before each axis, and the mode and fill value for extending the small image.

    A zero, edge or wrapped extension of the large image is the same extension of the small one. A reflection
    by p rows reads at most row p of the large image, which is the small image's edge row as long as p < factor.
    """
    conv = match.conv.attributes_as(ConvAttributes)
    is_padded = any((*conv.pads_begin, *conv.pads_end))
    if match.pad is None:
        return conv.pads_begin, "constant", 0.0
    pad = match.pad.attributes_as(PadAttributes)
    if is_padded:
        return RuleRefusal("the image is padded twice", match.conv.output)
    if any((*pad.before[:2], *pad.after[:2])):
        return RuleRefusal("the pad adds images or channels", match.conv.output)
    mode = pad.mode
    if mode == "reflect":
        amounts = [*zip(pad.before[2:], factor, strict=True), *zip(pad.after[2:], factor, strict=True)]
        if any(amount >= r for amount, r in amounts):
            return RuleRefusal("the reflection reaches past the small image's edge", match.conv.output)
        mode = "edge"
    return pad.before[2:], mode, pad.value


def _is_less_work(axes: tuple[AxisPhases, ...], kernel: tuple[int, ...]) -> bool:
    new = math.prod(axis.factor * axis.kernel * axis.positions for axis in axes)
    old = math.prod(k * axis.count for k, axis in zip(kernel, axes, strict=True))
    return new < old


def _phase_weights(weights: Array, axes: tuple[AxisPhases, ...]) -> Array:
    phases = []
    for phase in itertools.product(*(range(axis.factor) for axis in axes)):
        combined = np.zeros((*weights.shape[:2], *(axis.kernel for axis in axes)))
        for tap in itertools.product(*map(range, weights.shape[2:])):
            to = tuple(axis.tap_of[a][t] for axis, a, t in zip(axes, phase, tap, strict=True))
            with np.errstate(all="ignore"):
                combined[_tap(to)] += weights[_tap(tap)]
        phases.append(combined)
    return np.concatenate(phases)


def _tap(place: tuple[int, ...]) -> tuple[slice | int, ...]:
    return (slice(None), slice(None), *place)


def _build(writer: Writer, witness: PhaseWitness) -> int:
    axes, x = witness.axes, witness.x
    before, after = tuple(a.before for a in axes), tuple(a.after for a in axes)
    none = (0,) * len(axes)
    is_zero = witness.mode == "constant" and witness.fill == 0
    if any((*before, *after)) and not is_zero:
        pad = PadAttributes((0, 0, *before), (0, 0, *after), witness.mode, witness.fill)
        x = writer.add("pad", (x,), pad)
    ones = (1,) * len(axes)
    pads = (before, after) if is_zero else (none, none)
    weights = writer.constant(witness.weights, writer.type(x).dtype)
    y = writer.add("conv", (x, weights), ConvAttributes(ones, *pads, ones))
    return _interleave(writer, y, witness)


def _interleave(writer: Writer, y: int, witness: PhaseWitness) -> int:
    """Slice each phase out of the convolution's output, and interleave the rows of the phases."""
    axes, channels = witness.axes, witness.channels
    spatial, images = len(axes), writer.type(y).shape[0]
    rows = tuple(axis.rows for axis in axes)
    ones = (1,) * (2 + spatial)
    parts = []
    for i, phase in enumerate(itertools.product(*(range(axis.factor) for axis in axes))):
        start = tuple(axis.first[a] + axis.before for axis, a in zip(axes, phase, strict=True))
        cut = SliceAttributes((0, i * channels, *start), (images, channels, *rows), ones)
        parts.append(writer.add("slice", (y,), cut))
    stacked = writer.add("concat", parts, ConcatAttributes(1))
    factors = tuple(axis.factor for axis in axes)
    split = writer.reshape(stacked, (images, *factors, channels, *rows))
    perm = [0, 1 + spatial]
    for i in range(spatial):
        perm += [2 + spatial + i, 1 + i]
    mixed = writer.add("transpose", (split,), TransposeAttributes(tuple(perm)))
    full = tuple(axis.factor * axis.rows for axis in axes)
    result = writer.reshape(mixed, (images, channels, *full))
    shape = (images, channels, *(axis.count for axis in axes))
    if writer.type(result).shape == shape:
        return result
    return writer.add("slice", (result,), SliceAttributes((0,) * len(shape), shape, ones))


UPSAMPLED_CONV_IS_PHASE_CONV = Rule(
    name="upsampled-conv-is-phase-conv",
    law="conv(up_r(x), W)[r*q+a] = sum over s of x[q+s] * (sum of W[t], floor((a+t-p)/r) = s)",
    source="polyphase decomposition; Shi et al., sub-pixel convolution (CVPR 2016)",
    roots=("conv",),
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (UPSAMPLED_CONV_IS_PHASE_CONV,)
