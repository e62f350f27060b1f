"""EfficientViT-B1: segmentation with multi-scale linear attention.

It has inverted bottlenecks with hard-swish, and attention without softmax: relu(q) (relu(k)' v),
normalized by its row sums, over tokens and over their 5x5 neighbourhoods. At 512x512 with 150 classes it
takes about 6.2 GFLOP and 4.8 million parameters.

Source: Cai et al., "EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense
Prediction" (ICCV 2023), variant B1 with the segmentation head.
"""

from collections.abc import Sequence

import onnx

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError


def build_efficientvit(
    seed: int = 0,
    size: int = 512,
    widths: tuple[int, int, int, int, int] = (16, 32, 64, 128, 256),
    depths: tuple[int, int, int, int, int] = (1, 2, 3, 3, 4),
    each: int = 16,
    head: int = 64,
    classes: int = 150,
    free: Sequence[str] = (),
) -> onnx.ModelProto:
    """Build the network for a square image.

    Args:
        seed: seed of the random weights.
        size: height and width of the image in pixels, a multiple of 32.
        widths: channels of the stem and the four stages.
        depths: numbers of blocks of the stem and the four stages.
        each: channels of an attention head.
        head: channels of the segmentation head.
        classes: number of classes.
        free: the names of dynamic dimensions among "batch", "h" and "w"; heights and widths are multiples of 32.

    Returns:
        A model from "input" f32[1, 3, size, size] to "output" f32[1, classes, size / 8, size / 8].

    Raises:
        OptionError: the size is not a multiple of 32.
    """
    if size < 32 or size % 32:
        raise OptionError(f"{size} pixels", "efficientvit: size", "a multiple of 32")
    writer = GraphWriter("efficientvit", seed)
    batch, h, w = (name if name in free else n for name, n in (("batch", 1), ("h", size), ("w", size)))
    x = writer.input("input", (batch, 3, h, w))
    x = _conv(writer, x, 3, widths[0], 3, stride=2)
    for _ in range(depths[0]):
        y = _conv(writer, x, widths[0], widths[0], 3, groups=widths[0])
        x = writer.op("Add", x, _conv(writer, y, widths[0], widths[0], 1, is_active=False))
    side, before, stages = size // 2, widths[0], []
    for number, (width, depth) in enumerate(zip(widths[1:], depths[1:], strict=True)):
        side //= 2
        has_attention = number >= 2
        x = _bottleneck(writer, x, before, width, stride=2, has_norms=not has_attention)
        for _ in range(depth if has_attention else depth - 1):
            if has_attention:
                x = writer.op("Add", x, attention(writer, x, width, each))
            inner = _bottleneck(writer, x, width, width, has_norms=not has_attention)
            x = writer.op("Add", x, inner)
        before = width
        stages.append((x, width, side))
    result = _head(writer, stages[1:], head, classes)
    writer.output(result, "output", (batch, classes, *(("h8", "w8") if free else (size // 8, size // 8))))
    return writer.finish()


def _conv(
    writer: GraphWriter,
    x: str,
    before: int,
    after: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    is_active: bool = True,
    has_norm: bool = True,
    gain: float = 1.3,
) -> str:
    x = writer.conv(
        x, (before, after), kernel, stride=stride, pad=kernel // 2, groups=groups, bias=not has_norm, gain=gain
    )
    x = writer.batch_norm(x, after) if has_norm else x
    return writer.op("HardSwish", x) if is_active else x


def _bottleneck(
    writer: GraphWriter, x: str, before: int, after: int, *, stride: int = 1, has_norms: bool = True, expansion: int = 4
) -> str:
    inner = expansion * before
    x = _conv(writer, x, before, inner, 1, has_norm=has_norms)
    x = _conv(writer, x, inner, inner, 3, stride=stride, groups=inner, has_norm=has_norms)
    gain = 0.3 if before == after and stride == 1 else 1.0  # small, because the result is added to the input
    return _conv(writer, x, inner, after, 1, is_active=False, gain=gain)


def attention(writer: GraphWriter, x: str, width: int, each: int) -> str:
    """Append linear attention over the tokens and over their 5x5 neighbourhoods, of heads of `each` channels."""
    heads = width // each
    plain = writer.conv(x, (width, 3 * width), 1, bias=False, gain=1.0)
    wide = writer.conv(plain, (3 * width, 3 * width), 5, pad=2, groups=3 * width, bias=False, gain=1.0)
    wide = writer.conv(wide, (3 * width, 3 * width), 1, groups=3 * heads, bias=False, gain=1.0)
    both = writer.op("Concat", plain, wide, axis=1)
    both = writer.reshape(both, (0, 2 * heads, 3 * each, -1))
    q, k, v = (writer.slice(both, 2, i * each, (i + 1) * each) for i in range(3))
    q, k = writer.op("Relu", q), writer.op("Relu", k)
    pads = writer.integers((0, 0, 0, 0, 0, 0, 1, 0), "pads")
    v = writer.op("Pad", v, pads, writer.scalar(1.0, "one"), mode="constant")
    state = writer.op("MatMul", v, writer.op("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = writer.op("MatMul", state, q)
    total = writer.op("Add", writer.slice(mixed, 2, each, each + 1), writer.scalar(1e-5, "least"))
    mixed = writer.op("Div", writer.slice(mixed, 2, 0, each), total)
    area = writer.op("Shape", x, start=2)
    shape = writer.op("Concat", writer.integers((0, 2 * width), "shape"), area, axis=0)
    mixed = writer.op("Reshape", mixed, shape)
    return _conv(writer, mixed, 2 * width, width, 1, is_active=False, gain=0.3)


def _head(writer: GraphWriter, stages: list[tuple[str, int, int]], width: int, classes: int) -> str:
    largest = stages[0][2]
    total = ""
    for x, channels, side in reversed(stages):
        x = _conv(writer, x, channels, width, 1, is_active=False)
        x = x if side == largest else writer.resize(x, largest // side, "cubic")
        total = writer.op("Add", total, x) if total else x
    for _ in range(3):
        total = writer.op("Add", total, _bottleneck(writer, total, width, width))
    total = _conv(writer, total, width, 4 * width, 1)
    return writer.conv(total, (4 * width, classes), 1, gain=1.0)
