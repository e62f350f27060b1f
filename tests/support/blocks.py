"""The blocks of Mirage's evaluation and other groups as primitive graphs of any size; all tensors are inputs.

Source: Wu et al., OSDI 2025, table 4: attention with grouped queries, the same with normalized
queries and keys, RMSNorm with a product, LoRA, a gated MLP, and a normalized transformer's update.
"""

from collections.abc import Callable, Mapping

import numpy as np

from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType

EPSILON = 1e-5


class Block(GraphBuilder):
    """A graph builder with the steps of the blocks; reductions are along the last axis."""

    def tensor(self, name: str, *shape: int) -> int:
        """Return an input of float32."""
        return self.input(name, ValueType(shape, DType.F32))

    def wide(self, value: int, like: int) -> int:
        """Return a value broadcast to another's shape."""
        return self.add("broadcast", (value,), BroadcastAttributes(self.type(like).shape))

    def number(self, number: float, like: int) -> int:
        """Return a constant with the shape of another value, filled with a number."""
        return self.constant(np.broadcast_to(np.float32(number), self.type(like).shape))

    def along(self, kind: str, x: int) -> int:
        """Return a reduction of the last axis."""
        return self.add(f"reduce_{kind}", (x,), ReduceAttributes((self.type(x).rank - 1,)))

    def root_mean_square(self, x: int) -> int:
        """Return the root of the mean of squares along the last axis, which keeps size 1."""
        total = self.along("sum", self.add("mul", (x, x)))
        mean = self.add("div", (total, self.number(self.type(x).shape[-1], total)))
        return self.add("sqrt", (self.add("add", (mean, self.number(EPSILON, mean))),))

    def normalized(self, x: int) -> int:
        """Return x divided by the root of its mean square."""
        return self.add("div", (x, self.wide(self.root_mean_square(x), x)))

    def softmax(self, x: int) -> int:
        """Return the softmax along the last axis."""
        power = self.add("exp", (self.add("sub", (x, self.wide(self.along("max", x), x))),))
        return self.add("div", (power, self.wide(self.along("sum", power), power)))

    def turned(self, x: int) -> int:
        """Return x with its last two axes swapped."""
        rank = self.type(x).rank
        return self.add("transpose", (x,), TransposeAttributes((*range(rank - 2), rank - 1, rank - 2)))

    def result(self, value: int) -> PrimitiveGraph:
        """Return the graph with one output."""
        self.output("y", value)
        return self.freeze()


def rms_norm_product(m: int = 4, k: int = 8, n: int = 8) -> PrimitiveGraph:
    """Return x / rms(x) * g @ w."""
    b = Block()
    x, g, w = b.tensor("x", m, k), b.tensor("g", 1, k), b.tensor("w", k, n)
    return b.result(b.add("matmul", (b.add("mul", (b.normalized(x), b.wide(g, x))), w)))


def gated_mlp(m: int = 4, k: int = 8, n: int = 8) -> PrimitiveGraph:
    """Return silu(x @ w) * (x @ v)."""
    b = Block()
    x, w, v = b.tensor("x", m, k), b.tensor("w", k, n), b.tensor("v", k, n)
    gate = b.add("matmul", (x, w))
    return b.result(b.add("mul", (b.add("mul", (gate, b.add("sigmoid", (gate,)))), b.add("matmul", (x, v)))))


def lora(m: int = 4, k: int = 8, n: int = 8, rank: int = 2) -> PrimitiveGraph:
    """Return x @ w + x @ a @ b."""
    b = Block()
    x, w, down, up = b.tensor("x", m, k), b.tensor("w", k, n), b.tensor("a", k, rank), b.tensor("b", rank, n)
    low = b.add("matmul", (b.add("matmul", (x, down)), up))
    return b.result(b.add("add", (b.add("matmul", (x, w)), low)))


