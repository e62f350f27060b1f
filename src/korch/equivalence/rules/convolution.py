"""Rules for convolutions: as matrix products, with zero pads, with few output channels, and of strided slices."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from korch.equivalence.rule import AnyRule, Pair, Rule, RuleRefusal, View, Write, Writer, is_finite_in, reads
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import ConcatAttributes, PadAttributes, SliceAttributes, TransposeAttributes
from korch.primitive.ops.linear import BYTES, ConvAttributes
from korch.primitive.ops.reduce import ReduceAttributes

FEW_CHANNELS = 8
"""At most this number of output channels leaves most of a vector register unused."""


def _match_pointwise(view: View, root: Primitive) -> Iterator[Primitive]:
    if all(k == 1 for k in view.shape(root.inputs[1])[2:]):
        yield root


def _pointwise(view: View, root: Primitive) -> Write | RuleRefusal:
    attributes = root.attributes_as(ConvAttributes)
    x, weights = root.inputs
    if attributes.groups != 1:
        return RuleRefusal("the convolution has groups", root.output)
    if view.type(x).dtype in BYTES:
        return RuleRefusal("convolutions of bytes read rows of channels, as products do", root.output, is_final=True)
    if set(attributes.strides) != {1}:
        return RuleRefusal("the convolution has strides", root.output)
    if any((*attributes.pads_begin, *attributes.pads_end)):
        return RuleRefusal("the convolution is padded", root.output)
    if view.shape(x)[0] != 1:
        return RuleRefusal("the batch is not 1", root.output)
    channels, shape = view.shape(x)[1], view.shape(root.output)

    def write(writer: Writer) -> int:
        flat = writer.reshape(x, (channels, math.prod(shape[2:])))
        matrix = writer.reshape(weights, (shape[1], channels))
        return writer.reshape(writer.add("matmul", (matrix, flat)), shape)

    return write


def _match_patches(view: View, root: Primitive) -> Iterator[Primitive]:
    window = view.shape(root.inputs[1])[2:]
    if window == root.attributes_as(ConvAttributes).strides and math.prod(window) > 1:
        yield root


def _patches(view: View, root: Primitive) -> Write | RuleRefusal:
    attributes = root.attributes_as(ConvAttributes)
    x, weights = root.inputs
    window = view.shape(weights)[2:]
    if attributes.groups != 1 or set(attributes.dilations) != {1}:
        return RuleRefusal("the convolution has groups or dilations", root.output)
    if view.type(x).dtype in BYTES:
        return RuleRefusal("convolutions of bytes read rows of channels, as products do", root.output, is_final=True)
    if any((*attributes.pads_begin, *attributes.pads_end)):
        return RuleRefusal("the convolution is padded", root.output)
    if any(n % k for n, k in zip(view.shape(x)[2:], window, strict=True)):
        return RuleRefusal("the windows leave a part of the image out", root.output)
    widening = next((cast for cast in view.producing(weights, "cast") if view.constant(cast.inputs[0])), None)
    narrow = widening.inputs[0] if widening else weights
    shape, terms = view.shape(root.output), view.type(weights).size // view.shape(weights)[0]
    images, channels, *places = shape
    rank = len(places)

    def write(writer: Writer) -> int:
        pairs = [n for pair in zip(places, window, strict=True) for n in pair]
        parts = writer.reshape(x, (images, terms // math.prod(window), *pairs))
        order = (0, *(2 + 2 * i for i in range(rank)), 1, *(3 + 2 * i for i in range(rank)))
        patches = writer.add("transpose", (parts,), TransposeAttributes(order))
        rows = writer.reshape(patches, (images, math.prod(places), terms))
        columns = writer.reshape(narrow, (1, channels, terms))
        columns = writer.add("transpose", (columns,), TransposeAttributes((0, 2, 1)))
        if widening is not None:
            columns = writer.add("cast", (columns,), widening.attributes)
        product = writer.add("matmul", (rows, columns))
        return writer.reshape(writer.add("transpose", (product,), TransposeAttributes((0, 2, 1))), shape)

    return write


def _fold_pad(view: View, match: Pair) -> Write | RuleRefusal:
    conv = match.root.attributes_as(ConvAttributes)
    pad = match.inner.attributes_as(PadAttributes)
    if pad.mode != "constant" or pad.value != 0:
        return RuleRefusal("the pad is not of zeros", match.root.output)
    if any((*pad.before[:2], *pad.after[:2])):
        return RuleRefusal("the pad adds images or channels", match.root.output)
    begin = tuple(a + b for a, b in zip(conv.pads_begin, pad.before[2:], strict=True))
    end = tuple(a + b for a, b in zip(conv.pads_end, pad.after[2:], strict=True))
    attributes = replace(conv, pads_begin=begin, pads_end=end)
    return lambda writer: writer.add("conv", (match.inner.inputs[0], match.root.inputs[1]), attributes)


def _match_rows(view: View, root: Primitive) -> Iterator[Primitive]:
    shape = view.shape(root.inputs[1])
    if len(shape) == 4 and shape[0] <= FEW_CHANNELS and shape[2] >= 3:
        yield root


def _rows(view: View, root: Primitive) -> Write | RuleRefusal:
    attributes = root.attributes_as(ConvAttributes)
    x, weights = root.inputs
    if view.constant(weights) is None:
        return RuleRefusal("the weights are not constant", root.output)
    if attributes.groups != 1:
        return RuleRefusal("the convolution has groups", root.output)
    if attributes.strides[0] != 1 or attributes.dilations[0] != 1:
        return RuleRefusal("the rows have a stride or a dilation", root.output)
    if view.shape(x)[0] != 1:
        return RuleRefusal("the batch is not 1", root.output)
    out, channels, rows, columns = view.shape(weights)
    shape = view.shape(root.output)
    _, _, height, width = shape

    def write(writer: Writer) -> int:
        turned = writer.add("transpose", (weights,), TransposeAttributes((0, 2, 1, 3)))
        by_row = writer.reshape(turned, (out * rows, channels, 1, columns))
        partial = writer.add("conv", (x, by_row), attributes)
        # Row y of the result is the sum over the taps t of row y + t of tap t's partial image. If the same
        # memory is read with n + 1 rows per tap, these rows have the same index: t*n + (y + t) = t*(n + 1) + y.
        n = writer.type(partial).shape[2]
        flat = writer.reshape(partial, (out, rows * n, width))
        longer = writer.add("pad", (flat,), PadAttributes((0, 0, 0), (0, rows, 0)))
        skewed = writer.reshape(longer, (out, rows, n + 1, width))
        zeros, ones = (0, 0, 0, 0), (1, 1, 1, 1)
        kept = writer.add("slice", (skewed,), SliceAttributes(zeros, (out, rows, height, width), ones))
        return writer.reshape(writer.add("reduce_sum", (kept,), ReduceAttributes((1,))), shape)

    return write


def _match_focus(view: View, root: Primitive) -> Iterator[Pair]:
    for concat in view.producing(root.inputs[0], "concat"):
        attributes = concat.attributes_as(ConcatAttributes)
        if attributes.axis == 1 and view.type(root.output).dtype.is_float:
            yield Pair(root, concat)


def _focus(view: View, match: Pair) -> Write | RuleRefusal:
    conv, slices = match.root, match.inner.inputs
    attributes = conv.attributes_as(ConvAttributes)
    constant = view.constant(conv.inputs[1])
    if constant is None:
        return RuleRefusal("the weights are not constant", conv.output)
    if attributes.groups != 1 or set(attributes.dilations) != {1}:
        return RuleRefusal("the convolution has groups or dilations", conv.output)
    found = [_strided_slice(view, part) for part in slices]
    x, _, step = found[0]
    shape, rank = view.shape(x), len(attributes.strides)
    whole = (*shape[:2], *(n // s for n, s in zip(shape[2:], step[2:], strict=True)))
    is_image = all(
        (each[0], each[2]) == (x, step)
        and not any(each[1][:2])
        and all(0 <= a < s for a, s in zip(each[1][2:], step[2:], strict=True))
        and view.shape(part) == whole
        for part, each in zip(slices, found, strict=True)
    )
    strided = step[:2] == (1, 1) and max(step) > 1
    if not (is_image and strided) or any(n % s for n, s in zip(shape, step, strict=True)):
        return RuleRefusal("the channels are not strided parts of one image", conv.output)
    if len({start for _, start, _ in found}) < math.prod(step):  # a weight of 0 would turn what is infinite into NaN
        return RuleRefusal("parts of the image are not read", conv.output)
    old = constant.array.astype(np.float64)
    kernel = old.shape[2:]
    weights = np.zeros((old.shape[0], shape[1], *(k * s for k, s in zip(kernel, step[2:], strict=True))))
    for i, (_, start, _) in enumerate(found):
        places = tuple(slice(a, None, s) for a, s in zip(start[2:], step[2:], strict=True))
        weights[(slice(None), slice(None), *places)] += old[:, i * shape[1] : (i + 1) * shape[1]]
    dtype = view.type(conv.output).dtype
    if not is_finite_in(weights, dtype):
        return RuleRefusal("a sum of weights is not finite", conv.output)

    def wide(field: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n * s for n, s in zip(field, step[2:], strict=True))

    wider = ConvAttributes(
        wide(attributes.strides), wide(attributes.pads_begin), wide(attributes.pads_end), (1,) * rank
    )
    return lambda writer: writer.add("conv", (x, writer.constant(weights, dtype)), wider)


def _strided_slice(view: View, value: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the value that a chain of slices reads, and the starts and steps of the whole chain in it."""
    rank = view.type(value).rank
    start, step = (0,) * rank, (1,) * rank
    while slices := view.producing(value, "slice"):
        attributes = slices[0].attributes_as(SliceAttributes)
        start = tuple(a + b * c for a, b, c in zip(attributes.start, attributes.step, start, strict=True))
        step = tuple(a * b for a, b in zip(attributes.step, step, strict=True))
        value = slices[0].inputs[0]
    return value, start, step


