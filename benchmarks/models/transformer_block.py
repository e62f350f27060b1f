"""Pre-norm transformer blocks: attention with a causal -inf mask, and a GELU MLP.

Attention and GELU are written with the small operators that exporters emit, not with fused operators,
because the optimizer has to find the fusions. The mask is an initializer of 0 and -inf that is added to
the scores.
"""

import math

import numpy as np
import onnx

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError


def build_transformer_block(
    seed: int = 0, sequence: int = 128, width: int = 256, heads: int = 4, depth: int = 1
) -> onnx.ModelProto:
    """Build `depth` blocks.

    Args:
        seed: seed of the random weights.
        sequence: number of tokens.
        width: features of a token, a multiple of `heads`.
        heads: number of attention heads.
        depth: number of blocks.

    Returns:
        A model from "input" f32[1, sequence, width] to "output" of the same shape.

    Raises:
        OptionError: the width isn't a multiple of the number of heads.
    """
    if heads < 1 or width % heads:
        raise OptionError(
            f"a width of {width} can't be split over {heads} heads",
            "transformer_block: heads",
            "a divisor of the width",
        )
    writer = GraphWriter("transformer_block", seed)
    x = writer.input("input", (1, sequence, width))
    above_diagonal = np.triu(np.ones((1, 1, sequence, sequence), bool), 1)
    mask = writer.constant(np.where(above_diagonal, -np.inf, 0.0).astype(np.float32), "mask")
    for _ in range(depth):
        normed = _layer_norm(writer, x, width)
        x = writer.op("Add", x, _attention(writer, normed, mask, (sequence, width, heads)))
        normed = _layer_norm(writer, x, width)
        inner = _gelu(writer, writer.dense(normed, width, 4 * width, gain=math.sqrt(2.0)))
        x = writer.op("Add", x, writer.dense(inner, 4 * width, width))
    writer.output(x, "output", (1, sequence, width))
    return writer.finish()


def _layer_norm(writer: GraphWriter, x: str, width: int) -> str:
    scale = writer.uniform(width, 0.6, 1.4, "scale")
    shift = writer.uniform(width, -0.3, 0.3, "shift")
    return writer.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=1e-5)


def _attention(writer: GraphWriter, x: str, mask: str, sizes: tuple[int, int, int]) -> str:
    sequence, width, heads = sizes
    split = (1, sequence, heads, width // heads)

    def heads_of(order: tuple[int, ...]) -> str:
        projected = writer.dense(x, width, width)
        shaped = writer.op("Reshape", projected, writer.integers(split, "shape"))
        return writer.op("Transpose", shaped, perm=list(order))

    query, key, value = heads_of((0, 2, 1, 3)), heads_of((0, 2, 3, 1)), heads_of((0, 2, 1, 3))
    scores = writer.op("Div", writer.op("MatMul", query, key), writer.scalar(math.sqrt(width // heads), "root"))
    weights = writer.op("Softmax", writer.op("Add", scores, mask), axis=-1)
    mixed = writer.op("Transpose", writer.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    joined = writer.op("Reshape", mixed, writer.integers((1, sequence, width), "shape"))
    return writer.dense(joined, width, width)


def _gelu(writer: GraphWriter, x: str) -> str:
    error = writer.op("Erf", writer.op("Div", x, writer.scalar(math.sqrt(2.0), "root")))
    scaled = writer.op("Mul", x, writer.op("Add", error, writer.scalar(1.0, "one")))
    return writer.op("Mul", scaled, writer.scalar(0.5, "half"))
