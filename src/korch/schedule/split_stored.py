"""Products by weights stored in few bits, on matrix units -> tile programs that multiply the integers themselves.

An integer of at most 8 bits, minus its zero point, fits in one bfloat16 number, so that rows in three components need
only three products. The sums of a block of terms are multiplied by the block's scale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.primitive.types import DType
from korch.schedule.blocks import cut, fill, flat, store
from korch.schedule.contraction import NotFusedError
from korch.schedule.split_products import are_adjacent, components_of, copied, tile_of_components
from korch.schedule.stored import Stored
from korch.system.alignment import round_up
from korch.target import EDGE
from korch.tile.ir.index import Expr, Ranges, add, constant, quotient, scale, substitute, var
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Pass,
    Product,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
)

MOST_STEPS = 4
"""The most steps of terms that are multiplied together: their integers stay in the L1 cache."""


@dataclass(frozen=True, slots=True)
class SplitStoredBlocking:
    """How a product is divided: rows and columns of a task, and terms of an iteration of its loop."""

    rows: int
    columns: int
    terms: int


class SplitStored(Stored):
    """The programs of a group around one `matmul_stored` primitive, on matrix units."""

    def require(self) -> None:
        """Raise an error if blocks are not whole steps of matrix units, or reach beyond the last term."""
        if self.at.block % EDGE or self.terms % self.at.block:
            raise NotFusedError(f"blocks are no whole steps of {EDGE} terms")

    @property
    def components(self) -> int:
        """The number of bfloat16 components of an element of the rows."""
        return components_of(self.group.body, self.root.inputs[0])

    def split_program(self, blocking: SplitStoredBlocking) -> TileProgram:
        """Return the program of one blocking.

        Raises:
            NotFusedError: the operations around the product can't be fused with it.
        """
        self.require()
        (gm, i), (gn, j) = cut(self.rows, blocking.rows, ("gm", "i")), cut(self.columns, blocking.columns, ("gn", "j"))
        g, p = Axis("g", self.terms // blocking.terms), Axis("p", blocking.terms)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (gm, i, gn, j, g, p)}
        row, column, first = flat(gm, i), flat(gn, j), scale(var(g.name), p.extent) if g.extent > 1 else constant(0)
        total = At("t", add(scale(var(i.name), round_up(j.extent, self.machine.lanes)), var(j.name)))
        emitter = self.fusion.emitter(ranges)
        value = self.argument(emitter, 0, self.values([row, column, add(first, var(p.name))], ranges))
        a, own = tile_of_components("sa", (i, p), self.components, is_second=False)
        b, other = tile_of_components("sb", (p, j), 1, is_second=True)
        split, copy = self._split((i, p), emitter.ops, value, a)
        made = (*split, self._integers((first, column), (p, j), b, ranges))
        zero, contract = fill((i, j), total, 0.0), self._contract((i, j, p), (total, a, b), (first, column), ranges)
        turns: tuple[Step, ...] = (*made, zero, contract)
        if g.extent > 1:
            turns = zero, Loop(g, ("t",), (*made, contract))
        after = self.after(total, (i, j), self.values([row, column, var("x2")], {**ranges, "x2": (0, 0)}), ranges)
        tile = Buffer("t", Level.TILE, DType.F32, i.extent * round_up(j.extent, self.machine.lanes))
        return TileProgram((*self.memory(), tile, *copy, own, other), (Stage((gn, gm), (*turns, after)),))

    def _split(
        self, axes: tuple[Axis, Axis], ops: Sequence[TileOp], value: str, to: At
    ) -> tuple[tuple[Pass, ...], tuple[Buffer, ...]]:
        """Return the passes that compute the components of the rows, and the tile of a copy if one is needed."""
        p = axes[1]
        if are_adjacent(ops, p, self.machine.lanes):
            return (Pass(axes, p.name, tuple(ops), (store(to, value),)),), ()
        tile, packing, load = copied("pa", axes, round_up(p.extent, self.machine.lanes), ops, value)
        return (packing, Pass(axes, p.name, (load,), (store(to, load.name),))), (tile,)

    def _integers(self, at: tuple[Expr, Expr], axes: tuple[Axis, Axis], to: At, ranges: Ranges) -> Pass:
        """Return the pass that converts the integers of some terms and columns, minus the zero point, to bfloat16."""
        (first, column), (p, j), each = at, axes, self.at.each
        r = Axis("r", p.extent // each)
        emitter = self.fusion.emitter({**ranges, "r": (0, r.extent - 1)})
        term = add(first, scale(var("r"), each))
        byte = quotient(term, each, emitter.ranges)
        sinks = []
        for h, integer in enumerate(self.integers(emitter, (byte, column), term)):
            place = substitute(to.index, {p.name: add(scale(var("r"), each), constant(h))}, emitter.ranges)
            sinks.append(Store(to.buffer, place, integer))
        return Pass((r, j), j.name, tuple(emitter.ops), tuple(sinks))

    def _contract(
        self, axes: tuple[Axis, Axis, Axis], operands: tuple[At, At, At], at: tuple[Expr, Expr], ranges: Ranges
    ) -> Contract:
        """Return the contraction of rows and integers, with the scale of each block of terms."""
        (i, j, p), (first, column) = axes, at
        steps = math.gcd(self.at.block, p.extent) // EDGE
        inner = EDGE * max(n for n in range(1, MOST_STEPS + 1) if steps % n == 0)
        q, k = Axis("q", p.extent // inner, True), Axis("k", inner, True)
        begin = scale(var("q"), inner) if q.extent > 1 else constant(0)
        emitter = self.fusion.emitter({**ranges, "q": (0, q.extent - 1), "k": (0, inner - 1)})
        _ = self.stored_factor(emitter, add(first, begin), column)
        (load,) = emitter.ops
        if not isinstance(load, Load) or load.guards or load.dtype not in (DType.F32, DType.F16):
            raise NotFusedError("scales are no floats in memory")
        term = {p.name: add(begin, var("k"))}
        total, a, b = (At(at.buffer, substitute(at.index, term, emitter.ranges)) for at in operands)
        terms = (q, k) if q.extent > 1 else (k,)
        return Contract((i, j, *terms), total, a, b, Product.SPLIT, factor=At(load.buffer, load.index))
