"""MobileNet-v3-Small: a classifier for phones, with squeeze-and-excite blocks and hard-swish.

Source: Howard et al., "Searching for MobileNetV3" (2019), table 2.
"""

import onnx

from benchmarks.models.writer import GraphWriter

BLOCKS = (
    # kernel, expanded channels, channels, has a gate, activation, stride
    (3, 16, 16, True, "Relu", 2),
    (3, 72, 24, False, "Relu", 2),
    (3, 88, 24, False, "Relu", 1),
    (5, 96, 40, True, "HardSwish", 2),
    (5, 240, 40, True, "HardSwish", 1),
    (5, 240, 40, True, "HardSwish", 1),
    (5, 120, 48, True, "HardSwish", 1),
    (5, 144, 48, True, "HardSwish", 1),
    (5, 288, 96, True, "HardSwish", 2),
    (5, 576, 96, True, "HardSwish", 1),
    (5, 576, 96, True, "HardSwish", 1),
)


def build_mobilenetv3(seed: int = 0, size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """Build the network with normalizations folded into the convolutions, as exporters do.

    Args:
        seed: seed of the random weights.
        size: height and width of the image in pixels, a multiple of 32.
        classes: number of classes.

    Returns:
        A model from "input" f32[1, 3, size, size] to "output" f32[1, classes].
    """
    writer = GraphWriter("mobilenetv3", seed)
    x = writer.op("HardSwish", writer.conv(writer.input("input", (1, 3, size, size)), (3, 16), 3, stride=2, pad=1))
    before = 16
    for kernel, wide, after, has_gate, activation, stride in BLOCKS:
        y = x if wide == before else writer.op(activation, writer.conv(x, (before, wide), 1))
        y = writer.conv(y, (wide, wide), kernel, stride=stride, pad=kernel // 2, groups=wide)
        y = writer.op(activation, y)
        y = _gated(writer, y, wide) if has_gate else y
        y = writer.conv(y, (wide, after), 1)
        x = writer.op("Add", x, y) if stride == 1 and before == after else y
        before = after
    x = writer.op("HardSwish", writer.conv(x, (before, 576), 1))
    x = writer.op("GlobalAveragePool", x)
    x = writer.op("HardSwish", writer.conv(x, (576, 1024), 1))
    x = writer.reshape(writer.conv(x, (1024, classes), 1), (1, classes))
    writer.output(x, "output", (1, classes))
    return writer.finish()


def _gated(writer: GraphWriter, x: str, channels: int) -> str:
    """Multiply channels by gates that are computed from the channels' means (squeeze and excite)."""
    inner = max(8, (channels // 4 + 4) // 8 * 8)
    gate = writer.op("Relu", writer.conv(writer.op("GlobalAveragePool", x), (channels, inner), 1))
    gate = writer.op("HardSigmoid", writer.conv(gate, (inner, channels), 1), alpha=1 / 6, beta=0.5)
    return writer.op("Mul", x, gate)