def attention(
    heads: int = 2, m: int = 4, n: int = 8, d: int = 4, e: int = 4, *, is_normalized: bool = False
) -> PrimitiveGraph:
    """Return softmax(q k' / sqrt(d)) v; `is_normalized` first divides queries and keys by their root mean square.

    With grouped queries, m is the number of queries times the number of heads that share keys.
    """
    b = Block()
    q, k, v = b.tensor("q", heads, m, d), b.tensor("k", heads, n, d), b.tensor("v", heads, n, e)
    if is_normalized:
        q, k = b.normalized(q), b.normalized(k)
    scores = b.add("matmul", (q, b.turned(k)))
    scaled = b.add("mul", (scores, b.number(d**-0.5, scores)))
    return b.result(b.add("matmul", (b.softmax(scaled), v)))


def query_key_norm(heads: int = 2, m: int = 4, n: int = 8, d: int = 4, e: int = 4) -> PrimitiveGraph:
    """Return attention with normalized queries and keys."""
    return attention(heads, m, n, d, e, is_normalized=True)


def normalized_update(m: int = 4, k: int = 8) -> PrimitiveGraph:
    """Return norm(x + alpha * (norm(h) - x)), the update of a normalized transformer."""
    b = Block()
    x, h, alpha = b.tensor("x", m, k), b.tensor("h", m, k), b.tensor("alpha", 1, k)
    step = b.add("mul", (b.wide(alpha, x), b.add("sub", (b.normalized(h), x))))
    return b.result(b.normalized(b.add("add", (x, step))))


BLOCKS: Mapping[str, Callable[..., PrimitiveGraph]] = {
    "attention": attention,
    "query-key-norm": query_key_norm,
    "rms-norm-product": rms_norm_product,
    "lora": lora,
    "gated-mlp": gated_mlp,
    "normalized-update": normalized_update,
}


def scores(m: int = 4, k: int = 6, n: int = 5) -> PrimitiveGraph:
    """Return the softmax over classes of a product."""
    b = Block()
    return b.result(b.softmax(b.add("matmul", (b.tensor("x", m, k), b.tensor("w", k, n)))))


def linear_attention(heads: int = 2, m: int = 5, n: int = 6, d: int = 3, e: int = 4) -> PrimitiveGraph:
    """Return exp(q) (exp(k)' v)."""
    b = Block()
    q, k, v = b.tensor("q", heads, m, d), b.tensor("k", heads, n, d), b.tensor("v", heads, n, e)
    mixed = b.add("matmul", (b.turned(b.add("exp", (k,))), v))
    return b.result(b.add("matmul", (b.add("exp", (q,)), mixed)))


def squeeze_and_excite(channels: int = 6, height: int = 4, width: int = 5, hidden: int = 3) -> PrimitiveGraph:
    """Return an image times a gate for each channel; the gates are computed from the means of all channels."""
    b = Block()
    x, w = b.tensor("x", channels, height, width), b.tensor("w", channels, hidden)
    v = b.tensor("v", hidden, channels)
    mean = b.add("reduce_sum", (x,), ReduceAttributes((1, 2)))
    mean = b.add("div", (mean, b.number(float(height * width), mean)))
    inner = b.add("matmul", (b.add("reshape", (mean,), ReshapeAttributes((1, channels))), w))
    inner = b.add("max", (inner, b.number(0.0, inner)))
    gate = b.add("sigmoid", (b.add("matmul", (inner, v)),))
    wide = b.wide(b.add("reshape", (gate,), ReshapeAttributes((channels, 1, 1))), x)
    return b.result(b.add("mul", (x, wide)))


GROUPS: Mapping[str, Callable[..., PrimitiveGraph]] = {
    **BLOCKS,
    "short-query": lambda: attention(2, 1, 9),
    "scores": scores,
    "linear-attention": linear_attention,
    "squeeze-and-excite": squeeze_and_excite,
}
"""All groups for which programs are searched."""
