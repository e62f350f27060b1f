"""The blocks of models that the paper's case studies are about (Korch, ASPLOS 2024, sections 6.3 and 6.4)."""

import math

import numpy as np
import onnx

from benchmarks.models.efficientvit import attention
from benchmarks.models.writer import GraphWriter


def normalized_and_padded(side: int = 224) -> onnx.ModelProto:
    """Candy's InstanceNormalization, ReLU and reflecting pad (figure 12), of 32 channels of 224 x 224."""
    writer = GraphWriter("normalized_and_padded", 0)
    x = writer.input("input", (1, 32, side, side))
    scale, shift = writer.uniform(32, 0.5, 1.5, "scale"), writer.uniform(32, -0.1, 0.1, "shift")
    x = writer.op("Relu", writer.op("InstanceNormalization", x, scale, shift))
    x = writer.op("Pad", x, writer.integers((0, 0, 1, 1, 0, 0, 1, 1), "pads"), mode="reflect")
    writer.output(x, "output", (1, 32, side + 2, side + 2))
    return writer.finish()


def resized_and_joined(batch: int, least: int = 16) -> onnx.ModelProto:
    """Segformer's four Add, Transpose, Reshape and Resize, and their Concat (figure 13), of 512 x 512 pixels.

    `least`: the side of the smallest image.
    """
    writer = GraphWriter("resized_and_joined", 0)
    parts = []
    most = 8 * least
    for i, side in enumerate((least, 2 * least, 4 * least, most)):
        x = writer.input(f"input{i}", (batch, side * side, 256))
        x = writer.op("Add", x, writer.uniform(256, -0.1, 0.1, "bias"))
        x = writer.reshape(writer.op("Transpose", x, perm=[0, 2, 1]), (batch, 256, side, side))
        parts.append(x if side == most else writer.resize(x, most // side, "linear"))
    writer.output(writer.op("Concat", *parts, axis=1), "output", (batch, 1024, most, most))
    return writer.finish()


def linear_attention(side: int) -> onnx.ModelProto:
    """EfficientViT's attention (figures 8 to 10), of 64 channels; a side of 128 is that of images of 2048 x 2048."""
    writer = GraphWriter("linear_attention", 0)
    x = writer.input("input", (1, 64, side, side))
    writer.output(attention(writer, x, 64, 16), "output", (1, 64, side, side))
    return writer.finish()


def softmax_attention(queries: int = 16384, keys: int = 256) -> onnx.ModelProto:
    """Segformer's first self-attention (figures 2 and 4): 16,384 queries and 256 keys of 32 channels."""
    writer = GraphWriter("softmax_attention", 0)
    q, k = writer.input("q", (1, 1, queries, 32)), writer.input("k", (1, 1, 32, keys))
    v = writer.input("v", (1, 1, keys, 32))
    scores = writer.op("Div", writer.op("MatMul", q, k), writer.constant(np.array(math.sqrt(32), np.float32), "root"))
    mixed = writer.op("MatMul", writer.op("Softmax", scores, axis=-1), v)
    writer.output(mixed, "output", (1, 1, queries, 32))
    return writer.finish()
