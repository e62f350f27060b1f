"""YOLOX-Nano: an anchor-free detector of 0.9 million parameters for small devices.

It consists of a Focus stem (strided slices), CSPDarknet with depthwise convolutions and SiLU, pyramid
pooling, a path aggregation network and decoupled heads; the output is the concatenated predictions. At
416x416 it takes 1.08 GFLOP and 0.91 million parameters.

Source: Ge et al., "YOLOX: Exceeding YOLO Series in 2021" (2021), and the network's public
configuration (depth 0.33, width 0.25).
"""

from collections.abc import Sequence

import numpy as np
import onnx

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError

END = np.iinfo(np.int64).max
"""The end of a slice that goes up to the end of an axis."""


def build_yolox(
    seed: int = 0, size: int = 416, width: int = 16, depth: int = 1, classes: int = 80, free: Sequence[str] = ()
) -> onnx.ModelProto:
    """Build the network for a square image.

    Args:
        seed: seed of the random weights.
        size: height and width of the image in pixels, a multiple of 32.
        width: channels after the stem.
        depth: bottlenecks of the first and last stage; the two middle stages have three times as many.
        classes: number of classes.
        free: the names of dynamic dimensions among "batch", "h" and "w"; heights and widths are multiples of 32.

    Returns:
        A model from "input" f32[1, 3, size, size] to "output" f32[1, n, classes + 5] for all n
        places of the three maps: box, objectness, classes.

    Raises:
        OptionError: the size is not a multiple of 32.
    """
    if size < 32 or size % 32:
        raise OptionError(f"{size} pixels", "yolox: size", "a multiple of 32")
    writer = GraphWriter("yolox", seed)
    batch, h, w = (name if name in free else n for name, n in (("batch", 1), ("h", size), ("w", size)))
    x = writer.input("input", (batch, 3, h, w))
    x = _conv(writer, _focus(writer, x, END if free else size), 12, width, 3)
    stages = []
    for number, count in enumerate((depth, 3 * depth, 3 * depth, depth)):
        before, after = width << number, width << number + 1
        x = _separable(writer, x, before, after, stride=2)
        if number == 3:
            x = _pyramid(writer, x, after)
        x = _csp(writer, x, after, after, count, is_residual=number < 3)
        stages.append(x)
    maps = _neck(writer, *stages[1:], 4 * width, depth)
    places = sum((size // stride) ** 2 for stride in (8, 16, 32))
    rows = [
        writer.reshape(_head(writer, value, channels, 4 * width, classes), (0, classes + 5, -1))
        for value, channels in maps
    ]
    joined = writer.op("Concat", *rows, axis=2)
    result = writer.op("Transpose", joined, perm=[0, 2, 1])
    writer.output(result, "output", (batch, "places" if free else places, classes + 5))
    return writer.finish()


def _focus(writer: GraphWriter, x: str, end: int) -> str:
    """Move the four pixels of each 2x2 square to channels: a quarter of the pixels, four times the channels."""
    parts = []
    for column, row in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = writer.slice(x, 2, row, end, 2)
        parts.append(writer.slice(part, 3, column, end, 2))
    return writer.op("Concat", *parts, axis=1)


def _conv(writer: GraphWriter, x: str, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> str:
    x = writer.conv(x, (before, after), kernel, stride=stride, pad=kernel // 2, groups=groups, bias=False)
    x = writer.batch_norm(x, after)
    return writer.op("Mul", x, writer.op("Sigmoid", x))


def _separable(writer: GraphWriter, x: str, before: int, after: int, stride: int = 1) -> str:
    x = _conv(writer, x, before, before, 3, stride, groups=before)
    return _conv(writer, x, before, after, 1)


def _csp(writer: GraphWriter, x: str, before: int, after: int, count: int, is_residual: bool) -> str:
    """Send one half of the channels through bottlenecks, and concatenate the other half to the result."""
    half = after // 2
    inner, aside = _conv(writer, x, before, half, 1), _conv(writer, x, before, half, 1)
    for _ in range(count):
        y = _separable(writer, _conv(writer, inner, half, half, 1), half, half)
        inner = writer.op("Add", y, inner) if is_residual else y
    return _conv(writer, writer.op("Concat", inner, aside, axis=1), after, after, 1)


def _pyramid(writer: GraphWriter, x: str, channels: int) -> str:
    x = _conv(writer, x, channels, channels // 2, 1)
    pools = [writer.op("MaxPool", x, kernel_shape=[k, k], strides=[1, 1], pads=[k // 2] * 4) for k in (5, 9, 13)]
    return _conv(writer, writer.op("Concat", x, *pools, axis=1), 2 * channels, channels, 1)


def _neck(writer: GraphWriter, c3: str, c4: str, c5: str, n: int, depth: int) -> list[tuple[str, int]]:
    """Aggregate maps from large to small objects and back; return each map with its channels."""

    def join(*values: str) -> str:
        return writer.op("Concat", *values, axis=1)

    top = _conv(writer, c5, 4 * n, 2 * n, 1)
    middle = _csp(writer, join(writer.resize(top, 2), c4), 4 * n, 2 * n, depth, False)
    middle = _conv(writer, middle, 2 * n, n, 1)
    small = _csp(writer, join(writer.resize(middle, 2), c3), 2 * n, n, depth, False)
    down = _separable(writer, small, n, n, stride=2)
    medium = _csp(writer, join(down, middle), 2 * n, 2 * n, depth, False)
    down = _separable(writer, medium, 2 * n, 2 * n, stride=2)
    large = _csp(writer, join(down, top), 4 * n, 4 * n, depth, False)
    return [(small, n), (medium, 2 * n), (large, 4 * n)]


def _head(writer: GraphWriter, x: str, before: int, channels: int, classes: int) -> str:
    x = _conv(writer, x, before, channels, 1)
    kinds, boxes = x, x
    for _ in range(2):
        kinds = _separable(writer, kinds, channels, channels)
    for _ in range(2):
        boxes = _separable(writer, boxes, channels, channels)
    kind = writer.op("Sigmoid", writer.conv(kinds, (channels, classes), 1, gain=1.0))
    box = writer.conv(boxes, (channels, 4), 1, gain=1.0)
    objectness = writer.op("Sigmoid", writer.conv(boxes, (channels, 1), 1, gain=1.0))
    return writer.op("Concat", box, objectness, kind, axis=1)
