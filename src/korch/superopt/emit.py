"""Block graph and sizes of its tiles -> tile program.

Values that contractions, reductions or later phases read are tiles; other elementwise steps are fused into
the steps that read them. An operand whose columns are not adjacent is packed into panels first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

from korch.superopt.axes import AxisTerm, Named
from korch.superopt.expressions import Expressions
from korch.superopt.field import LOWEST
from korch.superopt.frame import F32, BlockSizes, Frame, Tile
from korch.superopt.generate import TRANSCENDENTAL, BlockGraph, BlockStep, GraphOperand, LoopPhase, StepKind
from korch.tile.ir.index import ZERO
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Contract,
    Literal,
    Load,
    Loop,
    Panels,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
)
from korch.tile.lower.emit import Operations
from korch.tile.lower.loops import PAGE_ELEMENTS

ROWS, VECTORS = {16: 12}, 2
"""Rows (by lanes; `FEW_ROWS` for other numbers of lanes) and vectors of columns that a contraction has in registers."""

FEW_ROWS = 6
"""Rows that a contraction has in registers on a machine with 16 vector registers."""

WIDE_VECTORS = 3
"""Vectors of columns for contractions of 3 rows up to two thirds of the most rows, if columns are packed in panels."""

VECTORS_OF_FEW_ROWS = 4
"""Vectors of columns of a contraction of one or two rows."""

SHORT_COPY = 2
"""Up to this many blocks of rows read an operand in place, even if the operand's rows share sets of the cache."""


class NotEmittedError(Exception):
    """A block graph with these sizes can't be emitted as a tile program; the text says why."""


def emit(
    computation: Named, ways: Expressions, graph: BlockGraph, sizes: BlockSizes, inputs: Sequence[tuple[int, ...]]
) -> TileProgram:
    """Return the tile program of a block graph.

    Raises:
        NotEmittedError: a contraction has several axes of rows or of columns.
    """
    return _GraphEmitter(computation, ways, graph, sizes, inputs).program()


