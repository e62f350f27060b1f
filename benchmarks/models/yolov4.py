"""YOLOv4: a one-stage detector of 64 million parameters.

It consists of CSPDarknet53 with Mish, spatial pyramid pooling, a path aggregation network and three
heads; the outputs are the raw maps of the heads. At 416x416 it takes 59.6 GFLOP (a multiplication and an
addition count as two) and 64.4 million parameters.

Source: Bochkovskiy, Wang and Liao, "YOLOv4: Optimal Speed and Accuracy of Object Detection" (2020),
and the network's public configuration.
"""

import onnx

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError

ANCHORS = 3


def build_yolov4(
    seed: int = 0, size: int = 416, width: int = 32, depths: tuple[int, ...] = (1, 2, 8, 8, 4), classes: int = 80
) -> onnx.ModelProto:
    """Build the network for a square image.

    Args:
        seed: seed of the random weights.
        size: height and width of the image in pixels, a multiple of 32.
        width: channels of the first layer.
        depths: residual blocks of the five stages.
        classes: number of classes.

    Returns:
        A model from "input" f32[1, 3, size, size] to "small", "medium" and "large", the maps for
        small, medium and large objects: f32[1, 3 * (classes + 5), size / n, size / n], n = 8, 16, 32.

    Raises:
        OptionError: the size is not a multiple of 32.
    """
    if size < 32 or size % 32:
        raise OptionError(f"{size} pixels", "yolov4: size", "a multiple of 32")
    writer = GraphWriter("yolov4", seed)
    x = writer.input("input", (1, 3, size, size))
    x = _conv(writer, x, 3, width, 3, "mish")
    stages = []
    for number, depth in enumerate(depths):
        x = _stage(writer, x, width << number, depth, is_first=number == 0)
        stages.append(x)
    maps = _neck(writer, *stages[2:], width)
    for name, stride, (value, channels) in zip(("small", "medium", "large"), (8, 16, 32), maps, strict=True):
        value = _conv(writer, value, channels, 2 * channels, 3)
        found = ANCHORS * (classes + 5)
        value = writer.conv(value, (2 * channels, found), 1, gain=1.0)
        writer.output(value, name, (1, found, size // stride, size // stride))
    return writer.finish()


def _conv(
    writer: GraphWriter,
    x: str,
    before: int,
    after: int,
    kernel: int,
    activation: str = "leaky",
    stride: int = 1,
    gain: float = 1.2,
) -> str:
    x = writer.conv(x, (before, after), kernel, stride=stride, pad=kernel // 2, bias=False, gain=gain)
    x = writer.batch_norm(x, after)
    if activation == "leaky":
        return writer.op("LeakyRelu", x, alpha=0.1)
    return writer.op("Mul", x, writer.op("Tanh", writer.op("Softplus", x)))


def _stage(writer: GraphWriter, x: str, before: int, depth: int, is_first: bool) -> str:
    """Halve the size and double the channels; one of two paths goes through residual blocks."""
    after = 2 * before
    part = after if is_first else before
    x = _conv(writer, x, before, after, 3, "mish", stride=2)
    aside = _conv(writer, x, after, part, 1, "mish")
    x = _conv(writer, x, after, part, 1, "mish")
    for _ in range(depth):
        inner = _conv(writer, x, part, before if is_first else part, 1, "mish")
        inner = _conv(writer, inner, before if is_first else part, part, 3, "mish", gain=0.5)
        x = writer.op("Add", x, inner)
    x = _conv(writer, x, part, part, 1, "mish")
    joined = writer.op("Concat", x, aside, axis=1)
    return _conv(writer, joined, 2 * part, after, 1, "mish")


def _alternate(writer: GraphWriter, x: str, before: int, channels: int, count: int) -> str:
    """Alternate convolutions: 1x1 to `channels`, and 3x3 to twice that number."""
    for i in range(count):
        x = _conv(writer, x, before, channels, 1) if i % 2 == 0 else _conv(writer, x, channels, 2 * channels, 3)
        before = 2 * channels
    return x


def _neck(writer: GraphWriter, c3: str, c4: str, c5: str, width: int) -> list[tuple[str, int]]:
    """Pool, then aggregate maps from large to small objects and back; return each map with its channels."""
    n = 4 * width  # channels of the map for small objects
    x = _alternate(writer, c5, 8 * n, 4 * n, 3)
    pools = [writer.op("MaxPool", x, kernel_shape=[k, k], strides=[1, 1], pads=[k // 2] * 4) for k in (13, 9, 5)]
    large = _alternate(writer, writer.op("Concat", *pools, x, axis=1), 16 * n, 4 * n, 3)
    up = writer.resize(_conv(writer, large, 4 * n, 2 * n, 1), 2)
    side = _conv(writer, c4, 4 * n, 2 * n, 1)
    medium = _alternate(writer, writer.op("Concat", side, up, axis=1), 4 * n, 2 * n, 5)
    up = writer.resize(_conv(writer, medium, 2 * n, n, 1), 2)
    side = _conv(writer, c3, 2 * n, n, 1)
    small = _alternate(writer, writer.op("Concat", side, up, axis=1), 2 * n, n, 5)
    down = _conv(writer, small, n, 2 * n, 3, stride=2)
    medium = _alternate(writer, writer.op("Concat", down, medium, axis=1), 4 * n, 2 * n, 5)
    down = _conv(writer, medium, 2 * n, 4 * n, 3, stride=2)
    large = _alternate(writer, writer.op("Concat", down, large, axis=1), 8 * n, 4 * n, 5)
    return [(small, n), (medium, 2 * n), (large, 4 * n)]
