"""Products and convolutions -> blocked tile programs, with what stands before and after them.

A task computes a block of rows and columns. A loop over blocks of terms packs a block of each operand
into a tile (in panels of one vector for the second) and adds their product to the accumulator; where
an operand is read as it is, the contraction may read memory instead. What follows the product is a
pass over the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.contraction import Axes, Contraction, Fusion, Layouts, contraction_of, extent
from korch.tile.emit import Emitter, Index
from korch.tile.index import Expr, Ranges, add, bounds, quotient, remainder, scale, substitute, var
from korch.tile.program import (
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Literal,
    Load,
    Loop,
    Panels,
    Pass,
    Product,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.staging import Machine

PRODUCTS = {DType.F32: Product.F32, DType.F16: Product.F16, DType.BF16: Product.BF16}
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


class _Products:
    """What all programs of a group have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        self.group, self.root, self.contraction, self.machine = group, root, contraction, machine
        self.fusion = Fusion(group, layouts, root)
        self.batch = tuple(Axis(f"b{i}", n) for i, (_, n) in enumerate(contraction.batch))
        self.dtype = group.body.types[root.inputs[0]].dtype

    def program(self, blocking: Blocking) -> TileProgram:
        """Return the program of one blocking."""
        (gm, i), (gn, j), (g, p) = (
            _cut(extent(axes), block, names)
            for axes, block, names in (
                (self.contraction.rows, blocking.rows, ("gm", "i")),
                (self.contraction.columns, blocking.columns, ("gn", "j")),
                (self.contraction.terms, blocking.terms, ("g", "p")),
            )
        )
        grid = (*self.batch, gm, gn)
        loops = {axis.name: (0, axis.extent - 1) for axis in (*grid, g, i, j, p)}
        values = self._values(((gm, i), (gn, j), (g, p)), loops)
        total = At("t", add(scale(var("j"), 1), scale(var("i"), blocking.columns)))
        zero = Pass(
            (Axis("i", i.size), Axis("j", j.size)), "j", (Literal("x0", DType.F32, 0.0),), (_store(total, "x0"),)
        )
        tiles = [Buffer("t", Level.TILE, DType.F32, blocking.rows * blocking.columns)]
        operands: list[At] = []
        body: list[Step] = []
        for position, (name, axes, columns) in enumerate((("pa", (i, p), p), ("pb", (p, j), j))):
            packed = At(name, add(scale(var(axes[0].name), columns.extent), var(columns.name)))
            emitter = self.fusion.emitter(loops)
            value = self._argument(emitter, position, values)
            direct = emitter.ops[0] if len(emitter.ops) == 1 else None
            if not blocking.packs[position] and isinstance(direct, Load) and not direct.guards:
                operands.append(At(direct.buffer, direct.index))
                continue
            operands.append(packed)
            body.append(Pass(axes, columns.name, tuple(emitter.ops), (_store(packed, value),)))
            lanes = self.machine.lanes
            is_panel = position == 1 and columns.extent % lanes == 0
            layout = (Panels(columns.extent, lanes),) if is_panel else ()
            tiles.append(Buffer(name, Level.TILE, self.dtype, axes[0].extent * axes[1].extent, layout))
        terms = Axis(p.name, p.size, True, p.ragged)
        body.append(Contract((i, j, terms), total, operands[0], operands[1], PRODUCTS[self.dtype]))
        steps = (zero, Loop(g, ("t",), tuple(body)), self._after(total, (i, j), values, loops))
        return TileProgram((*self._memory(), *tiles), (Stage(grid, steps),))

    def _values(self, cuts: Sequence[tuple[Axis, Axis]], ranges: Ranges) -> dict[str, Expr]:
        """Return the contraction's variables in those of blocks and their elements."""
        contraction = self.contraction
        found = {name: var(axis.name) for (name, _), axis in zip(contraction.batch, self.batch, strict=True)}
        for axes, (outer, inner) in zip((contraction.rows, contraction.columns, contraction.terms), cuts, strict=True):
            flat = add(scale(var(outer.name), inner.extent), var(inner.name))
            found |= _digits(substitute(flat, {}, ranges), axes, ranges)
        return found

    def _moved(self, index: Index, values: dict[str, Expr], ranges: Ranges) -> Index:
        return tuple(substitute(expr, values, ranges) for expr in index)

    def _argument(self, emitter: Emitter, position: int, values: dict[str, Expr]) -> str:
        """Return the name of an operand's element; 0 outside of its shape."""
        value = self.root.inputs[position]
        type_ = self.group.body.types[value]
        index = self.contraction.b if position else self.contraction.a
        moved = self._moved(index, values, emitter.ranges)
        guards: list[Inside] = []
        for expr, element, n in zip(index, moved, type_.shape, strict=True):
            low, high = bounds(expr, self.contraction.ranges)
            if low < 0 or high >= n:
                guards.append(Inside(element, 0, n))
        name = emitter.value(value, moved, tuple(guards))
        if not guards or value in self.fusion.place:
            return name
        return emitter.select(type_.dtype, tuple(guards), name, emitter.literal(type_.dtype, 0.0))

    def _after(self, total: At, axes: tuple[Axis, Axis], values: dict[str, Expr], ranges: Ranges) -> Pass:
        """Return the pass that computes the outputs of a block from its sums."""
        emitter = self.fusion.emitter(ranges)
        emitter.ops.append(Load("x0", DType.F32, total.buffer, total.index))
        name = "x0"
        if self.dtype is not DType.F32:
            name = "x1"
            emitter.ops.append(Apply(name, self.dtype, "cast", ("x0",)))
        index = self._moved(self.contraction.out, values, ranges)
        outputs = self.fusion.outputs(emitter, self.root, index, name)
        sinks = tuple(Store(buffer, place, value) for buffer, _, place, value in outputs)
        return Pass(axes, axes[1].name, tuple(emitter.ops), sinks)

    def _memory(self) -> Iterator[Buffer]:
        body = self.group.body
        for values, level in ((body.inputs, Level.INPUT), (body.outputs, Level.OUTPUT)):
            for name, value in values:
                type_ = body.types[value]
                size = math.prod(self.fusion.layouts[name].physical_shape(type_.shape))
                yield Buffer(name, level, type_.dtype, size)


def _store(at: At, value: str) -> Store:
    return Store(at.buffer, at.index, value)


def _cut(size: int, block: int, names: tuple[str, str]) -> tuple[Axis, Axis]:
    """Return the axis of blocks and that of a block's elements; the last block may be shorter."""
    outer = Axis(names[0], -(-size // block))
    return outer, Axis(names[1], block, ragged=(outer.name, size) if size % block else None)


def _digits(flat: Expr, axes: Axes, ranges: Ranges) -> dict[str, Expr]:
    """Return the variables of axes whose points are counted, the last axis first."""
    found: dict[str, Expr] = {}
    for position, (name, n) in enumerate(reversed(axes), 1):
        found[name] = flat if position == len(axes) else remainder(flat, n, ranges)
        flat = quotient(flat, n, ranges)
    return found
