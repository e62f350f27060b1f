"""A small classifier of convolution, batch normalization and ReLU, with pooling and a final Gemm.

The statistics of the normalizations are far from mean 0 and variance 1. With these values each
normalization would be the identity, and an error in folding it would not be seen.
"""

import math

import onnx

from benchmarks.models.writer import GraphWriter


def build_conv_bn_relu(
    seed: int = 0, size: int = 16, channels: tuple[int, int] = (8, 16), classes: int = 10
) -> onnx.ModelProto:
    """Build the classifier.

    Returns:
        A model from "input" f32[1, 3, size, size] to "output" f32[1, classes] (logits).
    """
    first, second = channels
    writer = GraphWriter("conv_bn_relu", seed)
    x = writer.input("input", (1, 3, size, size))
    x = _conv_bn_relu(writer, x, (3, first), bias=True)
    x = writer.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = _conv_bn_relu(writer, x, (first, second), bias=False)
    x = writer.op("Flatten", writer.op("GlobalAveragePool", x), axis=1)
    weight = writer.normal((classes, second), 2.0 / math.sqrt(second), "weight")
    x = writer.op("Gemm", x, weight, writer.uniform(classes, -0.1, 0.1, "bias"), transB=1)
    writer.output(x, "output", (1, classes))
    return writer.finish()


def _conv_bn_relu(writer: GraphWriter, x: str, channels: tuple[int, int], *, bias: bool) -> str:
    x = writer.conv(x, channels, 3, pad=1, bias=bias)
    width = channels[1]
    parameters = (
        writer.uniform(width, 0.5, 1.5, "scale"),
        writer.uniform(width, -0.5, 0.5, "shift"),
        writer.uniform(width, -0.8, 0.8, "mean"),
        writer.uniform(width, 0.4, 3.0, "variance"),
    )
    return writer.op("Relu", writer.op("BatchNormalization", x, *parameters, epsilon=1e-5))
