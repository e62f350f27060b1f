"""Defines operators of the domain com.microsoft by nodes of the ONNX standard with the same meaning.

ONNX Runtime's quantizers, exporters and optimizers write these operators, and its documentation defines them. Those of
quantized models compute exactly in integers up to one rounding at the end. ONNX Runtime's kernels may round one step
earlier or later.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from korch.errors import ModelError, UnsupportedError
from korch.frontend.attributes import ROUNDED_BLOCK
from korch.frontend.cached import CACHED, padding
from korch.frontend.definition import Definition
from korch.frontend.fused import FUSED
from korch.frontend.names import first_output
from korch.primitive.constant_memo import once_per_array
from korch.primitive.op import Array

DOMAIN = "com.microsoft"

UNDECLARED = ("SimplifiedLayerNormalization",)
"""The operators that ONNX Runtime declares in the domain of the standard, which does not have them."""

IN_BYTES = 4
"""The `accuracy_level` of a node whose data may be rounded to bytes, with a scale for each block of terms."""

OLDEST_OPSET = 13
"""The first opset whose DequantizeLinear has an axis."""


def _binary(op_type: str) -> Callable[[Definition], None]:
    def define(d: Definition) -> None:
        d.finish(d.op(op_type, d.real(0), d.real(3)), 6, d.needed(0, "an operand"))

    return define


def _unary(op_type: str, **defaults: float) -> Callable[[Definition], None]:
    def define(d: Definition) -> None:
        attributes: dict[str, Any] = {name: d.attributes.number(name, value) for name, value in defaults.items()}
        d.finish(d.op(op_type, d.real(0), **attributes), 3, d.needed(0, "the data"))

    return define


def _global_average_pool(d: Definition) -> None:
    x = d.real(0)
    rank = len(d.shape(d.node.input[0]))
    if not d.attributes.get("channels_last", 0):
        d.finish(d.op("GlobalAveragePool", x), 3, d.node.input[0])
        return
    first = d.op("GlobalAveragePool", d.op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)]))
    d.finish(d.op("Transpose", first, perm=[0, *range(2, rank), 1]), 3, d.node.input[0])


def _concat(d: Definition) -> None:
    if "axis" not in d.attributes:
        raise ModelError("its attribute axis is missing", where=d.where)
    parts = [d.real(at, "a part") for at in range(2, len(d.node.input), 3)]
    d.finish(d.op("Concat", *parts, axis=d.attributes.integer("axis")), 0, d.needed(2, "a part"))


def _gemm(d: Definition) -> None:
    """Y = alpha*sa*sb*(sums + C), quantized if a scale is given."""
    a, b = d.needed(0, "the data"), d.needed(3, "the weights")
    if d.attributes.get("transA", 0):
        d.node.input[0] = d.op("Transpose", a, perm=[1, 0])
    if d.attributes.get("transB", 0):
        b = d.op("Transpose", b, perm=[1, 0])
    total = d.sums(0, b, (d.optional(2), d.optional(5)))
    if d.optional(6):
        total = d.op("Add", total, d.optional(6))
    alpha = d.constant(np.asarray(d.attributes.number("alpha", 1.0), np.float32))
    scale_a, scale_b = d.needed(1, "the scale of the data"), d.needed(4, "the scale of the weights")
    real = d.scaled(total, scale_a, scale_b, alpha)
    if d.optional(7):
        d.finish(real, 7, a)
    else:
        d.end(real)


def _dynamic_matmul(d: Definition) -> None:
    x = d.needed(0, "the data")
    out = first_output(d.node)
    names = [f"{out}/{name}" for name in ("bytes", "scale", "zero")]
    d.nodes.append(onnx.helper.make_node("DynamicQuantizeLinear", [x], names, name=names[0]))
    d.node.input[0] = names[0]
    total = d.sums(0, d.needed(1, "the weights"), (names[2], d.optional(3)))
    d.end(d.scaled(total, names[1], d.needed(2, "the scale of the weights")), d.optional(4))


def _matmul_to_float(d: Definition) -> None:
    total = d.sums(0, d.needed(1, "the weights"), (d.optional(4), d.optional(5)))
    scale_a, scale_b = d.needed(2, "the scale of the data"), d.needed(3, "the scale of the weights")
    d.end(d.scaled(total, scale_a, scale_b), d.optional(6))


@once_per_array
def _unpacked(array: Array, bits: int, count: int) -> Array:
    """Return `count` integers that are packed into bytes along the last axis, the lowest bits first."""
    single = array[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)
    return single.reshape(*array.shape[:-1], -1)[..., :count]


def _matmul_of_bits(d: Definition) -> None:
    """Y = A W' + bias, where W[n, k] = (q[n, k] - zero[n, k / block])*scale[n, k / block]."""
    k, n, block, bits = d.count("K"), d.count("N"), d.count("block_size"), d.count("bits", 4)
    if bits not in (2, 4, 8):
        raise UnsupportedError(f"its weights have {bits} bits", where=d.where, expected="2, 4 or 8")
    if d.optional(4):
        raise UnsupportedError(
            "its weights are in groups of any order (g_idx)", d.where, hint="Quantize the model without g_idx"
        )
    blocks = -(-k // block)
    packed, scales = d.known(1, "the weights"), d.known(2, "the scales")
    size_bytes = -(-block * bits // 8)
    if packed.dtype != np.uint8 or packed.size != n * blocks * size_bytes or scales.size != n * blocks:
        raise ModelError(
            f"its weights have the shape {list(packed.shape)} and its scales {list(scales.shape)}",
            where=d.where,
            expected=f"bytes of the shape [{n}, {blocks}, {size_bytes}] and {n * blocks} scales",
        )
    q = _unpacked(packed.reshape(n * blocks, size_bytes), bits, block)
    scale = d.constant(scales.reshape(-1).astype(np.float32))
    zero = d.known(3, "the zero points") if d.optional(3) else None
    count = n * -(-blocks * bits // 8) if zero is not None and zero.dtype == np.uint8 else n * blocks
    if zero is not None and zero.size != count:
        raise ModelError(
            f"its zero points have the shape {list(zero.shape)} and the type {zero.dtype}",
            where=d.where,
            expected=f"{count} elements",
        )
    if zero is None or zero.dtype == np.uint8:
        points = np.full(n * blocks, 1 << (bits - 1), np.uint8)
        if zero is not None:
            points = _unpacked(zero.reshape(n, -1), bits, blocks).reshape(-1)
        w = d.op("DequantizeLinear", d.constant(q), scale, d.constant(points), axis=0)
    else:
        column = zero.reshape(-1, 1).astype(np.float32)
        w = d.constant((q.astype(np.float32) - column) * scales.reshape(-1, 1).astype(np.float32))
    w = d.op("Reshape", w, d.constant(np.array([n, blocks * block])))
    if blocks * block > k:
        ends = [d.constant(np.array([value])) for value in (0, k, 1)]
        w = d.op("Slice", w, *ends)
    a, w = d.needed(0, "the data"), d.op("Transpose", w, perm=[1, 0])
    y = d.op("MatMul", d.widened(a), w)
    if d.attributes.get("accuracy_level", 0) == IN_BYTES:
        d.nodes[-1].metadata_props.add(key=ROUNDED_BLOCK, value=str(block))
    y = d.narrowed(y)
    d.end(y, d.optional(5))


def _attention(d: Definition) -> None:
    """Softmax(Q K' / sqrt(size) + mask) V per head, where one product of integers gives Q, K and V."""
    if d.optional(8) or len([name for name in d.node.output if name]) > 1:
        raise UnsupportedError(
            "it has an input of past states or an output of present states",
            d.where,
            hint="Export the model without a cache of past states",
        )
    shapes = d.shape(d.needed(0, "the data")), d.shape(d.needed(1, "the weights"))
    heads = d.count("num_heads")
    if [len(shape) for shape in shapes] != [3, 2] or shapes[1][1] % (3 * heads):
        raise ModelError(
            f"its data has the shape {list(shapes[0])} and its weights {list(shapes[1])}",
            where=d.where,
            expected=f"3 axes, and 2 axes of which the last is a multiple of {3 * heads} (3 for each of {heads} heads)",
        )
    (batch, length, _), width = shapes[0], shapes[1][1] // 3
    total = d.sums(0, d.node.input[1], (d.optional(6), d.optional(7)))
    real = d.scaled(total, d.needed(3, "the scale of the data"), d.needed(4, "the scale of the weights"))
    joined = d.op("Add", real, d.needed(2, "the bias"))
    shape = d.constant(np.array([batch, length, 3, heads, width // heads]))
    split = d.op("Transpose", d.op("Reshape", joined, shape), perm=[2, 0, 3, 1, 4])
    q, k, v = (d.op("Gather", split, d.constant(np.array(i)), axis=0) for i in range(3))
    scale = float(d.attributes.number("scale", 0) or 1 / np.sqrt(width // heads))
    scores = d.op("MatMul", q, d.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = d.op("Mul", scores, d.constant(np.asarray(scale, np.float32)))
    lowest = np.float32(d.attributes.number("mask_filter_value", -10000.0))
    for is_kept in padding(d, d.optional(5), batch, length):
        scores = d.op("Add", scores, d.op("Where", is_kept, d.number(0.0), d.constant(np.array(lowest))))
    if d.attributes.get("unidirectional", 0):
        later = np.triu(np.full((length, length), lowest, np.float32), 1)
        scores = d.op("Add", scores, d.constant(later))
    summed = d.op("MatMul", d.op("Softmax", scores, axis=-1), v)
    shape = d.constant(np.array([batch, length, width]))
    d.end(d.op("Reshape", d.op("Transpose", summed, perm=[0, 2, 1, 3]), shape))


DEFINITIONS: Mapping[str, Callable[[Definition], None]] = {
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "MatMulIntegerToFloat": _matmul_to_float,
    "MatMulNBits": _matmul_of_bits,
    "QAttention": _attention,
    "QGemm": _gemm,
    "QLinearAdd": _binary("Add"),
    "QLinearConcat": _concat,
    "QLinearGlobalAveragePool": _global_average_pool,
    "QLinearLeakyRelu": _unary("LeakyRelu", alpha=0.01),
    "QLinearMul": _binary("Mul"),
    "QLinearSigmoid": _unary("Sigmoid"),
    **CACHED,
    **FUSED,
}


def define_contributed(d: Definition) -> bool:
    """Define a node of the domain com.microsoft; return whether there is a definition here.

    Raises:
        ModelError: an input is missing, or has another size than the attributes say.
        UnsupportedError: it uses a feature of the operator that has no definition here.
    """
    domain, op_type = d.node.domain, d.node.op_type
    is_own = (domain == DOMAIN and DOMAIN in d.opsets) or (op_type in UNDECLARED and not domain)
    define = DEFINITIONS.get(op_type) if is_own else None
    if define is None:
        return False
    if d.opset < OLDEST_OPSET:
        raise UnsupportedError(
            f"the model uses opset {d.opset}",
            where=d.where,
            expected=f"at least {OLDEST_OPSET} beside operators of the domain {DOMAIN!r}",
        )
    define(d)
    return True
