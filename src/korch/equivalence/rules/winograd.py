"""Replaces a 3x3 convolution by a Winograd convolution, which takes a fraction of the multiplications."""

import math
from collections.abc import Iterator

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer, is_finite_in
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.linear import BYTES, ConvAttributes
from korch.primitive.ops.winograd import TRANSFORMS, WinogradAttributes, tile_counts, transform_weights
from korch.primitive.types import DType, pair

FEWEST_CHANNELS = 16
"""With fewer channels the transforms cost more than the products save."""

MOST_WORK = 0.7
"""The largest share of the direct convolution's multiplications that is worthwhile, tiles past the border included."""

TILE_OF_BYTES, DIVISOR_OF_BYTES = 2, 4
"""The outputs of a tile per axis for bytes, and the factor that makes its transformed weights integers."""

CLOSE_WORK = 1.4
"""A tile size is tried only if it takes at most this multiple of the products of the best tile size."""


WinogradMatch = tuple[Primitive, int]
"""A convolution and the outputs of a tile per axis."""


def _match(view: View, root: Primitive) -> Iterator[WinogradMatch]:
    if view.shape(root.inputs[1])[2:] != (3, 3):
        return
    if view.type(root.output).dtype.is_float:
        for tile in TRANSFORMS:
            yield root, tile
    elif view.type(root.inputs[0]).dtype in BYTES:
        yield root, TILE_OF_BYTES


def _rewrite(view: View, match: WinogradMatch) -> Write | RuleRefusal:
    conv, tile = match
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
    dtype = view.type(x).dtype
    is_of_bytes = dtype in BYTES
    products = {tile: _products(shape, tile) for tile in ((TILE_OF_BYTES,) if is_of_bytes else TRANSFORMS)}
    if products[tile] > MOST_WORK * 9 * shape[2] * shape[3]:
        return RuleRefusal("the image is too small for such tiles", conv.output)
    if products[tile] > CLOSE_WORK * min(products.values()):
        return RuleRefusal("other tiles take far fewer products", conv.output)
    divisor = DIVISOR_OF_BYTES if is_of_bytes else 1
    transformed = divisor * transform_weights(constant.array, tile)
    if is_of_bytes and _largest_sum(transformed, dtype) >= 1 << 31:
        return RuleRefusal("a transformed sum could exceed 32 bits", conv.output)
    if not is_of_bytes and dtype not in (DType.F32, DType.F64):
        return RuleRefusal("the transforms would lose the bits of a half type", conv.output, is_final=True)
    if not is_of_bytes and not is_finite_in(transformed, view.type(conv.output).dtype):
        return RuleRefusal("a transformed weight is not finite", conv.output)
    pads = pair(attributes.pads_begin), pair(attributes.pads_end)

    def write(writer: Writer) -> int:
        kernel = writer.constant(np.ascontiguousarray(transformed), DType.I16 if is_of_bytes else dtype)
        result = writer.add("winograd", (x, kernel), WinogradAttributes(tile, *pads))
        if divisor == 1:
            return result
        return writer.add("div", (result, writer.along(np.array(divisor), 0, writer.type(result))))

    return write


def _largest_sum(weights: Array, dtype: DType) -> float:
    """Return a bound of all sums of a tile of bytes: each point's largest number times its weights, all added up."""
    data = TRANSFORMS[TILE_OF_BYTES].data
    factors, limits = np.kron(data, data), np.iinfo(dtype.numpy)
    above, below = (np.maximum(sign * factors, 0).sum(1) for sign in (1, -1))
    most = np.maximum(above * limits.max - below * limits.min, below * limits.max - above * limits.min)
    return float((most @ np.abs(weights).sum(2).reshape(len(most), -1)).max(initial=0))


def _products(shape: tuple[int, ...], tile: int) -> int:
    """Return the number of products per pair of input and output channels."""
    return math.prod(tile_counts(shape, tile)) * (tile + 2) ** 2


CONV3X3_IS_WINOGRAD = Rule(
    name="conv3x3-is-winograd",
    law="conv(x, g) = A ((G g G') * (B x B')) A' on tiles of m x m outputs, m = 2 or 4",
    source="Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016",
    roots=("conv",),
    match=_match,
    rewrite=_rewrite,
    reorders=True,
    is_local=True,
    needs_float32=True,
)

RULES: tuple[AnyRule, ...] = (CONV3X3_IS_WINOGRAD,)