class _GraphEmitter(Frame):
    def __init__(
        self,
        computation: Named,
        ways: Expressions,
        graph: BlockGraph,
        sizes: BlockSizes,
        inputs: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(computation, ways, sizes, inputs)
        self.graph = graph
        self.makers = {step.result: step for step in graph.steps}
        self.readers: dict[GraphOperand, list[BlockStep]] = {}
        for step in graph.steps:
            for operand in step.operands:
                self.readers.setdefault(operand, []).append(step)
        self.tiles: dict[GraphOperand, Tile] = {}
        self.factors: dict[int, Tile] = {}
        self.carried: list[str] = []
        self.steps: dict[LoopPhase, list[Step]] = {phase: [] for phase in LoopPhase}

    def program(self) -> TileProgram:
        for step in self.graph.steps:
            self._emit(step)
        before, turn, after = (tuple(self.steps[phase]) for phase in LoopPhase)
        if self.graph.loop:
            axis = Axis(self._outer(self.graph.loop), self._count(self.graph.loop))
            before = (*before, Loop(axis, tuple(dict.fromkeys(self.carried)), turn))
        grid = tuple(
            Axis(self._outer(axis), self._count(axis))
            for axis in self.computation.result
            if axis and self._count(axis) > 1
        )
        stage = Stage(grid or (Axis("g", 1),), (*before, *after))
        return TileProgram((*self._memory(), *self.buffers), (stage,))

    def _place(self, operand: GraphOperand) -> At | None:
        """Return where a value is stored: in a tile or an input; None if the steps that read it compute it."""
        if operand in self.tiles:
            return self._at(self.tiles[operand])
        return self._input_at(operand.expression) if operand.expression in self.leaves else None

    # Steps

    def _site(self, step: BlockStep) -> LoopPhase:
        return LoopPhase.TURN if step.is_carried else step.result.phase

    def _emit(self, step: BlockStep) -> None:
        site = self.steps[self._site(step)]
        match step.kind:
            case StepKind.CONTRACT:
                self._contract(step, site)
            case StepKind.REDUCE if self._is_nested(step):
                return  # its reader reduces along both axes
            case StepKind.REDUCE:
                self._reduce(step, site)
            case StepKind.APPLY if self._is_goal(step.result):
                self._store_output(step.result, site)
                return
            case StepKind.APPLY if self._is_tile(step):
                tile = self._tile("t", self._order_of(step.result))
                site.append(self._pass_of(step, self._nest(tile.order), [(self._at(tile), "")]))
                self.tiles[step.result] = tile
            case StepKind.APPLY:
                pass  # the steps that read it compute it
            case _:
                assert_never(step.kind)
        if self._is_goal(step.result):
            self._store_output(step.result, site if not step.is_carried else self.steps[LoopPhase.AFTER])

    def _is_goal(self, operand: GraphOperand) -> bool:
        last = self.graph.steps[-1].result
        return operand.expression == self.ways.goal and operand == last

    def _is_tile(self, step: BlockStep) -> bool:
        readers, own = self.readers.get(step.result, []), set(self._axes_of(step.result))
        ops = {x.op for x in step.body}
        if len(readers) > 1 and ops & set(TRANSCENDENTAL):
            return True
        return any(
            reader.kind is StepKind.CONTRACT or self._site(reader) != self._site(step) or self._read_axes(reader) != own
            for reader in readers
        )

    def _read_axes(self, step: BlockStep) -> set[str]:
        return {axis for x in step.operands for axis in self.ways.axes[x.expression]}

    def _order_of(self, operand: GraphOperand) -> tuple[str, ...]:
        """Return the axes of a tile, with the columns last if it is a second operand."""
        axes = self._axes_of(operand)
        for reader in self.readers.get(operand, []):
            if reader.kind is StepKind.CONTRACT:
                a, b, _, _ = self._sides(reader)
                if operand == b and operand != a:
                    return (reader.axis, *(axis for axis in axes if axis != reader.axis))
        return axes

    def _store_output(self, operand: GraphOperand, site: list[Step]) -> None:
        axes = self._nest([axis for axis in self.computation.result if axis])
        ops = _Ops(self)
        value = ops.computed(operand)
        sink = self._output_at()
        site.append(Pass(axes, _vector(axes), tuple(ops.ops), (Store(sink.buffer, sink.index, value),)))

    def _pass_of(self, step: BlockStep, axes: tuple[Axis, ...], sinks: Sequence[tuple[At, str]]) -> Pass:
        ops = _Ops(self)
        value = ops.computed(step.result) if step.kind is StepKind.APPLY else ops.reduced(step)
        found = tuple(
            Accumulate(at.buffer, at.index, value, op) if op else Store(at.buffer, at.index, value) for at, op in sinks
        )
        return Pass(axes, _vector(axes), tuple(ops.ops), found)

    def _filled(self, tile: Tile, number: float, axes: tuple[Axis, ...]) -> Pass:
        at, whole = self._at(tile), tuple(replace(axis, ragged=None) for axis in axes)
        return Pass(whole, _vector(whole), (Literal("x0", F32, number),), (Store(at.buffer, at.index, "x0"),))

    # Reductions

    def _is_nested(self, step: BlockStep) -> bool:
        """Return whether a reduction is merged into the reduction that reads it."""
        (reader, *others) = self.readers.get(step.result, [step])
        is_like = reader.kind is StepKind.REDUCE and (reader.op, reader.body) == (step.op, ())
        return is_like and reader != step and not others and not step.is_carried and not reader.is_carried

    def _chain(self, step: BlockStep) -> list[BlockStep]:
        """Return a reduction and those that are merged into it, the innermost last."""
        chain = [step]
        while not chain[-1].body and (maker := self.makers.get(chain[-1].operands[0])) and self._is_nested(maker):
            chain.append(maker)
        return chain

    def _reduce(self, step: BlockStep, site: list[Step]) -> None:
        chain, op = self._chain(step), step.op.removeprefix("reduce_")
        inner, order = chain[-1], self._in_tile(self._axes_of(step.result))
        axes, reduced = self._nest(order), [self._inner(one.axis, True) for one in chain]
        tile = self._tile("r", order)
        self.tiles[step.result] = tile
        part = self._tile("part", order) if step.is_carried else tile
        collect = self._pass_of(inner, (*axes, *reduced), [(self._at(part), op)])
        vector = inner.axis if self._is_along(inner) or axes[-1].extent == 1 else axes[-1].name
        site.append(replace(collect, vector=vector if self._block(inner.axis) > 1 else _vector(axes)))
        if not step.is_carried:
            return
        self.carried.append(tile.name)
        start = LOWEST if op == "max" else 0.0
        self.steps[LoopPhase.BEFORE].append(self._filled(tile, start, axes))
        site.append(self._updated(step, tile, part, axes, op))

    def _leaves_under(self, step: BlockStep) -> Iterator[AxisTerm]:
        """Yield the inputs that a step reads, directly or through steps that are not tiles."""
        for operand in step.operands:
            if operand in self.tiles:
                continue
            if operand.expression in self.leaves:
                yield self.leaves[operand.expression]
            elif operand in self.makers:
                yield from self._leaves_under(self.makers[operand])

    def _is_along(self, step: BlockStep) -> bool:
        """Return whether the reduced elements are adjacent in memory along the reduced axis."""
        for operand in step.operands:
            if operand in self.tiles and step.axis in self.tiles[operand].order:
                return self.tiles[operand].order[-1] == step.axis
        found = [leaf.places[-1] for leaf in self._leaves_under(step) if step.axis in leaf.axes]
        return all(found) and (not found or found[0] == step.axis)

    def _updated(self, step: BlockStep, tile: Tile, part: Tile, axes: tuple[Axis, ...], op: str) -> Pass:
        """Return the pass that combines the partial result of an iteration with that of the earlier iterations."""
        at, other = self._at(tile), self._at(part)
        ops: list[TileOp] = [Load("x0", F32, at.buffer, at.index), Load("x1", F32, other.buffer, other.index)]
        if op == "max":
            factor = self._tile("f", tile.order)
            running = GraphOperand(step.result.expression, LoopPhase.TURN)
            self.tiles[running], self.factors[running.expression] = tile, factor
            ops += [Apply("x2", F32, "max", ("x0", "x1")), Apply("x3", F32, "sub", ("x0", "x2"))]
            ops += [Apply("x4", F32, "exp", ("x3",))]
            changed = self._at(factor)
            sinks = (Store(at.buffer, at.index, "x2"), Store(changed.buffer, changed.index, "x4"))
            return Pass(axes, _vector(axes), tuple(ops), sinks)
        old = "x0"
        if step.follows >= 0:
            factor_at = self._at(self._factor(step))
            ops += [Load("x2", F32, factor_at.buffer, factor_at.index), Apply("x3", F32, "mul", ("x0", "x2"))]
            old = "x3"
        ops.append(Apply("x4", F32, "add", (old, "x1")))
        return Pass(axes, _vector(axes), tuple(ops), (Store(at.buffer, at.index, "x4"),))

    def _factor(self, step: BlockStep) -> Tile:
        return self.factors[step.follows]

    # Contractions

    def _sides(self, step: BlockStep) -> tuple[GraphOperand, GraphOperand, str, str]:
        """Return the first and second operand of a contraction, and the axes of rows and columns ("" if absent)."""
        kept = self._in_tile(self._axes_of(step.result))
        x, y = step.operands
        columns = kept[-1] if kept else ""
        a, b = (x, y) if not columns or columns in self.ways.axes[y.expression] else (y, x)
        rows = kept[:-1]
        if len(rows) > 1 or (columns and columns in self.ways.axes[a.expression]):
            raise NotEmittedError("a contraction has several axes of rows, or one of both operands")
        if rows and rows[0] in self.ways.axes[b.expression]:
            raise NotEmittedError("both operands have the axis of the rows")
        return a, b, rows[0] if rows else "", columns

    def _contract(self, step: BlockStep, site: list[Step]) -> None:
        a, b, row, column = self._sides(step)
        order = [axis for axis in (row, column) if axis]
        i, j = self._nest(order)
        if self._block(step.axis) == 1:
            raise NotEmittedError("a contraction has one term")
        p = self._inner(step.axis, True)
        tile = self._tile("c", order, is_wide=True)
        self.tiles[step.result] = tile
        first, second = self._place(a), self._second(b, step.axis, column, i, self._packing_site(b))
        if first is None or second is None:
            raise NotEmittedError("an operand of a contraction is in no tile")
        if not step.is_carried:
            site.append(self._filled(tile, 0.0, (i, j)))
        else:
            self.steps[LoopPhase.BEFORE].append(self._filled(tile, 0.0, (i, j)))
            self.carried.append(tile.name)
        rescale = None
        if step.follows >= 0:
            factor = self._factor(step)
            if set(factor.order) - {row}:
                raise NotEmittedError("factors of columns rescale a contraction")
            rescale = self._at(factor)
        contract = Contract(
            (i, j, p), self._at(tile), first, second, Product.F32, rescale, registers=self._registers(i, second)
        )
        site.append(contract)

    def _registers(self, i: Axis, second: At) -> Registers:
        """Return the registers of a contraction: a strip of columns is as wide as a panel of a packed input."""
        is_input = second.buffer.startswith("i")
        width = self.sizes.packed.get(int(second.buffer[1:])) if is_input else None
        vectors = width // self.sizes.lanes if width else VECTORS if i.extent > 2 else VECTORS_OF_FEW_ROWS
        return Registers(rows_together(i.extent, self.sizes.lanes), vectors, is_input)

    def _packing_site(self, operand: GraphOperand) -> list[Step]:
        return self.steps[operand.phase]

    def _second(self, operand: GraphOperand, axis: str, column: str, i: Axis, site: list[Step]) -> At | None:
        """Return where the second operand is read: in place, or in panels."""
        at = self._place(operand)
        if at is None or not column or (operand.expression in self.leaves and self._is_packed(operand)):
            return at
        row_step = at.index.coefficient(axis) or 0
        is_near = row_step % PAGE_ELEMENTS != 0 or i.extent <= SHORT_COPY * FEW_ROWS or operand in self.tiles
        if at.index.coefficient(column) == 1 and is_near:
            return at
        p, j = self._inner(axis), self._inner(column)
        layout = self._panels(j, i)
        load = (Load("x0", F32, at.buffer, at.index),)
        is_square = row_step == 1 and at.index.coefficient(column) != 1 and min(p.extent, j.extent) >= self.sizes.lanes
        tile = self._tile("b", (axis, column), is_wide=True, layout=() if is_square else layout)
        packed = self._at(tile)
        across = p.name if is_square and self.sizes.lanes > 1 else ""
        site.append(Pass((p, j), column, load, (Store(packed.buffer, packed.index, "x0"),), across))
        return packed

    def _panels(self, j: Axis, i: Axis) -> tuple[Panels, ...]:
        """Return the layout of packed columns: panels of strips, or of vectors if strips don't fill them."""
        lanes = self.sizes.lanes
        strip = self._registers(i, At("t", ZERO)).vectors * lanes
        return (Panels(j.extent, strip if j.extent % strip == 0 else lanes),) if j.extent % lanes == 0 else ()

    def _is_packed(self, operand: GraphOperand) -> bool:
        return self.leaves[operand.expression].position in self.sizes.packed


def rows_together(rows: int, lanes: int) -> int:
    """Return how many rows a contraction has in registers, so that all its blocks of rows have about the same size."""
    return -(-rows // -(-rows // ROWS.get(lanes, FEW_ROWS)))


def vectors_of_panels(rows: int, columns: int, lanes: int, is_whole: bool) -> int:
    """Return how many vectors of columns of a packed operand are multiplied together; 0 if it can't be packed.

    `lanes`: elements of a vector. `is_whole`: whether these are all columns; otherwise they must fill whole panels.
    """
    is_wide = 3 <= rows_together(rows, lanes) <= ROWS.get(lanes, FEW_ROWS) * VECTORS // WIDE_VECTORS
    choices = (WIDE_VECTORS, VECTORS) if is_wide else (VECTORS,)
    return next((vectors for vectors in choices if is_whole or columns % (vectors * lanes) == 0), 0)


def _vector(axes: tuple[Axis, ...]) -> str:
    return axes[-1].name if axes and axes[-1].extent > 1 else ""


class _Ops(Operations):
    """The operations of a pass."""

    def __init__(self, emitter: _GraphEmitter) -> None:
        super().__init__()
        self.emitter = emitter
        self.known: dict[GraphOperand, str] = {}

    def computed(self, operand: GraphOperand) -> str:
        """Return the name of a value, read from its tile or computed."""
        if operand not in self.known:
            self.known[operand] = self._made(operand)
        return self.known[operand]

    def reduced(self, step: BlockStep) -> str:
        """Return the name of the element that a reduction accumulates."""
        return self._body(step) if step.body else self.computed(step.operands[0])

    def _made(self, operand: GraphOperand) -> str:
        emitter = self.emitter
        if operand.expression in emitter.ways.numbers:
            return self.literal(F32, emitter.ways.numbers[operand.expression])
        at = emitter._place(operand)
        if at is not None:
            return self.load(F32, at.buffer, at.index)
        return self._body(emitter.makers[operand])

    def _body(self, step: BlockStep) -> str:
        outside = {x.expression: x for x in step.operands}
        inside: dict[int, str] = {}

        def argument(expression: int) -> str:
            return inside[expression] if expression in inside else self.computed(outside[expression])

        name = ""
        for one in step.body:
            name = inside[one.result] = self.apply(F32, one.op, *(argument(a) for a in one.arguments))
        return name
