"""Products on matrix units -> tile programs whose operands are split into pieces of bfloat16.

A float32 has three pieces, a float16 two; a bfloat16 or a byte is one. A task computes a block of rows and columns. The
pieces of one operand's part stay in the cache while blocks of the other are read one after another: of the operand
that is split last, or of a second operand that comes in pieces. An operand whose neighbours are not adjacent in memory
is packed before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from korch.alignment import round_up
from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.types import DType
from korch.schedule.blocks import Operand, store
from korch.schedule.contraction import Contraction, Layouts, extent
from korch.schedule.products import Blocking, Cut, Products
from korch.tile.cpp_split import EDGE
from korch.tile.index import add, scale, var, vector_step
from korch.tile.program import At, Axis, Buffer, Level, Load, Panels, Pass, Product, Split, TileOp
from korch.tile.staging import Machine

MOST_PIECES = 3
"""Three numbers of 8 bits make one of 24."""

FEWER_PIECES = {DType.F16: 2, DType.BF16: 1, DType.I8: 1, DType.U8: 1, DType.BOOL: 1}
"""The pieces of numbers of fewer than 24 bits."""

MOVES = ("transpose", "reshape", "slice", "take", "broadcast")
"""Operations that give nothing but elements of what they read."""


def pieces_of(body: PrimitiveGraph, value: int) -> int:
    """Return how many numbers of bfloat16 make an element of a value, as far as a graph tells its type."""
    while (found := FEWER_PIECES.get(body.types[value].dtype)) is None:
        makers = [body.primitives[p] for p in body.producers[value]]
        if len(makers) != 1 or makers[0].op not in (*MOVES, "cast"):
            return MOST_PIECES
        value = makers[0].inputs[0]
    return found


def operand_pieces(body: PrimitiveGraph, root: Primitive) -> tuple[int, int]:
    """Return of how many pieces the elements of the operands of a product or convolution are."""
    first, second = root.inputs
    return pieces_of(body, first), pieces_of(body, second)


def pairs_of(a: int, b: int) -> int:
    """Return how many products of pieces are added up for a product of numbers of some pieces."""
    return sum(min(b, MOST_PIECES - i) for i in range(a))


def split_into(pieces: int) -> Split:
    """Return how an operand of some pieces is stored."""
    return Split(pieces, DType.BF16)


def tile_of_pieces(name: str, axes: tuple[Axis, Axis], pieces: int, *, is_second: bool) -> tuple[At, Buffer]:
    """Return where the pieces of an operand lie in a tile, and the tile.

    Args:
        name: of the tile.
        axes: the operand's rows and columns.
        pieces: the pieces of an element.
        is_second: whether it is the second operand, of which the pieces of two terms lie side by side.
    """
    rows, columns = (round_up(axis.extent, EDGE) for axis in axes)
    layout = (Panels(columns, EDGE, 2 if is_second else 1), split_into(pieces))
    at = At(name, add(scale(var(axes[0].name), columns), var(axes[1].name)))
    return at, Buffer(name, Level.TILE, DType.F32, rows * columns, layout)


def given_in_pieces(buffer: Buffer, terms: int, columns: int, pieces: int) -> Buffer:
    """Return the buffer of a second operand that comes in pieces, of whole steps of terms."""
    layout = (Panels(columns, EDGE, 2), split_into(pieces))
    return replace(buffer, elements=round_up(terms, EDGE) * columns, layout=layout)


def are_adjacent(ops: Sequence[TileOp], along: Axis, lanes: int) -> bool:
    """Return whether an operand is memory whose neighbours along an axis are whole vectors there."""
    loads = [op for op in ops if isinstance(op, Load)]
    is_whole = len(loads) == 1 and not loads[0].guards
    return is_whole and (along.extent == 1 or vector_step(loads[0].index, along.name, lanes) == 1)


class SplitProducts(Products):
    """What all programs of a group on matrix units have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction, machine)
        self.product = Product.PIECES
        self.pieces = operand_pieces(group.body, root)

    def _operand(self, position: int, blocking: Blocking, cuts: Cut) -> Operand:
        """Return the pieces of an operand, which come so or are made of it."""
        (_, i), (_, j), (_, p) = cuts.rows, cuts.columns, cuts.terms
        axes = (p, j) if position else (i, p)
        if position and blocking.panels:
            return super()._operand(position, blocking, cuts)
        emitter = self.fusion.emitter(cuts.ranges)
        value = self.argument(emitter, position, cuts.values)
        ops: Sequence[TileOp] = tuple(emitter.ops)
        floats = Operand(At("", var("")))
        if blocking.packs[position] or not are_adjacent(ops, axes[1], self.machine.lanes):
            floats = super()._operand(position, replace(blocking, packs=(True, True)), cuts)
            ops, value = (Load("x0", DType.F32, floats.at.buffer, floats.at.index),), "x0"
        at, pieces = tile_of_pieces("sb" if position else "sa", axes, self.pieces[position], is_second=position == 1)
        split = Pass(axes, axes[1].name, tuple(ops), (store(at, value),))
        return Operand(at, floats.buffer, floats.stage, floats.packing, (pieces, split))

    def _panels_of(self, columns: int, blocking: Blocking) -> tuple[Panels, ...]:
        return ()  # the pieces are made of rows

    def _memory(self, blocking: Blocking) -> Iterator[Buffer]:
        """Yield the buffers of inputs and outputs; the second operand may come in pieces."""
        columns = round_up(extent(self.contraction.columns), EDGE)
        for buffer in self.memory():
            if blocking.panels and buffer.name == self.name_of(1):
                buffer = given_in_pieces(buffer, extent(self.terms), columns, self.pieces[1])
            yield buffer
