"""Segformer-B0: semantic segmentation by a transformer with four scales.

It has overlapping patches, attention whose keys and values come from a reduced image, feed-forward layers
with a depthwise convolution, and a head of linear layers whose maps are resized and concatenated. At
512x512 with 150 classes it takes 16.8 GFLOP and 3.75 million parameters.

Source: Xie et al., "SegFormer: Simple and Efficient Design for Semantic Segmentation with
Transformers" (NeurIPS 2021), variant B0.
"""

import math

import onnx

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError

REDUCTIONS = (8, 4, 2, 1)


def build_segformer(
    seed: int = 0,
    size: int = 512,
    widths: tuple[int, ...] = (32, 64, 160, 256),
    heads: tuple[int, ...] = (1, 2, 5, 8),
    depth: int = 2,
    joined: int = 256,
    classes: int = 150,
) -> onnx.ModelProto:
    """Build the network for a square image.

    Args:
        seed: seed of the random weights.
        size: height and width of the image in pixels, a multiple of 32.
        widths: channels of each scale; there are at most four.
        heads: the number of attention heads at each scale.
        depth: number of blocks at each scale.
        joined: channels of the decode head.
        classes: number of classes.

    Returns:
        A model from "input" f32[1, 3, size, size] to "output" f32[1, classes, size / 4, size / 4].

    Raises:
        OptionError: the size is not a multiple of 32.
    """
    if size < 32 or size % 32:
        raise OptionError(f"{size} pixels", "segformer: size", "a multiple of 32")
    writer = GraphWriter("segformer", seed)
    x, before, side = writer.input("input", (1, 3, size, size)), 3, size
    maps = []
    for scale, width in enumerate(widths):
        kernel, stride = (7, 4) if scale == 0 else (3, 2)
        side //= stride
        x = writer.conv(x, (before, width), kernel, stride=stride, pad=kernel // 2, gain=1.0)
        x = writer.layer_norm(_to_tokens(writer, x, width, side), width)
        for _ in range(depth):
            x = _block(writer, x, width, heads[scale], REDUCTIONS[scale], side)
        x = writer.layer_norm(x, width)
        maps.append((x, width, side))
        x, before = _to_image(writer, x, width, side), width
    result = _decode(writer, maps, joined, classes)
    writer.output(result, "output", (1, classes, size // 4, size // 4))
    return writer.finish()


def _to_tokens(writer: GraphWriter, x: str, width: int, side: int) -> str:
    return writer.op("Transpose", writer.reshape(x, (0, width, side * side)), perm=[0, 2, 1])


def _to_image(writer: GraphWriter, x: str, width: int, side: int) -> str:
    return writer.reshape(writer.op("Transpose", x, perm=[0, 2, 1]), (0, width, side, side))


def _block(writer: GraphWriter, x: str, width: int, heads: int, reduction: int, side: int) -> str:
    normed = writer.layer_norm(x, width)
    x = writer.op("Add", x, _attention(writer, normed, width, heads, reduction, side))
    hidden = 4 * width
    y = writer.dense(writer.layer_norm(x, width), width, hidden)
    y = writer.conv(_to_image(writer, y, hidden, side), (hidden, hidden), 3, pad=1, groups=hidden, gain=1.0)
    y = writer.gelu(_to_tokens(writer, y, hidden, side))
    return writer.op("Add", x, writer.dense(y, hidden, width))


def _attention(writer: GraphWriter, x: str, width: int, heads: int, reduction: int, side: int) -> str:
    each, tokens = width // heads, side * side
    source, count = x, tokens
    if reduction > 1:
        image = _to_image(writer, x, width, side)
        image = writer.conv(image, (width, width), reduction, stride=reduction, gain=1.0)
        count = (side // reduction) ** 2
        source = writer.layer_norm(_to_tokens(writer, image, width, side // reduction), width)

    def split(value: str, length: int, perm: list[int]) -> str:
        value = writer.reshape(value, (0, length, heads, each))
        return writer.op("Transpose", value, perm=perm)

    q = split(writer.dense(x, width, width), tokens, [0, 2, 1, 3])
    k = split(writer.dense(source, width, width), count, [0, 2, 3, 1])
    v = split(writer.dense(source, width, width), count, [0, 2, 1, 3])
    scores = writer.op("Div", writer.op("MatMul", q, k), writer.scalar(math.sqrt(each), "root"))
    mixed = writer.op("MatMul", writer.op("Softmax", scores, axis=-1), v)
    mixed = writer.reshape(writer.op("Transpose", mixed, perm=[0, 2, 1, 3]), (0, tokens, width))
    return writer.dense(mixed, width, width)


def _decode(writer: GraphWriter, maps: list[tuple[str, int, int]], joined: int, classes: int) -> str:
    largest = maps[0][2]
    parts = []
    for x, width, side in reversed(maps):
        y = _to_image(writer, writer.dense(x, width, joined), joined, side)
        parts.append(y if side == largest else writer.resize(y, largest // side, "linear"))
    x = writer.op("Concat", *parts, axis=1)
    x = writer.conv(x, (len(maps) * joined, joined), 1, bias=False)
    x = writer.op("Relu", writer.batch_norm(x, joined))
    return writer.conv(x, (joined, classes), 1, gain=1.0)
