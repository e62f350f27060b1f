"""The matrix product by weights that are stored as integers of few bits, with one scale per block of terms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.op import Array, Attributes, Category, Op, require
from korch.primitive.ops.linear import matmul_flop
from korch.primitive.types import DType, ValueType

STORED = "matmul_stored"

BITS = (2, 4, 8)
"""The supported bit widths of stored integers."""

GROUP = 4
"""The bytes of a column that are adjacent for data that is rounded to bytes."""

MOST = 127
"""The largest byte to which data is rounded."""

LEAST = 1e-30
"""A block whose largest magnitude is smaller is rounded to zeros, so that the inverse of its scale is finite."""


@dataclass(frozen=True, slots=True)
class StoredAttributes(Attributes):
    """How weights are stored."""

    bits: int  # the bits of each integer. Adjacent terms of a column share a byte, the first one in the lowest bits.
    block: int  # the number of adjacent terms of a column with the same scale and zero point
    zero: int = 0  # the integer that represents 0, if zero points are not an input
    may_round: bool = False  # whether the model allows that the data is rounded to bytes
    # whether the data is rounded to bytes, with a scale for each block of terms. Four adjacent bytes of a column then
    # have the first four terms in their lowest bits, the next four in the next bits, and so on.
    is_rounded: bool = False

    @property
    def each(self) -> int:
        """The number of terms that share a byte."""
        return 8 // self.bits


def _infer(inputs: Sequence[ValueType], attributes: StoredAttributes) -> ValueType:
    require(len(inputs) in (3, 4), f"matmul_stored: there are {len(inputs)} arguments")
    a, q, scale = inputs[:3]
    require(attributes.bits in BITS, f"matmul_stored: integers have {attributes.bits} bits")
    require(a.rank >= 2 and a.dtype.is_float, f"matmul_stored: argument 0 is {a}")
    is_stored = q.rank == 2 and q.dtype in ((DType.I8, DType.U8) if attributes.bits == 8 else (DType.U8,))
    require(is_stored, f"matmul_stored: argument 1 is {q}")
    require(attributes.block >= 1, f"matmul_stored: blocks have {attributes.block} terms")
    blocks, n = -(-a.shape[-1] // attributes.block), q.shape[1]
    rows = -(-blocks * attributes.block // attributes.each)
    require(q.shape[0] == rows, f"matmul_stored: argument 1 is {q}, not of {rows} rows")
    is_known = not attributes.is_rounded or (can_round(attributes) and q.dtype is DType.U8)
    require(is_known, f"matmul_stored: blocks of {attributes.block} terms are no whole groups of four bytes, or signed")
    is_scale = scale.shape == (blocks, n) and scale.dtype in (a.dtype, DType.F16)
    require(is_scale, f"matmul_stored: argument 2 is {scale}")
    for zero in inputs[3:]:
        require(zero.shape == (blocks, n) and zero.dtype is q.dtype, f"matmul_stored: argument 3 is {zero}")
    return ValueType((*a.shape[:-1], n), a.dtype)


def can_round(attributes: StoredAttributes) -> bool:
    """Return whether blocks are whole groups of four bytes, so that rounded data can be multiplied by them."""
    return attributes.block % (GROUP * attributes.each) == 0


def rounded(a: Array, block: int) -> Array:
    """Return floats rounded to multiples of the largest magnitude of each block of the last axis, divided by 127.

    Blocks with an infinity or NaN become NaN.
    """
    terms = a.shape[-1]
    blocks = np.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, -terms % block)]).reshape(*a.shape[:-1], -1, block)
    with np.errstate(all="ignore"):
        most = np.abs(blocks).max(-1, keepdims=True, initial=0).astype(a.dtype)
        found = np.rint(blocks * (MOST / np.maximum(most, LEAST)).astype(a.dtype)) * (most * a.dtype.type(1 / MOST))
    found = np.where(np.isfinite(most), found, np.nan)
    return np.asarray(found.reshape(*a.shape[:-1], -1)[..., :terms].astype(a.dtype))


def unpacked(q: Array, attributes: StoredAttributes) -> Array:
    """Return integers that are packed into bytes along the first axis as one element each."""
    if attributes.bits == 8:
        return q
    adjacent = GROUP if attributes.is_rounded else 1
    shifts = np.arange(0, 8, attributes.bits, dtype=np.uint8)[None, :, None, None]
    single = q.reshape(-1, 1, adjacent, q.shape[1]) >> shifts & np.uint8((1 << attributes.bits) - 1)
    return np.asarray(single.reshape(-1, q.shape[1]))


def _reference(inputs: Sequence[Array], attributes: StoredAttributes) -> Array:
    a, q, scale = inputs[:3]
    a = rounded(a, attributes.block) if attributes.is_rounded else a
    zero = np.repeat(inputs[3], attributes.block, 0) if len(inputs) == 4 else np.asarray(attributes.zero)
    scales = np.repeat(scale.astype(a.dtype), attributes.block, 0)
    wide = unpacked(q, attributes)[: len(scales)].astype(a.dtype) - zero.astype(a.dtype)
    with np.errstate(all="ignore"):
        return np.asarray(np.matmul(a, (wide * scales)[: a.shape[-1]]))


ROWS: tuple[Op, ...] = (
    Op(
        name=STORED,
        category=Category.LINEAR,
        arity=None,
        attributes=StoredAttributes,
        infer=_infer,
        reference=_reference,
        work_flop=matmul_flop,
        source="com.microsoft MatMulNBits, with columns side by side",
    ),
)
