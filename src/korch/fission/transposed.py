"""Fission of ConvTranspose into convolutions.

With stride s, element s*q + r of an axis of the result is a sum over the taps t with t*dilation = r (mod s): a
convolution at place q. So the places with the same r, a *phase*, are the result of a convolution with some of the
taps. Phases with equally many taps at the same distances are channels of one convolution: one for all phases if s
divides the length of the window. Taps of other phases are not filled up with zeros, as 0 * inf is NaN.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.fission.context import Context
from korch.fission.linear import add_bias, kernel_of
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.fission.window import FARTHEST
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import window_extent
from korch.primitive.types import ValueId, ValueType
from korch.primitive.verbs import Shape

MOST_STEPS = 4096
"""The longest stride of which all phases are computed."""


@dataclass(frozen=True, slots=True)
class _Phases:
    """Phases of an axis that one convolution computes."""

    numbers: tuple[int, ...]
    taps: tuple[int, ...]  # for each phase, its taps in descending order
    dilation: int
    begin: int  # pads of the convolution
    end: int


@dataclass(frozen=True, slots=True)
class _SplitAxis:
    """A spatial axis of the result in phases."""

    groups: tuple[_Phases, ...]
    stride: int
    places: int  # of each phase
    crop: int  # the first elements, which are cut off
    size: int  # the elements that remain


def _split_axis(n: int, kernel: int, stride: int, dilation: int, begin: int, size: int) -> _SplitAxis:
    by_form: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for r in range(stride):
        taps = [t for t in reversed(range(kernel)) if (t * dilation - r) % stride == 0]
        nearest = (taps[-1] * dilation - r) // stride if taps else 0
        by_form.setdefault((len(taps), nearest), []).append((r, taps))
    step = dilation // math.gcd(dilation, stride)
    reach = {form: form[1] + (form[0] - 1) * step for form in by_form if form[0]}
    first = min((begin // stride, *reach.values()))
    last = max((-(-(begin + size) // stride), *(n + nearest for _, nearest in reach)))
    groups = tuple(
        _Phases(
            tuple(r for r, _ in phases),
            tuple(t for _, taps in phases for t in taps),
            step if form[0] > 1 else 1,
            reach.get(form, 0) - first,
            last - form[1] - n,
        )
        for form, phases in by_form.items()
    )
    return _SplitAxis(groups, stride, last - first, begin - first * stride, size)


def _convolved(c: Context, parts: Sequence[_Phases], axes: Sequence[_SplitAxis], groups: int) -> ValueId:
    """Return phases of the result: [n, channels, places, phases, places, phases, ...]."""
    x, w = c.inputs[:2]
    batch, channels = c.shape(x)[:2]
    per_group, spatial = c.shape(w)[1], len(parts)
    counts = tuple(len(part.numbers) for part in parts)
    taps = tuple(len(part.taps) // count for part, count in zip(parts, counts, strict=True))
    places = tuple(axis.places for axis in axes)
    pairs = tuple(itertools.chain(*zip(places, counts, strict=True)))
    if not all(taps):
        return c.full(0, ValueType((batch, groups * per_group, *pairs), c.dtype(x)))
    for i, part in enumerate(parts):
        w = c.take(w, 2 + i, part.taps)
    w = c.reshape(w, (groups, channels // groups, per_group, *itertools.chain(*zip(counts, taps, strict=True))))
    w = c.transpose(w, (0, *range(3, 3 + 2 * spatial, 2), 2, 1, *range(4, 4 + 2 * spatial, 2)))
    w = c.reshape(w, (groups * math.prod(counts) * per_group, channels // groups, *taps))
    begin, end, dilations = ([getattr(part, name) for part in parts] for name in ("begin", "end", "dilation"))
    attributes = ConvAttributes((1,) * spatial, tuple(begin), tuple(end), tuple(dilations), groups)
    y = c.reshape(c.add("conv", x, w, attributes=attributes), (batch, groups, *counts, per_group, *places))
    order = itertools.chain(*zip(range(3 + spatial, 3 + 2 * spatial), range(2, 2 + spatial), strict=True))
    return c.reshape(c.transpose(y, (0, 1, 2 + spatial, *order)), (batch, groups * per_group, *pairs))


def _joined(c: Context, parts: tuple[_Phases, ...], axes: Sequence[_SplitAxis], groups: int) -> ValueId:
    """Return all phases of the axes after those for which `parts` has a choice."""
    if len(parts) == len(axes):
        return _convolved(c, parts, axes, groups)
    along = 3 + 2 * len(parts)
    split = axes[len(parts)].groups
    whole = c.concat([_joined(c, (*parts, part), axes, groups) for part in split], along)
    numbers = [r for part in split for r in part.numbers]
    return c.take(whole, along, [numbers.index(r) for r in range(len(numbers))])


def _conv_transpose(c: Context) -> Result:
    x, w = c.inputs[:2]
    kernel = kernel_of(c, w)
    spatial = len(kernel)
    strides = c.attributes.integers("strides", (1,) * spatial)
    dilations = c.attributes.integers("dilations", (1,) * spatial)
    if not spatial:
        raise NotSplitError("no spatial axis")
    strides = tuple(s if n > 1 else 1 for n, s in zip(c.shape(x)[2:], strides, strict=True))
    if max(strides) > MOST_STEPS:
        raise NotSplitError("a long stride")
    extents = zip(c.shape(x)[2:], kernel, strides, dilations, strict=True)
    reached = max((n - 1) * s + window_extent(k, d) for n, k, s, d in extents)
    if reached > FARTHEST:
        raise ValueError(f"its windows reach over {reached} elements of an axis")
    begin, sizes = _begin(c, kernel, strides, dilations), c.output_type().shape[2:]
    if min(begin) < 0:
        raise NotSplitError("negative pads")
    each = zip(c.shape(x)[2:], kernel, strides, dilations, begin, sizes, strict=True)
    axes = [_split_axis(*one) for one in each]
    y = _joined(c, (), axes, c.attributes.integer("group", 1))
    y = c.reshape(y, (*c.shape(y)[:2], *(axis.places * axis.stride for axis in axes)))
    y = c.slice(y, (0, 0, *(axis.crop for axis in axes)), (*c.shape(y)[:2], *sizes))
    return add_bias(c, y)


def _begin(c: Context, kernel: Shape, strides: Shape, dilations: Shape) -> Shape:
    """Return how many elements are cut off at the begin of each axis; the size of the result gives those at the end."""
    auto, spatial = c.attributes.text("auto_pad", "NOTSET"), len(kernel)
    if auto in ("NOTSET", "VALID") and "output_shape" not in c.attributes:
        pads = c.attributes.integers("pads", (0,) * (2 * spatial))
        return pads[:spatial] if auto == "NOTSET" else (0,) * spatial
    extra = c.attributes.integers("output_padding", (0,) * spatial)
    found = []
    sizes = zip(c.shape(c.input(0))[2:], c.output_type().shape[2:], kernel, strides, dilations, extra, strict=True)
    for n, out, k, s, d, e in sizes:
        total = max(0, s * (n - 1) + e + window_extent(k, d) - out)
        found.append(total // 2 if auto == "SAME_UPPER" else total - total // 2)
    return tuple(found)


RULES: tuple[FissionRule, ...] = (FissionRule("ConvTranspose", _conv_transpose),)
