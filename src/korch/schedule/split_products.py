"""Products on matrix units -> tile programs whose operands are split into components of bfloat16.

A float32 has three components, a float16 two; a bfloat16 or a byte is one. A task computes a block of rows and columns.
The components of one operand's part stay in the cache while blocks of the other are read one after another: of the
operand that is split last, or of a second operand that comes in components. An operand whose neighbours are not
adjacent in memory is packed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from korch.alignment import round_up
from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.types import DType
from korch.schedule.blocks import Operand, store
from korch.schedule.contraction import Contraction, Layouts, Packed, extent
from korch.schedule.products import Cut, ProductBlocking, Products
from korch.tile.cpp.split import EDGE
from korch.tile.index import add, scale, var, vector_step
from korch.tile.program import At, Axis, Buffer, Level, Load, Panels, Pass, Product, Split, TileOp
from korch.tile.staging import Machine

MOST_COMPONENTS = 3
"""Three numbers of 8 bits make one of 24."""

FEWER_COMPONENTS = {DType.F16: 2, DType.BF16: 1, DType.I8: 1, DType.U8: 1, DType.BOOL: 1}
"""The components of numbers of fewer than 24 bits."""

MOVES = ("transpose", "reshape", "slice", "take", "broadcast")
"""Operations that give nothing but elements of what they read."""


def components_of(body: PrimitiveGraph, value: int) -> int:
    """Return how many numbers of bfloat16 make an element of a value, as far as a graph tells its type."""
    while (found := FEWER_COMPONENTS.get(body.types[value].dtype)) is None:
        makers = [body.primitives[p] for p in body.producers[value]]
        if len(makers) != 1 or makers[0].op not in (*MOVES, "cast"):
            return MOST_COMPONENTS
        value = makers[0].inputs[0]
    return found


def operand_components(body: PrimitiveGraph, root: Primitive) -> tuple[int, int]:
    """Return of how many components the elements of the operands of a product or convolution are."""
    first, second = root.inputs
    return components_of(body, first), components_of(body, second)


def pairs_of(a: int, b: int) -> int:
    """Return how many products of components are added up for a product of numbers of some components."""
    return sum(min(b, MOST_COMPONENTS - i) for i in range(a))


def split_into(components: int) -> Split:
    """Return how an operand of some components is stored."""
    return Split(components, DType.BF16)


def tile_of_components(name: str, axes: tuple[Axis, Axis], components: int, *, is_second: bool) -> tuple[At, Buffer]:
    """Return where the components of an operand lie in a tile, and the tile.

    Args:
        name: of the tile.
        axes: the operand's rows and columns.
        components: the components of an element.
        is_second: whether it is the second operand, of which the components of two terms lie side by side.
    """
    rows, columns = (round_up(axis.extent, EDGE) for axis in axes)
    layout = (Panels(columns, EDGE, 2 if is_second else 1), split_into(components))
    at = At(name, add(scale(var(axes[0].name), columns), var(axes[1].name)))
    return at, Buffer(name, Level.TILE, DType.F32, rows * columns, layout)


def given_split(terms: int, columns: int, components: int) -> Packed:
    """Return a second operand that comes in components, of whole steps of terms."""
    return Packed(round_up(terms, EDGE) * columns, (Panels(columns, EDGE, 2), split_into(components)))


def are_adjacent(ops: Sequence[TileOp], along: Axis, lanes: int) -> bool:
    """Return whether an operand is memory whose neighbours along an axis are whole vectors there."""
    loads = [op for op in ops if isinstance(op, Load)]
    is_whole = len(loads) == 1 and not loads[0].guards
    return is_whole and (along.extent == 1 or vector_step(loads[0].index, along.name, lanes) == 1)


def copied(
    name: str, axes: tuple[Axis, Axis], row: int, ops: Sequence[TileOp], value: str
) -> tuple[Buffer, Pass, Load]:
    """Return a tile for an operand whose neighbours are not adjacent, the pass that copies it, and a load of it.

    Args:
        name: of the tile.
        axes: the operand's rows and columns.
        row: how far apart rows are in the tile.
        ops: what computes an element.
        value: the element.
    """
    at = At(name, add(scale(var(axes[0].name), row), var(axes[1].name)))
    packing = Pass(axes, axes[1].name, tuple(ops), (store(at, value),))
    return Buffer(name, Level.TILE, DType.F32, axes[0].extent * row), packing, Load("x0", DType.F32, name, at.index)


class SplitProducts(Products):
    """What all programs of a group on matrix units have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction, machine)
        self.product = Product.SPLIT
        self.components = operand_components(group.body, root)

    def _operand(self, position: int, blocking: ProductBlocking, cuts: Cut) -> Operand:
        """Return the components of an operand, which come so or are made of it."""
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
        at, components = tile_of_components(
            "sb" if position else "sa", axes, self.components[position], is_second=position == 1
        )
        split = Pass(axes, axes[1].name, tuple(ops), (store(at, value),))
        return Operand(at, floats.buffer, floats.stage, floats.packing, (components, split))

    def _panels_of(self, columns: int, blocking: ProductBlocking) -> tuple[Panels, ...]:
        return ()  # the components are made of rows

    def _packed(self, blocking: ProductBlocking) -> Packed:
        columns = round_up(extent(self.contraction.columns), EDGE)
        return given_split(extent(self.terms), columns, self.components[1])
