"""Language models that read and return a cache of keys and values, in the form of optimum's and PyTorch's exports.

    model = build_decoder("qwen3-0.6b", dtype="int4")
    save(model, Path("model.onnx"))

Inputs are input_ids int64[batch, seq], attention_mask int64[batch, past + seq], position_ids int64[batch, seq], and for
each layer N past_key_values.N.key and .value [batch, groups, past, head size]. Outputs are the logits, and the keys
and values with the new rows: present.N.key and .value. Weights are random, from a seed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from benchmarks.models.writer import GraphWriter
from korch.errors import OptionError

Weights = NDArray[np.float32]
Size = int | str

EPSILON = 1e-6
BLOCK = 32
"""Weights with one scale."""


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder of Llama's form."""

    layers: int
    hidden: int  # features of a token
    heads: int
    groups: int  # heads of keys and values; each belongs to heads / groups heads of queries
    head: int  # features of a head
    wide: int  # features between the products of the gated feed-forward
    vocabulary: int
    theta: float = 10000.0  # the base of the rotary frequencies
    has_bias: bool = False  # whether the products that make queries, keys and values add a bias (Qwen2)
    has_norms: bool = False  # whether each head of queries and keys is normalized (Qwen3)
    is_tied: bool = False  # whether the last product uses the embeddings


DECODERS: Mapping[str, DecoderSizes] = {
    "tiny": DecoderSizes(2, 64, 4, 2, 16, 160, 256, has_bias=True),
    "tiny-qwen3": DecoderSizes(2, 64, 4, 2, 32, 160, 256, has_norms=True, is_tied=True),
    "tiny-one-layer": DecoderSizes(1, 64, 4, 2, 32, 160, 256, has_norms=True, is_tied=True),
    "tiny-llama": DecoderSizes(2, 64, 4, 2, 32, 160, 256),
    "small": DecoderSizes(4, 896, 14, 2, 64, 4864, 32000, 1e6, has_bias=True),
    "qwen3-0.6b": DecoderSizes(28, 1024, 16, 8, 128, 3072, 151936, 1e6, has_norms=True, is_tied=True),
    "llama-3.2-1b": DecoderSizes(16, 2048, 32, 8, 64, 8192, 128256, 5e5, is_tied=True),
}

FLOATS: Mapping[str, tuple[int, type[np.generic]]] = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}
BITS = {"int8": 8, "int4": 4, "int8-rounded": 8, "int4-rounded": 4}
ROUNDED = "-rounded"
"""The end of the names of types whose products may round their data to bytes (`accuracy_level` 4)."""

DTYPES = (*FLOATS, *BITS)


