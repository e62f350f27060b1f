"""Fuses a contraction with the passes before and after it, so that its sums stay in registers.

If a pass of zeros precedes a contraction and a pass over the same elements follows it, the sums need no
tile: the micro-kernel starts from zeros and passes each vector of sums to a function that is printed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from korch.tile.cpp.fetch import Fetches
from korch.tile.cpp.loops import LoopPrinter
from korch.tile.cpp.numbers import number
from korch.tile.cpp.text import C_TYPE, CppWriter, loop_end
from korch.tile.ir.index import Expr, Ranges, add, scale, substitute, var, vector_step
from korch.tile.ir.passes import map_indices
from korch.tile.ir.program import (
    Axis,
    Contract,
    Inside,
    Level,
    Literal,
    Load,
    Loop,
    Pass,
    Product,
    Select,
    Stage,
    Step,
    Store,
    TileProgram,
    read_by,
    refused,
)


@dataclass(frozen=True, slots=True)
class Sums:
    """A contraction with the passes that are computed in its registers.

    Attributes:
        step: the contraction.
        is_zeroed: whether the step before is a pass of zeros, which then is not printed.
        finish: the following pass that takes the sums; None if they are stored to the tile.
    """

    step: Contract
    is_zeroed: bool = False
    finish: Pass | None = None


def sums_of(program: TileProgram, steps: Sequence[Step]) -> list[Pass | Loop | Sums]:
    """Return the steps of a task or of a loop body, with contractions fused with the passes before and after them."""
    found: list[Pass | Loop | Sums] = []
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if isinstance(step, Pass | Loop):
            found.append(step)
            continue
        if step.rescale is not None or not found or not _is_zero(found[-1], step):
            found.append(Sums(step))
            continue
        after = steps[position] if position < len(steps) else None
        is_finished = isinstance(after, Pass) and _takes(program, after, step, steps[position + 1 :])
        found[-1] = Sums(step, True, after if is_finished and isinstance(after, Pass) else None)
        position += is_finished
    return found


def tiles_in_registers(program: TileProgram, steps: Sequence[Step]) -> set[str]:
    """Return the accumulators that need no memory because their sums stay in registers."""
    found: set[str] = set()
    for step in sums_of(program, steps):
        if isinstance(step, Loop):
            found |= tiles_in_registers(program, step.body)
        elif isinstance(step, Sums) and step.finish is not None:
            found.add(step.step.out.buffer)
    return found


def _same_axes(pass_: Pass, step: Contract) -> bool:
    kept = [(axis.name, axis.size) for axis in step.axes if not axis.is_reduced]
    return [(axis.name, axis.size) for axis in pass_.axes] == kept


def _is_zero(before: Pass | Loop | Sums, step: Contract) -> bool:
    """Return whether a step only sets the accumulator to 0."""
    if (
        not isinstance(before, Pass)
        or before.where != kept_guards(step)
        or not _same_axes(before, step)
        or len(before.sinks) != 1
    ):
        return False
    (sink,) = before.sinks
    value = next(op for op in before.ops if op.name == sink.value)
    is_out = isinstance(sink, Store) and (sink.buffer, sink.index) == (step.out.buffer, step.out.index)
    return is_out and isinstance(value, Literal) and value.value == 0


def _takes(program: TileProgram, after: Pass, step: Contract, rest: Sequence[Step]) -> bool:
    """Return whether a pass reads each sum at its own point only, and no later step needs the sums."""
    out = step.out.buffer
    if program.buffer(out).level is not Level.TILE or not _same_axes(after, step):
        return False
    columns = next(axis.name for axis in reversed(step.axes) if not axis.is_reduced)
    if (
        after.is_reduction
        or after.across
        or after.where != kept_guards(step)
        or after.vector != columns
        or out in read_by(tuple(rest))
    ):
        return False
    if any(sink.buffer == out for sink in after.sinks):
        return False
    for op in after.ops:
        if not isinstance(op, Load | Select):
            continue
        if any(columns in guard.expr.variables for guard in op.guards):
            return False
        if isinstance(op, Load) and op.buffer == out and (op.guards or op.index != step.out.index):
            return False
    return True


def by_row(pass_: Pass, rows: Sequence[Axis], ranges: dict[str, tuple[int, int]]) -> Pass:
    """Return a pass with indices in terms of the row number, so that consecutive rows need no division."""
    long = [axis for axis in rows if axis.extent > 1]
    if len(long) != 2:
        return pass_
    outer, inner = long
    ranges["row"] = (0, outer.extent * inner.extent - 1)
    number = add(var("row"), scale(var(outer.name), -inner.extent))
    return map_indices(pass_, lambda expr: substitute(expr, {inner.name: number}, ranges))


def print_places(out: CppWriter, rows: Sequence[Axis]) -> None:
    """Print the values of the axes of rows, computed from the row number."""
    rest, left = "row", math.prod(axis.extent for axis in rows)
    for axis in rows:  # a row number is split into axes like a task number
        left //= axis.extent
        value = "0" if axis.extent == 1 else rest if left == 1 else f"{rest} / {number(left)}"
        out.line(f"[[maybe_unused]] const long {axis.name} = {value};")
        rest = rest if axis.extent == 1 else f"row % {number(left)}"


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


def is_by_lanes(step: Contract) -> bool:
    """Return whether both operands depend on the columns."""
    *_, columns = (axis for axis in step.axes if not axis.is_reduced)
    return columns.extent > 1 and all(columns.name in at.index.variables for at in (step.a, step.b))


def leaves_out(step: Contract) -> bool:
    """Return whether guards of a contraction of floats, whose columns share the first operand, leave terms out."""
    terms = {axis.name for axis in step.axes if axis.is_reduced}
    is_known = step.product is not Product.SPLIT and not step.product.is_of_bytes and not is_by_lanes(step)
    return is_known and any(guard.expr.variables & terms for guard in step.where)


def batches_of(step: Contract) -> list[Axis]:
    """Return the batch axes: kept axes of rows that both operands have, or that guards depend on.

    If both operands depend on the columns, or terms are left out, these are all axes of rows but the last one. In
    contractions of split operands, guards limit the rows and do not make batch axes.
    """
    *rows, _ = (axis for axis in step.axes if not axis.is_reduced)
    if is_by_lanes(step) or leaves_out(step):
        return rows[:-1]
    guards = () if step.product is Product.SPLIT else step.where
    named = step.b.index.variables.union(*(guard.expr.variables for guard in guards))
    return [axis for axis in rows if axis.name in named]


def kept_guards(step: Contract) -> tuple[Inside, ...]:
    """Return the guards of a contraction that depend only on loops around its rows and columns.

    For split operands, these guards may depend on the outer axis of rows, too.
    """
    batch = {axis.name for axis in (step.axes[:1] if step.product is Product.SPLIT else batches_of(step))}
    inner = {axis.name for axis in step.axes} - batch
    return tuple(guard for guard in step.where if not guard.expr.variables & inner)


def sides_of(step: Contract) -> tuple[list[Axis], Axis, list[Axis]]:
    """Return the axes of rows, the axis of columns and the axes of terms; rows and terms without axes of size 1.

    Raises:
        InvalidGraphError: there are too few or too many axes, or a wrong one is cut, so they can't be printed.
    """
    batch = batches_of(step)
    kept, terms = ([axis for axis in step.axes if axis.is_reduced is of and axis not in batch] for of in (False, True))
    rows, columns = kept[:-1], kept[-1]
    rows = [axis for axis in rows if axis.extent > 1] or rows[-1:]
    terms = [axis for axis in terms if axis.extent > 1] or terms[-1:]
    if not rows or not terms:
        raise refused("only contractions of rows, columns and terms can be printed")
    if len(rows) > 2:
        raise refused("only contractions of at most two axes of rows can be printed")
    if any(axis.ragged for axis in (*rows[1:], *terms[:-1])):
        raise refused("of the rows and terms of a contraction, an inner axis of rows or an outer one of terms is cut")
    return rows, columns, terms


def count_of(rows: Sequence[Axis]) -> str:
    """Return the number of rows of a task, as text."""
    inner = math.prod(axis.extent for axis in rows[1:])
    count = loop_end(rows[0], rows[0].extent)
    return count if inner == 1 else f"{count} * {number(inner)}"


def tails_of(rows: Sequence[Axis], at_once: int) -> list[int]:
    """Return the numbers of rows, below `at_once`, that may remain at the end of a task's rows, largest first."""
    axis, inner = rows[0], math.prod(axis.extent for axis in rows[1:])
    ends = {axis.extent * inner % at_once}
    if axis.ragged is not None:
        total = axis.ragged[1]
        if isinstance(total, int):
            ends.add(total % axis.extent * inner % at_once)
        else:
            ends |= set(range(1, at_once))
    return sorted(ends - {0}, reverse=True)
