"""Fuses a contraction with the passes before and after it, so that its sums stay in registers.

If a pass of zeros precedes a contraction and a pass over the same elements follows it, the sums need no
tile: the micro-kernel starts from zeros and passes each vector of sums to a function that is printed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from korch.tile.analysis.fetch import Fetches
from korch.tile.analysis.sums import Sums, batches_of, by_row
from korch.tile.cpp.loops import LoopPrinter
from korch.tile.cpp.text import C_TYPE, CppWriter, loop_end
from korch.tile.ir.index import Expr, Ranges, substitute, vector_step
from korch.tile.ir.program import Axis, Load, Stage


def print_places(out: CppWriter, rows: Sequence[Axis]) -> None:
    """Print the values of the axes of rows, computed from the row number."""
    rest, left = "row", math.prod(axis.extent for axis in rows)
    for axis in rows:  # a row number is split into axes like a task number
        left //= axis.extent
        value = "0" if axis.extent == 1 else rest if left == 1 else f"{rest} / {left}"
        out.line(f"[[maybe_unused]] const long {axis.name} = {value};")
        rest = rest if axis.extent == 1 else f"row % {left}"


class FinishPrinter(LoopPrinter):
    """Prints the function that takes a vector of sums."""

    def __init__(self, out: CppWriter, stage: Stage, sums: Sums, given: Set[str]) -> None:
        """Prepare the function; `stage` has the axes around the contraction, and the pass."""
        (pass_,) = stage.passes
        super().__init__(out, stage, pass_, given)
        *rows, self.columns = pass_.axes
        batch = {axis.name for axis in batches_of(sums.step)}
        self.rows = [axis for axis in rows if axis.name not in batch]
        self.buffer = sums.step.out.buffer
        self.fetches = Fetches()
        self.spans = {}
        self.pass_ = by_row(self.pass_, self.rows, self.ranges)

    def run(self, fetches: bool) -> str:
        """Print the function and, if `fetches`, one that prefetches the lines of its results; return their names.

        Both capture by value, so stores can't change what they read.
        """
        where = f"[[maybe_unused]] long row, [[maybe_unused]] long {self.columns.name}"
        name, values = self._values(where)
        for sink in self.pass_.sinks:
            index = substitute(sink.index, {}, self.ranges)
            self._store(sink.buffer, index, values[sink.value], self.columns.name, "W")
        self.out.close("};")
        if not fetches:
            return name
        sink = self.pass_.sinks[0]
        ahead = self._function("", where)
        self.out.line(
            f"__builtin_prefetch({sink.buffer} + {self.out.expr(substitute(sink.index, {}, self.ranges))}, 1);"
        )
        self.out.close("};")
        return f"{name}, {ahead}"

    def feed(self, around: Sequence[str]) -> str:
        """Print the function that returns the only result, given the values of enclosing axes; return its name."""
        (sink,) = self.pass_.sinks
        where = ", ".join(f"[[maybe_unused]] long {name}" for name in (*around, "row", self.columns.name))
        name, values = self._values(where)
        self.out.line(f"return {values[sink.value]};")
        self.out.close("};")
        return name

    def _values(self, where: str) -> tuple[str, Mapping[str, str]]:
        """Print the beginning of a function of a vector of sums; return its name, and the texts of its values."""
        kind = C_TYPE[self.out.program.buffer(self.buffer).dtype]
        name = self._function("<int W>", f"[[maybe_unused]] korch::Vec<{kind}, W> sums, {where}")
        return name, self._ops(self.ranges, self.columns.name, "W")

    def _function(self, template: str, parameters: str) -> str:
        name = f"finish{self.out.lambdas}"
        self.out.lambdas += 1
        self.out.open(f"const auto {name} = [=]{template}({parameters}) __attribute__((always_inline))")
        print_places(self.out, self.rows)
        return name

    def _step(self, index: Expr, variable: str) -> int | None:
        # A vector of sums is full and begins at a multiple of the lanes, or it is a single element.
        return vector_step(index, variable, self.out.lanes)

    def _load(self, op: Load, ranges: Ranges, variable: str, width: str) -> str:
        if op.buffer == self.buffer:
            return "sums"
        return super()._load(op, ranges, variable, width)


def count_of(rows: Sequence[Axis]) -> str:
    """Return the number of rows of a task, as text."""
    inner = math.prod(axis.extent for axis in rows[1:])
    count = loop_end(rows[0], rows[0].extent)
    return count if inner == 1 else f"{count} * {inner}"
