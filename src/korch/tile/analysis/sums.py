"""Fuses a contraction with the passes before and after it, so that its sums stay in registers.

If a pass of zeros precedes a contraction and a pass over the same elements follows it, the sums need no tile: they
begin as zeros, and the operations of the pass take them from registers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.tile.ir.index import add, scale, substitute, var
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
    Step,
    Store,
    TileProgram,
    read_by,
    refused,
)


@dataclass(frozen=True, slots=True)
class Sums:
    """A contraction with the passes that are computed in its registers."""

    step: Contract  # the contraction
    is_zeroed: bool = False  # whether the step before is a pass of zeros, which then is not printed
    finish: Pass | None = None  # the following pass that takes the sums; None if they are stored to the tile


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
    """Return the batch axes: kept axes of rows that both operands have, that guards depend on, or around a cut one.

    If both operands depend on the columns, or terms are left out, these are all axes of rows but the last one. In
    contractions of split operands, guards limit the rows and do not make batch axes.
    """
    *rows, _ = (axis for axis in step.axes if not axis.is_reduced)
    if is_by_lanes(step) or leaves_out(step):
        return rows[:-1]
    guards = () if step.product is Product.SPLIT else step.where
    named = step.b.index.variables.union(*(guard.expr.variables for guard in guards))
    cut = max((i for i, axis in enumerate(rows) if axis.ragged), default=0) if step.product is not Product.SPLIT else 0
    return [axis for i, axis in enumerate(rows) if axis.name in named or i < cut]


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
