"""Candy: the fast neural style transfer network.

Three convolutions reduce the image to a quarter of its size. Residual blocks and two nearest-neighbour
upsamplings, each with a convolution, follow. Convolutions have reflection padding, and all but the last
one instance normalization. Weights are random, because benchmarks need only operations and shapes.

Source: Johnson, Alahi and Fei-Fei, "Perceptual Losses for Real-Time Style Transfer and
Super-Resolution" (ECCV 2016), in the variant with instance normalization and nearest upsampling
instead of transposed convolutions.
"""

import numpy as np
import onnx

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError


def build_candy(
    seed: int = 0, size: int = 224, channels: tuple[int, int, int] = (32, 64, 128), blocks: int = 5
) -> onnx.ModelProto:
    """Build the network for a square image.

    Args:
        seed: seed of the random weights.
        size: height and width of the image in pixels, a multiple of 4 of at least 8.
        channels: numbers of channels at full, half and quarter size.
        blocks: number of residual blocks.

    Returns:
        A model from "input" f32[1, 3, size, size] to "output" of the same shape.

    Raises:
        OptionError: the size can't be halved twice, or is too small for reflection padding.
    """
    if size < 8 or size % 4:
        raise OptionError(f"{size} pixels can't be halved twice", "candy: size", "a multiple of 4 from 8")
    full, half, quarter = channels
    writer = GraphWriter("candy", seed)
    x = writer.input("input", (1, 3, size, size))
    x = _relu(writer, _conv_norm(writer, x, (3, full), 9))
    x = _relu(writer, _conv_norm(writer, x, (full, half), 3, stride=2))
    x = _relu(writer, _conv_norm(writer, x, (half, quarter), 3, stride=2))
    for _ in range(blocks):
        inner = _relu(writer, _conv_norm(writer, x, (quarter, quarter), 3))
        x = writer.op("Add", _conv_norm(writer, inner, (quarter, quarter), 3), x)
    for before, after in ((quarter, half), (half, full)):
        x = _relu(writer, _conv_norm(writer, _upsample(writer, x), (before, after), 3))
    x = _pad_conv(writer, x, (full, 3), 9)
    writer.output(x, "output", (1, 3, size, size))
    return writer.finish()


def _relu(writer: GraphWriter, x: str) -> str:
    return writer.op("Relu", x)


def _pad_conv(writer: GraphWriter, x: str, channels: tuple[int, int], kernel: int, stride: int = 1) -> str:
    pad = kernel // 2
    pads = writer.integers((0, 0, pad, pad, 0, 0, pad, pad), "pads")
    padded = writer.op("Pad", x, pads, mode="reflect")
    return writer.conv(padded, channels, kernel, stride=stride)


def _conv_norm(writer: GraphWriter, x: str, channels: tuple[int, int], kernel: int, stride: int = 1) -> str:
    x = _pad_conv(writer, x, channels, kernel, stride)
    scale = writer.uniform(channels[1], 0.6, 1.4, "scale")
    shift = writer.uniform(channels[1], -0.3, 0.3, "shift")
    return writer.op("InstanceNormalization", x, scale, shift, epsilon=1e-5)


def _upsample(writer: GraphWriter, x: str) -> str:
    scales = writer.constant(np.array([1, 1, 2, 2], np.float32), "scales")
    return writer.op(
        "Resize", x, "", scales, mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"
    )
