"""Linear operations: linear in each input; convolution and matrix product.

Convolutions and matrix products of signed or unsigned bytes have exact 32-bit sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from korch.primitive.op import A, Array, Attributes, Category, Op, Reference, require
from korch.primitive.ops.reduce import window_extent, windows
from korch.primitive.types import DType, ValueType

BYTES = (DType.I8, DType.U8)
"""Element types whose products are summed in 32 bits; the two operands may have different ones."""


@dataclass(frozen=True, slots=True)
class MatmulAttributes(Attributes):
    """What a product may round."""

    # the model allows that blocks of as many terms of the first operand are rounded to bytes; 0: it does not
    rounded_block: int = 0


@dataclass(frozen=True, slots=True)
class ConvAttributes(Attributes):
    """Strides, zero pads and dilations per spatial axis, and the number of channel groups."""

    strides: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1


def _infer_conv(inputs: Sequence[ValueType], attributes: ConvAttributes) -> ValueType:
    x, w = inputs
    spatial = x.rank - 2
    require(spatial >= 1, f"conv: argument 0 is {x}, not n, c and spatial axes")
    require(w.rank == x.rank, f"conv: argument 1 is {w}, argument 0 is {x}")
    of_bytes = x.dtype in BYTES and w.dtype in BYTES
    require(of_bytes or (w.dtype is x.dtype and x.dtype.is_float), f"conv: arguments are {x} and {w}")
    fields = (attributes.strides, attributes.pads_begin, attributes.pads_end, attributes.dilations)
    require(all(len(field) == spatial for field in fields), "conv: attributes differ in rank")
    positive = min((*attributes.strides, *attributes.dilations, attributes.groups)) >= 1
    require(positive, "conv: a stride, dilation or group count is not positive")
    require(
        x.shape[1] == w.shape[1] * attributes.groups,
        f"conv: argument 0 is {x}, argument 1 is {w} with {attributes.groups} groups",
    )
    require(w.shape[0] % attributes.groups == 0, f"conv: {w} has not {attributes.groups} groups")
    shape = [x.shape[0], w.shape[0]]
    for i in range(spatial):
        pads = attributes.pads_begin[i] + attributes.pads_end[i]
        count = windows(x.shape[2 + i], w.shape[2 + i], attributes.strides[i], pads, attributes.dilations[i])
        require(count >= 1, f"conv: the window of {w} is larger than axis {2 + i} of {x}")
        shape.append(count)
    return ValueType(tuple(shape), _sum_type(x))


def _sum_type(x: ValueType) -> DType:
    return DType.I32 if x.dtype in BYTES else x.dtype


def _infer_matmul(inputs: Sequence[ValueType], attributes: Attributes) -> ValueType:
    a, b = inputs
    require(a.rank >= 2 and a.rank == b.rank, f"matmul: arguments are {a} and {b}")
    of_bytes = a.dtype in BYTES and b.dtype in BYTES
    require(of_bytes or a.dtype is b.dtype, f"matmul: arguments are {a} and {b}")
    require(a.shape[-1] == b.shape[-2], f"matmul: arguments are {a} and {b}")
    batch = []
    for n, m in zip(a.shape[:-2], b.shape[:-2], strict=True):
        require(n == m or 1 in (n, m), f"matmul: the batches of {a} and {b} differ")
        batch.append(m if n == 1 else n)
    return ValueType((*batch, a.shape[-2], b.shape[-1]), _sum_type(a))


def _conv_flop(inputs: Sequence[ValueType], attributes: ConvAttributes, output: ValueType) -> int:
    # Taps in the pads are not counted: the lower bound must also hold for kernels that skip them.
    x, w = inputs
    return 2 * output.shape[0] * output.shape[1] * w.shape[1] * _taps(x, w, output, attributes)


def _taps(image: ValueType, w: ValueType, positions: ValueType, attributes: ConvAttributes) -> int:
    """Return how many taps, over all positions of a channel, fall into the image."""
    windows = zip(attributes.strides, attributes.pads_begin, attributes.dilations, strict=True)
    sizes = zip(image.shape[2:], w.shape[2:], positions.shape[2:], strict=True)
    return math.prod(_inner_taps(*size, *window) for size, window in zip(sizes, windows, strict=True))


def _inner_taps(size: int, kernel: int, count: int, stride: int, pad: int, dilation: int) -> int:
    total = 0
    for tap in range(kernel):
        offset = tap * dilation - pad
        first = max(0, -(offset // stride))
        last = min(count - 1, (size - 1 - offset) // stride)
        total += max(0, last - first + 1)
    return total


def matmul_flop(inputs: Sequence[ValueType], attributes: Attributes, output: ValueType) -> int:
    """Return the floating-point operations of a matrix product: two per term of each output element."""
    return 2 * output.size * inputs[0].shape[-1]


COLUMN_ELEMENTS = 1 << 20
"""The elements of windows that are copied at a time: with fewer, weights are read from memory more often."""


def _inner(spatial: tuple[slice, ...] | tuple[int, ...]) -> tuple[slice | int, ...]:
    """Return an index of all images and channels at `spatial`."""
    return (slice(None), slice(None), *spatial)


def _conv(inputs: Sequence[Array], attributes: ConvAttributes) -> Array:
    """Copy the windows of some rows at a time to the columns of a matrix, and compute one matrix product per group."""
    if _are_bytes(inputs):
        return _sums_of_bytes(_conv, inputs, attributes)
    x, w = inputs
    spatial, groups, dilations = x.ndim - 2, attributes.groups, attributes.dilations
    padded = np.pad(x, [(0, 0), (0, 0), *zip(attributes.pads_begin, attributes.pads_end, strict=True)])
    extents = tuple(map(window_extent, w.shape[2:], dilations))
    taken = sliding_window_view(padded, extents, axis=tuple(range(2, x.ndim)))
    taken = taken[_inner(tuple(slice(None, None, step) for step in (*attributes.strides, *dilations)))]
    taken = np.moveaxis(taken, range(2, x.ndim), range(-spatial, 0))  # the positions last
    terms, per_group = math.prod(w.shape[1:]), w.shape[0] // groups
    n, sizes = x.shape[0], taken.shape[-spatial:]
    out = np.empty((n, groups, per_group, *sizes), x.dtype)
    weights = w.reshape(groups, per_group, terms)
    rows = max(1, COLUMN_ELEMENTS // max(1, groups * terms * math.prod(sizes[1:])))
    for first in range(0, sizes[0], rows):
        some = np.moveaxis(np.moveaxis(taken, -spatial, 0)[first : first + rows], 0, -spatial)
        shape = some.shape[-spatial:]
        columns = some.reshape(n, groups, terms, math.prod(shape))
        with np.errstate(all="ignore"):
            out[:, :, :, first : first + rows] = (weights @ columns).reshape(n, groups, per_group, *shape)
    return out.reshape(n, w.shape[0], *sizes)


def _are_bytes(inputs: Sequence[Array]) -> bool:
    return all(x.dtype in (np.int8, np.uint8) for x in inputs)


def _sums_of_bytes(reference: Reference[A], inputs: Sequence[Array], attributes: A) -> Array:
    """Return sums of products of bytes as 32-bit integers; float64 computes them exactly."""
    wide = reference([x.astype(np.float64) for x in inputs], attributes)
    return wide.astype(np.int64).astype(np.int32)


def _matmul(inputs: Sequence[Array], attributes: Attributes) -> Array:
    if _are_bytes(inputs):
        return _sums_of_bytes(_matmul, inputs, attributes)
    with np.errstate(all="ignore"):
        return np.asarray(np.matmul(inputs[0], inputs[1]))


ROWS: tuple[Op, ...] = (
    Op(
        name="conv",
        category=Category.LINEAR,
        arity=2,
        attributes=ConvAttributes,
        infer=_infer_conv,
        reference=_conv,
        work_flop=_conv_flop,
        source="ONNX Conv-22, without the bias",
    ),
    Op(
        name="matmul",
        category=Category.LINEAR,
        arity=2,
        attributes=MatmulAttributes,
        infer=_infer_matmul,
        reference=_matmul,
        work_flop=matmul_flop,
        source="numpy.matmul; batch axes of size 1 broadcast",
    ),
)
