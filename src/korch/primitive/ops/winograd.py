"""Winograd convolution: a 3x3 convolution in a transformed space, with fewer multiplications.

Tiles of (m+2) x (m+2) inputs and the weights are transformed, multiplied elementwise, summed
over the channels, and transformed back into m x m outputs: Winograd's minimal filtering F(m x m,
3 x 3) as Lavin and Gray use it (CVPR 2016). The operand with the weights is already transformed.
Images of bytes have 16-bit weights and 32-bit sums, without any rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.op import Array, Attributes, Category, Op, require
from korch.primitive.ops.linear import BYTES
from korch.primitive.types import DType, ValueType


@dataclass(frozen=True, slots=True)
class WinogradAttributes(Attributes):
    """The outputs of a tile per axis, and the zero pads per spatial axis."""

    tile: int
    pads_begin: tuple[int, int]
    pads_end: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Transforms:
    """Y = A ((G g G') * (B d B')) A', for a tile d and weights g.

    Attributes:
        data: B, float64[m + 2, m + 2].
        weights: G, float64[m + 2, 3].
        output: A, float64[m, m + 2].
    """

    data: Array
    weights: Array
    output: Array


def _rows(*rows: Sequence[float]) -> Array:
    return np.array(rows, np.float64)


TRANSFORMS: dict[int, Transforms] = {
    2: Transforms(
        data=_rows((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        weights=_rows((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
        output=_rows((1, 1, 1, 0), (0, 1, -1, -1)),
    ),
    4: Transforms(
        data=_rows(
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        weights=_rows((6, 0, 0), (-4, -4, -4), (-4, 4, -4), (1, 2, 4), (1, -2, 4), (0, 0, 24)) / 24,
        output=_rows((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
    ),
}


TRANSFORM_FLOP = {2: (32, 24), 4: (228, 130)}
"""The operations that transform one tile of an input channel, and one tile of an output channel back, by m.

Along one axis these are 4 and 4 (m = 2), 19 and 13 (m = 4); a sum that two rows share is computed once.
"""


def transform_weights(weights: Array, tile: int) -> Array:
    """Return weights[o, c, 3, 3] as float64[m + 2, m + 2, c, o], the second input of `winograd`."""
    g = TRANSFORMS[tile].weights
    outputs, inputs = weights.shape[:2]
    # Channels last, so that both products have long rows; einsum would multiply many small matrices.
    wide = weights.transpose(2, 3, 1, 0).astype(np.float64, order="C").reshape(3, 3, -1)
    with np.errstate(all="ignore"):
        across = np.matmul(g, np.tensordot(g, wide, 1))
    return np.asarray(across.reshape(tile + 2, tile + 2, inputs, outputs))


def tile_counts(shape: tuple[int, ...], tile: int) -> tuple[int, int]:
    """Return the number of tiles that cover an output [n, o, h, w], vertically and horizontally."""
    return -(-shape[2] // tile), -(-shape[3] // tile)


def _infer(inputs: Sequence[ValueType], attributes: WinogradAttributes) -> ValueType:
    x, u = inputs
    m = attributes.tile
    require(m in TRANSFORMS, f"winograd: a tile of {m} is none of {sorted(TRANSFORMS)}")
    is_of_bytes = x.dtype in BYTES
    require(x.rank == 4 and (x.dtype.is_float or is_of_bytes), f"winograd: argument 0 is {x}, not an image")
    wanted = DType.I16 if is_of_bytes else x.dtype
    legal = u.rank == 4 and u.dtype is wanted and u.shape[:3] == (m + 2, m + 2, x.shape[1])
    require(legal, f"winograd: argument 1 is {u}, argument 0 is {x}, the tile is {m}")
    pads = (*attributes.pads_begin, *attributes.pads_end)
    require(len(pads) == 4 and min(pads) >= 0, f"winograd: the pads are {pads}")
    sizes = tuple(x.shape[2 + i] + pads[i] + pads[2 + i] - 2 for i in range(2))
    require(min(sizes) >= 1, f"winograd: the window is larger than {x}")
    return ValueType((x.shape[0], u.shape[3], *sizes), DType.I32 if is_of_bytes else x.dtype)


def _flop(inputs: Sequence[ValueType], attributes: WinogradAttributes, output: ValueType) -> int:
    down, across = tile_counts(output.shape, attributes.tile)
    (_, _, channels_in, channels_out), (there, back) = (inputs[1].shape, TRANSFORM_FLOP[attributes.tile])
    each = 2 * inputs[1].size + there * channels_in + back * channels_out
    return each * output.shape[0] * down * across


def _reference(inputs: Sequence[Array], attributes: WinogradAttributes) -> Array:
    x, u = (array.astype(np.int32) if array.dtype.kind in "iu" else array for array in inputs)
    m, (top, left), (bottom, right) = attributes.tile, attributes.pads_begin, attributes.pads_end
    height, width = x.shape[2] + top + bottom - 2, x.shape[3] + left + right - 2
    down, across = tile_counts((0, 0, height, width), m)
    more_rows, more_columns = down * m - height, across * m - width
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom + more_rows), (left, right + more_columns)))
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (m + 2, m + 2), (2, 3))
    tiles = tiles[:, :, ::m, ::m]
    t = TRANSFORMS[m]
    b, a = t.data.astype(x.dtype), t.output.astype(x.dtype)
    with np.errstate(all="ignore"):
        v = np.einsum("ai,nchwij,bj->abcnhw", b, tiles, b, optimize=True)
        product = np.matmul(u.transpose(0, 1, 3, 2), v.reshape(*v.shape[:3], -1))
        y = np.einsum("pa,abok,qb->opqk", a, product, a, optimize=True)
    y = y.reshape(u.shape[3], m, m, x.shape[0], down, across).transpose(3, 0, 4, 1, 5, 2)
    image = y.reshape(x.shape[0], u.shape[3], down * m, across * m)
    return np.ascontiguousarray(image[:, :, :height, :width])


ROWS: tuple[Op, ...] = (
    Op(
        name="winograd",
        category=Category.LINEAR,
        arity=2,
        attributes=WinogradAttributes,
        infer=_infer,
        reference=_reference,
        work_flop=_flop,
        source="Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016",
    ),
)
