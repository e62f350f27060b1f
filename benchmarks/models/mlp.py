"""A multilayer perceptron of Gemm and Relu: the smallest model that allows fusion."""

import math
from collections.abc import Sequence
from itertools import pairwise

import onnx

from benchmarks.models.writer import GraphWriter


def build_mlp(seed: int = 0, batch: int = 1, widths: Sequence[int] = (16, 32, 32, 8)) -> onnx.ModelProto:
    """Build a perceptron with a layer for each pair of adjacent `widths`.

    Returns:
        A model from "input" f32[batch, widths[0]] to "output" f32[batch, widths[-1]]. Every
        second layer has a transposed weight (`transB`), so both forms of Gemm occur.
    """
    writer = GraphWriter("mlp", seed)
    x = writer.input("input", (batch, widths[0]))
    for layer, (width_in, width_out) in enumerate(pairwise(widths)):
        x = writer.op("Relu", x) if layer else x
        transposed = layer % 2
        shape = (width_out, width_in) if transposed else (width_in, width_out)
        weight = writer.normal(shape, math.sqrt(2.0 / width_in), "weight")
        bias = writer.uniform(width_out, -0.1, 0.1, "bias")
        x = writer.op("Gemm", x, weight, bias, transB=transposed)
    writer.output(x, "output", (batch, widths[-1]))
    return writer.finish()
