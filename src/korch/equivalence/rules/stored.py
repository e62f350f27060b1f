"""Rules for weights stored in few bits: scales move behind the product, which then reads the integers itself.

The time of a product with few rows is the time to read its weights, and bytes are a quarter of the size of float32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from korch.equivalence.quantization import Dequantized, dequantized
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer
from korch.equivalence.rules.integers import stored_array
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.linear import BYTES, MatmulAttributes
from korch.primitive.ops.stored import BITS, StoredAttributes
from korch.primitive.quantized import pack
from korch.primitive.types import DType
from korch.system.alignment import round_up

LEAST_BLOCK = 8
"""The fewest terms per block for which separate sums for each block pay off."""

MOST_MOVES = 4
"""The most moves between stored weights and their use that are followed."""


def _match(view: View, root: Primitive) -> Iterator[tuple[Primitive, Dequantized]]:
    yield from ((root, right) for right in dequantized(view, root.inputs[1]))


def _move_scale(view: View, match: tuple[Primitive, Dequantized]) -> Write | RuleRefusal:
    root, right = match
    if view.constant(right.q) is None or right.grid.dtype not in BYTES:
        return RuleRefusal("the second operand is not stored in bytes", root.output)
    if view.type(root.output).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("sums that are not scaled yet may overflow", root.output, is_final=True)
    rank = view.type(right.q).rank
    if right.grid.scale.axis not in (None, rank - 1):
        return RuleRefusal("the scale varies along the sum", root.output)
    if right.grid.zero.vector.any():
        return RuleRefusal("the zero point is not 0", root.output)
    if rank > 2 and view.shape(right.q)[:-2] != (1,) * (rank - 2):
        return RuleRefusal("there are several matrices", root.output)
    type_ = view.type(root.output)

    def write(writer: Writer) -> int:
        weights = writer.add("cast", (right.q,), CastAttributes(type_.dtype.value))
        product = writer.add("matmul", (root.inputs[0], weights))
        return writer.add("mul", (product, writer.along(right.grid.scale.vector, type_.rank - 1, type_)))

    return write


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """A product whose second operand is constant integers times constant scales, perhaps followed by moves."""

    root: Primitive
    scaling: Primitive
    moves: tuple[Primitive, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlockProduct:
    """A product, and the inputs and attributes of `matmul_stored`; `zeros` is None if all zero points are equal."""

    root: Primitive
    packed: Array
    scales: Array
    zeros: Array | None
    attributes: StoredAttributes

    def write(self, writer: Writer) -> int:
        """Write it."""
        scales = np.ascontiguousarray(self.scales.astype(writer.type(self.root.output).dtype.numpy))
        with np.errstate(over="ignore"):
            half = scales.astype(np.float16)  # often exact: a tenth less bytes beside weights of 4 bits
        inputs = [
            self.root.inputs[0],
            writer.verbs.constant(np.ascontiguousarray(self.packed)),
            writer.verbs.constant(half if np.array_equal(half.astype(scales.dtype), scales) else scales),
        ]
        if self.zeros is not None:
            inputs.append(writer.verbs.constant(np.ascontiguousarray(self.zeros)))
        return writer.add("matmul_stored", inputs, self.attributes)


def _match_blocks(view: View, root: Primitive) -> Iterator[BlockMatch]:
    value = root.inputs[1]
    moves: list[Primitive] = []
    while (found := view.producing(value, "transpose", "reshape", "slice")) and len(moves) < MOST_MOVES:
        moves.append(found[0])
        value = found[0].inputs[0]
    for scaling in view.producing(value, "mul"):
        yield BlockMatch(root, scaling, tuple(reversed(moves)))


def block_product(view: View, match: BlockMatch) -> BlockProduct | RuleRefusal:
    """Return what the rule writes, or why it does not apply."""
    root, shape = match.root, view.shape(match.root.inputs[1])
    if view.type(root.output).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("sums that are not scaled yet may overflow", root.output, is_final=True)
    if math.prod(shape[:-2]) != 1:
        return RuleRefusal("there are several matrices", root.output, is_final=True)
    found = next(filter(None, (_stored(view, *sides) for sides in _sides(match.scaling))), None)
    if found is None:
        return RuleRefusal("the second operand is not stored", root.output)
    integers, scales, zeros = (_moved(array, match.moves).reshape(shape[-2:]) for array in found)
    if not np.array_equal(integers.astype(np.int16), integers) or not np.array_equal(zeros.astype(np.int16), zeros):
        return RuleRefusal("the integers have more than 8 bits", root.output, is_final=True)
    bits, least, dtype = _bits_of(integers, zeros)
    if not bits:
        return RuleRefusal("the integers have more than 8 bits", root.output, is_final=True)
    terms = len(integers)
    block = _block_of(scales, zeros)
    if block == terms and any(view.constant(d.q) is not None for d in dequantized(view, root.inputs[1])):
        return RuleRefusal("the scale of its bytes moves behind the product", root.output, is_final=True)
    block = block if block < terms else round_up(block, 8 // bits)
    if block < LEAST_BLOCK or block * bits % 8:
        return RuleRefusal("the scales have no blocks of whole bytes", root.output, is_final=True)
    packed = _packed(integers - least, bits, round_up(terms, block))
    points = (zeros - least)[::block].astype(dtype)
    is_one = bool((points == points[:1, :1]).all())
    may_round = root.attributes_as(MatmulAttributes).rounded_block > 0
    attributes = StoredAttributes(bits, block, int(points[0, 0]) if is_one else 0, may_round)
    return BlockProduct(root, packed.astype(dtype), scales[::block], None if is_one else points, attributes)


def _by_columns(view: View, match: BlockMatch) -> Write | RuleRefusal:
    found = block_product(view, match)
    return found if isinstance(found, RuleRefusal) else found.write


def _sides(scaling: Primitive) -> tuple[tuple[int, int], tuple[int, int]]:
    first, second = scaling.inputs
    return (first, second), (second, first)


def _stored(view: View, data: int, factor: int) -> tuple[Array, Array, Array] | None:
    """Return constant integers, scales and zero points of one shape, None if the operands have another form."""
    scales = stored_array(view, factor)
    if scales is None or view.producing(factor, "cast"):
        return None
    for sub in view.producing(data, "sub"):
        wide, zeros = (stored_array(view, value) for value in sub.inputs)
        if wide is not None and zeros is not None and np.array_equal(wide, np.rint(wide)):
            return wide, scales, np.broadcast_to(zeros, wide.shape)
    integers = stored_array(view, data)
    is_whole = integers is not None and np.array_equal(integers, np.rint(integers))
    return (integers, scales, np.zeros_like(integers)) if integers is not None and is_whole else None


def _moved(array: Array, moves: Sequence[Primitive]) -> Array:
    for move in moves:
        array = move.row.reference([array], move.attributes)
    return array


def _bits_of(integers: Array, zeros: Array) -> tuple[int, int, type[np.generic]]:
    """Return the bits of integers and zero points (0 if 8 are too few), the least integer, and the storage type."""
    low, high = int(min(integers.min(), zeros.min())), int(max(integers.max(), zeros.max()))
    for bits in BITS[:-1]:
        for least in (0, -(1 << bits - 1)):
            if least <= low and high < least + (1 << bits):
                return bits, least, np.uint8
    if low >= -128 and high < 128:
        return 8, 0, np.int8
    return (8, 0, np.uint8) if low >= 0 and high < 256 else (0, 0, np.uint8)


def _packed(integers: Array, bits: int, terms: int) -> Array:
    """Return integers, padded with zeros to a number of terms, with several terms of a column packed in each byte."""
    if terms > len(integers):
        integers = np.pad(integers, [(0, terms - len(integers)), (0, 0)])
    return integers if bits == 8 else pack(integers.astype(np.uint8), bits, axis=0)


def _block_of(*arrays: Array) -> int:
    """Return the most rows per block for which each column is constant in each block; the last may be incomplete."""
    changes = [np.flatnonzero((array[1:] != array[:-1]).any(1)) + 1 for array in arrays]
    found = math.gcd(*(int(place) for places in changes for place in places))
    return found or len(arrays[0])


STORED_WEIGHTS_LIE_BY_COLUMNS = Rule(
    name="stored-weights-lie-by-columns",
    law="x w = sum over blocks b of (x[b] (q[b] - z[b])) diag(s[b]), where w = (q - z) s for constants q of few bits",
    source="linearity; weights with one scale for each block of terms",
    roots=("matmul",),
    match=_match_blocks,
    rewrite=_by_columns,
    reorders=True,
)

STORED_SCALE_MOVES_BEHIND_MATMUL = Rule(
    name="stored-scale-moves-behind-matmul",
    law="x (q diag(s)) = (x q) diag(s) for constant bytes q",
    source="linearity; weight-only quantization",
    roots=("matmul",),
    match=_match,
    rewrite=_move_scale,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (STORED_SCALE_MOVES_BEHIND_MATMUL, STORED_WEIGHTS_LIE_BY_COLUMNS)
