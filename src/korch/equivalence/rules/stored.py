"""Weights stored in bytes: their scales move behind the product that reads them, which then widens bytes.

A product of few rows takes as long as it takes to read its weights, and bytes are a quarter of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from korch.equivalence.quantization import Dequantized, dequantized, dequantized_by
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Writer
from korch.equivalence.rules.integers import stored_array
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.linear import BYTES
from korch.primitive.types import DType, ValueId

LEAST_BLOCK = 16
"""Terms of a block of which a product is worth its own sums."""

MOST_MOVES = 4
"""Moves between the weights as they are stored and their use that are looked at."""


@dataclass(frozen=True, slots=True)
class StoredScaleMatch:
    """A product, and the last primitive of its second operand's dequantization."""

    root: Primitive
    right: Primitive


@dataclass(frozen=True, slots=True, eq=False)
class StoredScaleWitness:
    """A product, and the constant integers that its second operand is dequantized from."""

    root: Primitive
    right: Dequantized


def _match(view: View, root: Primitive) -> Iterator[StoredScaleMatch]:
    for right in dequantized(view, root.inputs[1]):
        yield StoredScaleMatch(root, right.root)


def _refuse(view: View, match: StoredScaleMatch) -> StoredScaleWitness | RuleRefusal:
    root, right = match.root, dequantized_by(view, match.right)
    if right is None or view.constant(right.q) is None or right.grid.dtype not in BYTES:
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
    return StoredScaleWitness(root, right)


def _build(writer: Writer, witness: StoredScaleWitness) -> int:
    root, grid = witness.root, witness.right.grid
    type_ = writer.type(root.output)
    weights = writer.add("cast", (witness.right.q,), CastAttributes(type_.dtype.value))
    product = writer.add("matmul", (root.inputs[0], weights))
    return writer.add("mul", (product, writer.along(grid.scale.vector, type_.rank - 1, type_)))


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """A product whose second operand is constant integers times constant scales, perhaps moved."""

    root: Primitive
    scaling: Primitive
    moves: tuple[Primitive, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlockWitness:
    """A product, the integers and the scales: int8[blocks, terms, n] and float32[blocks, 1, n]."""

    root: Primitive
    integers: Array
    scales: Array


def _match_blocks(view: View, root: Primitive) -> Iterator[BlockMatch]:
    value = root.inputs[1]
    moves: list[Primitive] = []
    while (found := view.producing(value, "transpose", "reshape", "slice")) and len(moves) < MOST_MOVES:
        moves.append(found[0])
        value = found[0].inputs[0]
    for scaling in view.producing(value, "mul"):
        yield BlockMatch(root, scaling, tuple(reversed(moves)))


def _refuse_blocks(view: View, match: BlockMatch) -> BlockWitness | RuleRefusal:
    root = match.root
    if view.type(root.output).dtype not in (DType.F32, DType.F64):
        return RuleRefusal("sums that are not scaled yet may overflow", root.output, is_final=True)
    if len(view.shape(root.inputs[1])) != 2:
        return RuleRefusal("there are several matrices", root.output, is_final=True)
    arrays = [stored_array(view, value) for value in match.scaling.inputs]
    if arrays[0] is None or arrays[1] is None:
        return RuleRefusal("the second operand is not stored", root.output)
    integers, scales = (_moved(array, match.moves) for array in arrays if array is not None)
    if not np.array_equal(integers.astype(np.int8), integers):
        return RuleRefusal("the integers have more than 8 bits", root.output, is_final=True)
    terms, rows = len(integers), math.prod(view.shape(root.output)[:-1])
    block = _block_of(scales)
    if block is None:
        return RuleRefusal("the scales have no equal blocks", root.output, is_final=True)
    if block == terms and any(view.constant(d.q) is not None for d in dequantized(view, root.inputs[1])):
        return RuleRefusal("the scale of its bytes moves behind the product", root.output, is_final=True)
    if rows > block // 4:
        return RuleRefusal("the sums of blocks take longer to add up than the weights to read", root.output)
    n = integers.shape[1]
    return BlockWitness(root, integers.reshape(-1, block, n).astype(np.int8), scales[::block].reshape(-1, 1, n))


def _moved(array: Array, moves: Sequence[Primitive]) -> Array:
    for move in moves:
        array = move.row.reference([array], move.attributes)
    return array


def _block_of(scales: Array) -> int | None:
    """Return the largest block of rows with one scale in each column: all, or a power of two from `LEAST_BLOCK` on."""
    if np.array_equal(scales, np.broadcast_to(scales[:1], scales.shape)):
        return len(scales)
    found, block = None, LEAST_BLOCK
    while len(scales) % block == 0:
        parts = scales.reshape(-1, block, scales.shape[1])
        if not np.array_equal(parts, np.broadcast_to(parts[:, :1], parts.shape)):
            break
        found, block = block, 2 * block
    return found


def _build_blocks(writer: Writer, witness: BlockWitness) -> int:
    root, (blocks, block, n) = witness.root, witness.integers.shape
    type_, verbs = writer.type(root.output), writer.verbs
    rows = math.prod(type_.shape[:-1])
    x = verbs.reshape(ValueId(root.inputs[0]), (rows, blocks, block))
    x = verbs.transpose(x, (1, 0, 2))
    weights = writer.add("cast", (writer.constant(witness.integers, DType.I8),), CastAttributes(type_.dtype.value))
    sums = writer.add("matmul", (x, weights))
    scales = verbs.broadcast(ValueId(writer.constant(witness.scales, type_.dtype)), (blocks, rows, n))
    total = verbs.reduce("sum", ValueId(writer.add("mul", (sums, scales))), (0,))
    return verbs.reshape(total, type_.shape)


STORED_BLOCKS_ARE_A_BATCH = Rule(
    name="stored-blocks-are-a-batch",
    law="x w = sum over blocks b of (x[b] q[b]) diag(s[b]), where w = q s for constant integers q of few bits",
    source="linearity; weights with one scale for each block of terms",
    roots=("matmul",),
    match=_match_blocks,
    refuse=_refuse_blocks,
    build=_build_blocks,
    reorders=True,
)

STORED_SCALE_MOVES_BEHIND_MATMUL = Rule(
    name="stored-scale-moves-behind-matmul",
    law="x (q diag(s)) = (x q) diag(s) for constant bytes q",
    source="linearity; weight-only quantization",
    roots=("matmul",),
    match=_match,
    refuse=_refuse,
    build=_build,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (STORED_SCALE_MOVES_BEHIND_MATMUL, STORED_BLOCKS_ARE_A_BATCH)
