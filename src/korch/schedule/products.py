"""Products and convolutions -> blocked tile programs, with what stands before and after them.

A task computes a block of rows and columns. A loop over blocks of terms packs a block of each operand
into a tile (in panels of one vector for the second) and adds their product to the accumulator; where
an operand is read as it is, the contraction may read memory instead. What follows the product is a
pass over the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.blocks import PRODUCTS, Blocked, cut, flat, store
from korch.schedule.contraction import Contraction, Layouts, contraction_of, extent
from korch.tile.index import add, scale, var
from korch.tile.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Literal,
    Load,
    Loop,
    Panels,
    Pass,
    Stage,
    Step,
    TileProgram,
)
from korch.tile.staging import Machine

ROWS = (6, 24, 96)
"""Rows of a block."""

VECTORS = (2, 8)
"""Vectors of columns of a block."""

TERMS = (64, 512)
"""Terms of a block."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Rows, columns and terms of a block, and which operands are packed."""

    rows: int
    columns: int
    terms: int
    packs: tuple[bool, bool] = (True, True)


def products(group: Group, root: Primitive, layouts: Layouts, machine: Machine) -> list[TileProgram]:
    """Return programs of several blockings for a group with one product or convolution.

    Args:
        group: the group.
        root: its linear primitive; all others are computed before or after it, element by element.
        layouts: the layouts of inputs and outputs.
        machine: lanes of a vector.

    Raises:
        NotFusedError: what stands around the product can't be computed with it.
    """
    contraction = contraction_of(group, root, last=False)
    schedule = _Products(group, root, layouts, contraction, machine)
    return [*dict.fromkeys(schedule.program(blocking) for blocking in blockings(contraction, machine))]


def blockings(contraction: Contraction, machine: Machine) -> Iterator[Blocking]:
    """Yield blockings that are no longer than the product, each with and without packed operands."""
    sizes = [extent(axes) for axes in (contraction.rows, contraction.columns, contraction.terms)]
    columns = tuple(machine.lanes * n for n in VECTORS)
    blocks = [[min(b, n) for b in side] for side, n in zip((ROWS, columns, TERMS), sizes, strict=True)]
    for rows, width, terms in dict.fromkeys(itertools.product(*blocks)):
        for packs in ((True, True), (True, False), (False, True), (False, False)):
            yield Blocking(rows, width, terms, packs)


class _Products(Blocked):
    """What all programs of a group have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction)
        self.machine = machine

    def program(self, blocking: Blocking) -> TileProgram:
        """Return the program of one blocking."""
        (gm, i), (gn, j), (g, p) = (
            cut(extent(axes), block, names)
            for axes, block, names in (
                (self.contraction.rows, blocking.rows, ("gm", "i")),
                (self.contraction.columns, blocking.columns, ("gn", "j")),
                (self.contraction.terms, blocking.terms, ("g", "p")),
            )
        )
        grid = (*self.batch, gm, gn)
        loops = {axis.name: (0, axis.extent - 1) for axis in (*grid, g, i, j, p)}
        values = self.values((flat(gm, i), flat(gn, j), flat(g, p)), loops)
        total = At("t", add(scale(var("j"), 1), scale(var("i"), blocking.columns)))
        zero = Pass(
            (Axis("i", i.size), Axis("j", j.size)), "j", (Literal("x0", DType.F32, 0.0),), (store(total, "x0"),)
        )
        tiles = [Buffer("t", Level.TILE, DType.F32, blocking.rows * blocking.columns)]
        operands: list[At] = []
        body: list[Step] = []
        for position, (name, axes, columns) in enumerate((("pa", (i, p), p), ("pb", (p, j), j))):
            packed = At(name, add(scale(var(axes[0].name), columns.extent), var(columns.name)))
            emitter = self.fusion.emitter(loops)
            value = self.argument(emitter, position, values)
            direct = emitter.ops[0] if len(emitter.ops) == 1 else None
            if not blocking.packs[position] and isinstance(direct, Load) and not direct.guards:
                operands.append(At(direct.buffer, direct.index))
                continue
            operands.append(packed)
            body.append(Pass(axes, columns.name, tuple(emitter.ops), (store(packed, value),)))
            lanes = self.machine.lanes
            is_panel = position == 1 and columns.extent % lanes == 0
            layout = (Panels(columns.extent, lanes),) if is_panel else ()
            tiles.append(Buffer(name, Level.TILE, self.dtype, axes[0].extent * axes[1].extent, layout))
        terms = Axis(p.name, p.size, True, p.ragged)
        body.append(Contract((i, j, terms), total, operands[0], operands[1], PRODUCTS[self.dtype]))
        steps = (zero, Loop(g, ("t",), tuple(body)), self.after(total, (i, j), values, loops))
        return TileProgram((*self.memory(), *tiles), (Stage(grid, steps),))
