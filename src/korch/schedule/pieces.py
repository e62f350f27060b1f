"""Products on matrix units -> tile programs whose operands are split into pieces of bfloat16.

A task computes a block of rows and columns. The pieces of one operand's part stay while the other goes by, a block at
a time, which is what is split last. An operand whose neighbours are not adjacent in memory is packed before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from korch.alignment import round_up
from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.blocks import Operand, store
from korch.schedule.contraction import Contraction, Layouts, extent
from korch.schedule.products import Blocking, Cut, Products
from korch.tile.cpp_split import EDGE
from korch.tile.index import add, scale, var, vector_step
from korch.tile.program import At, Buffer, Level, Load, Panels, Pass, Product, Split, TileOp
from korch.tile.staging import Machine

PIECES = Split(3, DType.BF16)
"""Three numbers of 8 bits make one of 24."""


class SplitProducts(Products):
    """What all programs of a group on matrix units have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction, machine)
        self.product = Product.BF16X6

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
        if blocking.packs[position] or not self._are_adjacent(ops, axes[1].name, axes[1].extent):
            floats = super()._operand(position, replace(blocking, packs=(True, True)), cuts)
            ops, value = (Load("x0", DType.F32, floats.at.buffer, floats.at.index),), "x0"
        name, rows, columns = ("sb" if position else "sa"), *(round_up(axis.extent, EDGE) for axis in axes)
        at = At(name, add(scale(var(axes[0].name), columns), var(axes[1].name)))
        layout = (Panels(columns, EDGE, 2 if position else 1), PIECES)
        pieces = Buffer(name, Level.TILE, DType.F32, rows * columns, layout)
        split = Pass(axes, axes[1].name, tuple(ops), (store(at, value),))
        return Operand(at, floats.buffer, floats.stage, floats.packing, (pieces, split))

    def _panels_of(self, columns: int, blocking: Blocking) -> tuple[Panels, ...]:
        return ()  # the pieces are made of rows

    def _are_adjacent(self, ops: Sequence[TileOp], name: str, size: int) -> bool:
        """Return whether an operand is memory whose neighbours along an axis are whole vectors there."""
        loads = [op for op in ops if isinstance(op, Load)]
        return (
            len(loads) == 1
            and not loads[0].guards
            and (size == 1 or vector_step(loads[0].index, name, self.machine.lanes) == 1)
        )

    def _memory(self, blocking: Blocking) -> Iterator[Buffer]:
        """Yield the buffers of inputs and outputs; the second operand may come in pieces."""
        rows, columns = (round_up(extent(axes), EDGE) for axes in (self.terms, self.contraction.columns))
        for buffer in self.memory():
            if blocking.panels and buffer.name == self.name_of(1):
                yield replace(buffer, elements=rows * columns, layout=(Panels(columns, EDGE, 2), PIECES))
            else:
                yield buffer
