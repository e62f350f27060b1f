"""Prints what takes the sums of a contraction, a vector at a time."""

from collections.abc import Mapping
from dataclasses import replace

from korch.tile.analysis.sums import by_row, sides_of
from korch.tile.ir.index import Expr, add, substitute, var
from korch.tile.ir.index import constant as number
from korch.tile.ir.passes import map_indices
from korch.tile.ir.program import Axis, Contract, Load, Pass, Stage
from korch.tile.llvm.emit import SsaValue
from korch.tile.llvm.index import Env
from korch.tile.llvm.memory import Place
from korch.tile.llvm.points import KernelContext, PointPrinter, PointVector


class SumsPrinter(PointPrinter):
    """Prints the pass after a contraction at vectors of sums.

    A block of sums has one first row and one first column, whose values are in the environment. The indices of each
    vector are the pass's with the distances to these added, so that they become offsets in instructions.

    Attributes:
        has_groups: whether something depends on the outer one of two axes of rows other than by the row number.
    """

    def __init__(self, context: KernelContext, grid: tuple[Axis, ...], step: Contract, pass_: Pass, env: Env) -> None:
        axes = {axis.name: axis for axis in step.axes}
        pass_ = replace(pass_, axes=tuple(axes[axis.name] for axis in pass_.axes if axis.name in axes))
        super().__init__(context, Stage(grid, (pass_,)), pass_, env)
        self.out = step.out.buffer
        self.rows, self.columns, _ = sides_of(step)
        self.single = {axis.name: self.emit.index(0) for axis in step.axes if axis.extent == 1}
        ranges = dict(self.ranges)
        self.base_pass = by_row(pass_, self.rows, ranges)
        self.ranges = ranges
        self.row = "row" if len(self.rows) == 2 else self.rows[0].name
        used: set[str] = set()
        map_indices(self.base_pass, lambda e: used.update(e.variables) or e)  # type: ignore[func-returns-value]
        self.has_groups = len(self.rows) == 2 and self.rows[0].name in used
        self._moved: dict[tuple[int, int], Pass] = {}

    def points(self, row: SsaValue, group: SsaValue, column: SsaValue, mask: SsaValue | None) -> PointVector:
        """Return the vector of points of the first row and the first column of a block.

        `group`: the value of the outer axis of rows, if `has_groups`. `mask`: which lanes exist; None for all.
        """
        own = {**self.single, self.columns.name: column, self.row: row}
        if self.has_groups:
            own[self.rows[0].name] = group
        return PointVector({**self.env, **own}, self.ranges, self.columns.name, self.context.lanes, mask, True)

    def move(self, row: int, column: int) -> None:
        """Take the sums at a distance to the first row and column of a block."""
        if (row, column) not in self._moved:
            moves = {name: add(var(name), number(n)) for name, n in ((self.row, row), (self.columns.name, column)) if n}
            self._moved[row, column] = map_indices(self.base_pass, lambda e: substitute(e, moves, self.ranges))
        self.pass_ = self._moved[row, column]
        self.ops = {op.name: op for op in self.pass_.ops}

    def take(self, sums: SsaValue, points: PointVector) -> None:
        """Print the operations on a vector of sums, and their stores."""
        self.squares = {op.name: sums for op in self.pass_.ops if isinstance(op, Load) and op.buffer == self.out}
        values = self.values(points)
        for sink in self.pass_.sinks:
            self.store(sink.buffer, sink.index, values[sink.value], points)

    def fetch(self, points: PointVector) -> None:
        """Print the prefetch of the cache line that the first result of a vector is stored to."""
        sink = self.pass_.sinks[0]
        self.emit.prefetch(self.place(sink.buffer, substitute(sink.index, {}, points.ranges), points.env).at)

    def place(self, buffer: str, index: Expr, env: Mapping[str, SsaValue]) -> Place:
        """Print the address of an element, which is read after the multiply-adds: they need all registers."""
        return replace(super().place(buffer, index, env), floor=self.emit.depth)