def build_decoder(
    sizes: str = "small",
    dtype: str = "float32",
    *,
    batch: Size = "batch",
    seq: Size = "seq",
    past: Size = "past",
    is_last: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """Build a decoder.

    Args:
        sizes: a key of `DECODERS`.
        dtype: the type of weights. The activations have it, too, but are float32 beside "int8" and "int4", whose
            weights have scales for blocks of 32 (`MatMulNBits`).
        batch: sequences, or the name of this dimension.
        seq: new tokens, or the name of this dimension.
        past: rows of the cache that is read, or the name of this dimension.
        is_last: whether to return the logits of the last token only.
        seed: seed of the random weights.

    Raises:
        OptionError: there are no such sizes, or no such type.
    """
    for name, value, known in (("sizes", sizes, tuple(DECODERS)), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise OptionError(f"there is no decoder with {name} {value!r}", f"decoder: {name}", ", ".join(known))
    return _DecoderWriter(DECODERS[sizes], dtype, (batch, seq, past), seed).build(is_last)


def quantized(weights: Weights, bits: int) -> tuple[NDArray[np.uint8], Weights]:
    """Return weights [n, k] as unsigned integers [n, k / 32, 32] and the scale of each block as [n, k / 32, 1].

    A weight is scale * (integer - 2^(bits - 1)). Scales are numbers of float16, which is how GGUF files store them.
    """
    blocks = weights.reshape(len(weights), -1, BLOCK)
    middle = 1 << (bits - 1)
    scales = (np.abs(blocks).max(-1, keepdims=True) / (middle - 1)).astype(np.float16).astype(np.float32)
    numbers = np.clip(np.rint(blocks / scales) + middle, 0, 2 * middle - 1)
    return numbers.astype(np.uint8), scales


def random_weights(at: DecoderSizes, seed: int) -> dict[str, Weights]:
    """Return all weights by their names in GGUF files; matrices are [features out, features in]."""
    rng = np.random.default_rng(seed)
    shapes = {"attn_q": (at.heads * at.head, at.hidden), "attn_k": (at.groups * at.head, at.hidden)}
    shapes |= {"attn_v": shapes["attn_k"], "attn_output": shapes["attn_q"][::-1]}
    shapes |= {"ffn_gate": (at.wide, at.hidden), "ffn_up": (at.wide, at.hidden), "ffn_down": (at.hidden, at.wide)}
    found: dict[str, Weights] = {}

    def matrix(name: str, shape: tuple[int, int], deviation: float) -> None:
        found[f"{name}.weight"] = rng.standard_normal(shape, np.float32) * np.float32(deviation)

    def vector(name: str, size: int, low: float, high: float) -> None:
        found[name] = rng.uniform(low, high, size).astype(np.float32)

    matrix("token_embd", (at.vocabulary, at.hidden), 1.0 / math.sqrt(at.hidden) if at.is_tied else 1.0)
    for layer in range(at.layers):
        for name, shape in shapes.items():
            matrix(f"blk.{layer}.{name}", shape, 1.0 / math.sqrt(shape[1]))
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{layer}.{name}.weight", at.hidden, 0.6, 1.4)
        for name in ("attn_q_norm", "attn_k_norm") if at.has_norms else ():
            vector(f"blk.{layer}.{name}.weight", at.head, 0.6, 1.4)
        for name in ("attn_q", "attn_k", "attn_v") if at.has_bias else ():
            vector(f"blk.{layer}.{name}.bias", shapes[name][0], -0.1, 0.1)
    vector("output_norm.weight", at.hidden, 0.6, 1.4)
    if not at.is_tied:
        matrix("output", (at.vocabulary, at.hidden), 1.0 / math.sqrt(at.hidden))
    return found


class _DecoderWriter(GraphWriter):
    """Writes the layers of one decoder."""

    def __init__(self, sizes: DecoderSizes, dtype: str, axes: tuple[Size, Size, Size], seed: int) -> None:
        super().__init__("decoder", seed)
        self.sizes, self.axes, self.bits = sizes, axes, BITS.get(dtype)
        self.is_rounded = dtype.endswith(ROUNDED)
        self.type, self.numpy = FLOATS.get(dtype, FLOATS["float32"])
        self.weights = random_weights(sizes, seed)

    def build(self, is_last: bool) -> onnx.ModelProto:
        """Write all layers."""
        at, (batch, seq, past) = self.sizes, self.axes
        total = past + seq if isinstance(past, int) and isinstance(seq, int) else f"{past} + {seq}"
        tokens = self.input("input_ids", (batch, seq), TensorProto.INT64)
        mask = self.input("attention_mask", (batch, total), TensorProto.INT64)
        positions = self.input("position_ids", (batch, seq), TensorProto.INT64)
        cache = [
            [self.input(f"past_key_values.{n}.{kind}", (batch, at.groups, past, at.head), self.type) for kind in _KINDS]
            for n in range(at.layers)
        ]
        embeddings = self.constant(self.weights["token_embd.weight"].astype(self.numpy), "embeddings")
        x = self.op("Gather", embeddings, tokens)
        allowed, turns = self.allowed(tokens, mask, cache[0][0]), self.turns(positions)
        for n, pair in enumerate(cache):
            mixed, present = self.attention(f"blk.{n}", self.norm(x, f"blk.{n}.attn_norm"), pair, allowed, turns)
            x = self.op("Add", x, mixed)
            x = self.op("Add", x, self.feed_forward(f"blk.{n}", self.norm(x, f"blk.{n}.ffn_norm")))
            for kind, value in zip(_KINDS, present, strict=True):
                self.output(value, f"present.{n}.{kind}", (batch, at.groups, total, at.head), self.type)
        if is_last:
            x = self.slice(x, 1, -1, np.iinfo(np.int64).max)
        last = self.norm(x, "output_norm")
        if not at.is_tied:
            logits = self.linear(last, "output")
        elif self.bits:
            logits = self.linear(last, "token_embd")
        else:
            logits = self.op("MatMul", last, self.op("Transpose", embeddings, perm=[1, 0]))
        self.output(logits, "logits", (batch, 1 if is_last else seq, at.vocabulary), self.type)
        return self.finish(*["com.microsoft"] * bool(self.bits))

    def linear(self, x: str, name: str) -> str:
        """Append a product by weights, and their bias if there is one."""
        weights, bias = self.weights.pop(f"{name}.weight"), self.weights.get(f"{name}.bias")
        if self.bits:
            numbers, scales = quantized(weights, self.bits)
            packed = numbers if self.bits == 8 else numbers[..., ::2] | numbers[..., 1::2] << 4
            operands = [self.constant(packed, "weight"), self.constant(scales.reshape(-1), "scales")]
            (n, k), options = weights.shape, {"bits": self.bits, "block_size": BLOCK}
            options |= {"accuracy_level": 4} if self.is_rounded else {}
            y = self.op("MatMulNBits", x, *operands, domain="com.microsoft", K=k, N=n, **options)
        else:
            y = self.op("MatMul", x, self.constant(weights.T.astype(self.numpy), "weight"))
        return y if bias is None else self.op("Add", self.constant(bias.astype(self.numpy), "bias"), y)

    def wide(self, x: str) -> str:
        """Append a conversion to float32, if there has to be one."""
        return x if self.type == TensorProto.FLOAT else self.op("Cast", x, to=TensorProto.FLOAT)

    def narrow(self, x: str) -> str:
        """Append a conversion from float32, if there has to be one."""
        return x if self.type == TensorProto.FLOAT else self.op("Cast", x, to=self.type)

    def norm(self, x: str, name: str) -> str:
        """Append an RMSNorm of the last axis in float32."""
        wide = self.wide(x)
        mean = self.op("ReduceMean", self.op("Pow", wide, self.scalar(2.0, "two")), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.scalar(EPSILON, "epsilon")))
        scaled = self.op("Mul", wide, self.op("Div", self.scalar(1.0, "one"), root))
        scale = self.weights[f"{name}.weight"].astype(self.numpy)
        return self.op("Mul", self.constant(scale, "scale"), self.narrow(scaled))

    def size(self, x: str, axis: int) -> str:
        """Append the size of an axis as a scalar."""
        return self.op("Gather", self.op("Shape", x), self.constant(np.array(axis), "axis"), axis=0)

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Append axes of one element."""
        return self.op("Unsqueeze", x, self.integers(axes, "axes"))

    def allowed(self, tokens: str, mask: str, key: str) -> str:
        """Return what is added to scores: 0 for keys that a token may read, else the lowest number."""
        past = self.size(key, 2)
        total = self.op("Add", past, self.size(tokens, 1))
        one = self.constant(np.array(1), "one")
        rows = self.unsqueeze(self.op("Range", past, total, one), 1)
        columns = self.op("Range", self.constant(np.array(0), "zero"), total, one)
        causal = self.unsqueeze(self.op("LessOrEqual", self.unsqueeze(columns, 0), rows), 0, 1)
        is_token = self.unsqueeze(self.op("Cast", mask, to=TensorProto.BOOL), 1, 2)
        zero, lowest = (np.asarray(n, self.numpy) for n in (0.0, _lowest(self.numpy)))
        return self.op(
            "Where", self.op("And", causal, is_token), self.constant(zero, "zero"), self.constant(lowest, "lowest")
        )

    def turns(self, positions: str) -> tuple[str, str]:
        """Return cosines and sines [batch, 1, seq, head] of positions times frequencies."""
        at = self.sizes
        frequencies = at.theta ** (-np.arange(0, at.head, 2, dtype=np.float64) / at.head)
        column = self.constant(frequencies.astype(np.float32).reshape(1, -1, 1), "frequencies")
        row = self.op("Cast", self.unsqueeze(positions, 1), to=TensorProto.FLOAT)
        angles = self.op("Transpose", self.op("MatMul", column, row), perm=[0, 2, 1])
        both = self.op("Concat", angles, angles, axis=-1)
        cosine, sine = (self.unsqueeze(self.narrow(self.op(name, both)), 1) for name in ("Cos", "Sin"))
        return cosine, sine

    def rotated(self, x: str, turns: tuple[str, str]) -> str:
        """Append the rotation of pairs of features half a head apart."""
        half = self.sizes.head // 2
        first, second = self.slice(x, 3, 0, half), self.slice(x, 3, half, np.iinfo(np.int64).max)
        swapped = self.op("Concat", self.op("Neg", second), first, axis=-1)
        return self.op("Add", self.op("Mul", x, turns[0]), self.op("Mul", swapped, turns[1]))

    def heads_of(self, x: str, name: str, count: int) -> str:
        """Append a product, split into heads [batch, count, seq, head]."""
        y = self.reshape(self.linear(x, name), (0, 0, count, self.sizes.head))
        if f"{name}_norm.weight" in self.weights:
            y = self.norm(y, f"{name}_norm")
        return self.op("Transpose", y, perm=[0, 2, 1, 3])

    def repeated(self, x: str) -> str:
        """Append the repetition of keys or values for each head of queries."""
        at = self.sizes
        if at.heads == at.groups:
            return x
        shape = self.op("Shape", x)
        parts = [
            self.slice(shape, 0, 0, 2),
            self.integers((at.heads // at.groups,), "repeat"),
            self.slice(shape, 0, 2, 4),
        ]
        wide = self.op("Expand", self.unsqueeze(x, 2), self.op("Concat", *parts, axis=0))
        return self.reshape(wide, (0, at.heads, -1, at.head))

    def attention(
        self, layer: str, x: str, cache: list[str], allowed: str, turns: tuple[str, str]
    ) -> tuple[str, list[str]]:
        """Append attention; return its result, and the keys and values with the new rows."""
        at = self.sizes
        query = self.rotated(self.heads_of(x, f"{layer}.attn_q", at.heads), turns)
        key = self.rotated(self.heads_of(x, f"{layer}.attn_k", at.groups), turns)
        value = self.heads_of(x, f"{layer}.attn_v", at.groups)
        present = [self.op("Concat", old, new, axis=2) for old, new in zip(cache, (key, value), strict=True)]
        keys, values = map(self.repeated, present)
        scores = self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 3, 2]))
        factor = self.constant(np.asarray(1.0 / math.sqrt(at.head), self.numpy), "factor")
        masked = self.op("Add", self.op("Mul", scores, factor), allowed)
        shares = self.narrow(self.op("Softmax", self.wide(masked), axis=-1))
        mixed = self.op("Transpose", self.op("MatMul", shares, values), perm=[0, 2, 1, 3])
        joined = self.reshape(mixed, (0, 0, at.heads * at.head))
        return self.linear(joined, f"{layer}.attn_output"), present

    def feed_forward(self, layer: str, x: str) -> str:
        """Append the gated feed-forward: (SiLU(x G) * x U) D."""
        gate, up = self.linear(x, f"{layer}.ffn_gate"), self.linear(x, f"{layer}.ffn_up")
        gated = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        return self.linear(gated, f"{layer}.ffn_down")


_KINDS = ("key", "value")


def _lowest(dtype: type[np.generic]) -> float:
    return float(ml_dtypes.finfo(dtype).min)