CONV1X1_IS_MATMUL = Rule(
    name="conv1x1-is-matmul",
    law="conv(x, W) = reshape(W[o,i] @ reshape(x, [i,hw])) for a window of one element",
    source="definition of the convolution",
    roots=("conv",),
    match=_match_pointwise,
    rewrite=_pointwise,
)
CONV_OF_PATCHES_IS_MATMUL = Rule(
    name="conv-of-patches-is-matmul",
    law="conv(x, W) = patches(x) @ W for windows that lie side by side",
    source="definition of the convolution; the first layer of ViT",
    roots=("conv",),
    match=_match_patches,
    rewrite=_patches,
)
ZERO_PAD_FOLDS_INTO_CONV = Rule(
    name="zero-pad-folds-into-conv",
    law="conv(pad(x, p, 0), W, q) = conv(x, W, p + q)",
    source="definition of the convolution's pads",
    roots=("conv",),
    match=reads("pad"),
    rewrite=_fold_pad,
)

FEW_CHANNEL_CONV_IS_ROW_CONV = Rule(
    name="few-channel-conv-is-row-conv",
    law="conv(x, W)[o,y] = sum over t of conv(x, W[:,:,t])[(o,t),y+t]",
    source="linearity; each row of the window becomes output channels, so that vectors are full",
    roots=("conv",),
    match=_match_rows,
    rewrite=_rows,
    reorders=True,
)

CONV_OF_SLICES_IS_STRIDED_CONV = Rule(
    name="conv-of-slices-is-strided-conv",
    law="conv(concat of x[i::s, j::s], W, stride t) = conv(x, W', stride s*t), W'[s*a+i] = W[i,a]",
    source="definition of the convolution; YOLOX's Focus, space-to-depth before a convolution",
    roots=("conv",),
    match=_match_focus,
    rewrite=_focus,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (
    CONV1X1_IS_MATMUL,
    CONV_OF_PATCHES_IS_MATMUL,
    ZERO_PAD_FOLDS_INTO_CONV,
    FEW_CHANNEL_CONV_IS_ROW_CONV,
    CONV_OF_SLICES_IS_STRIDED_CONV,
)
