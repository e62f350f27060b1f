"""Divides the needed coordinates of a stage evenly among threads, though each task has many of them.

With 197 rows in tasks of 128, one of two threads would compute 128 rows and the other 69. So a thread's range may
begin and end inside a task: any run of coordinates is computed as the first task, with the base pointers of all
buffers that it indexes advanced to the first coordinate.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from korch.tile.check.accesses import Access, accesses
from korch.tile.ir.index import ROWS, ZERO, Expr, Ranges, add, entry, remainder, substitute, var
from korch.tile.ir.parameters import PART
from korch.tile.ir.passes import guards_of
from korch.tile.ir.program import Contract, Inside, Load, Loop, Pass, Product, Stage, Step, parts_of, written_by

SPLIT_ROWS, PRODUCT_ROWS = 16, 6
"""Rows of a tile of the matrix units, and rows that other contractions hold in registers."""


PLACE = "place"
"""The variable that holds the position of the first row of the row table."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How the coordinates of a stage are divided among threads."""

    parameter: str  # the parameter that holds the number of coordinates
    most: int  # the maximum number of coordinates of a task
    unit: int  # the ranges of threads begin at multiples of it
    steps: Mapping[str, int]  # by buffer, by how many elements the base pointer advances per coordinate
    tasks: str  # the grid axis of the tasks


def by_rows(stage: Stage, shares: Shares) -> Stage | None:
    """Return a stage whose first task looks up its rows in a table; None if that is not possible.

    The rows combine two coordinates, of which only part of the inner one is needed. The base pointers of buffers are
    advanced to the first row of the table; indices that restart with each task are computed from a row's position.
    """
    axes = {axis for _, step in stage.leaves for axis in step.axes}
    inner = {axis.name for axis in axes if axis.ragged is not None and axis.ragged[0] == shares.tasks}
    loops = {loop.axis for around, _ in stage.leaves for loop in around}
    if inner & {axis.name for axis in loops} or any(axis.is_reduced and axis.name in inner for axis in axes):
        return None
    known = (axis for axis in (*stage.grid, *loops, *axes) if isinstance(axis.size, int))
    ranges = {PLACE: (0, ROWS[-1]), **{axis.name: (0, max(0, axis.extent - 1)) for axis in known}}
    written = written_by(stage.steps)

    def moved(buffer: str, expr: Expr) -> Expr:
        rows = {name: entry(ROWS, var(name), ranges) for name in inner & expr.variables}
        if shares.tasks in expr.variables:
            return substitute(expr, {shares.tasks: ZERO, **rows}, ranges)
        if buffer in written:
            return expr
        places = {name: remainder(add(var(PLACE), row), shares.most, ranges) for name, row in rows.items()}
        return substitute(expr, places, ranges)

    for _, step in stage.leaves:
        if isinstance(step, Contract):
            read = [at for at in (step.out, step.a, step.b, step.rescale, step.factor) if at is not None]
            if any(at.index != moved(at.buffer, at.index) for at in read):
                return None  # contractions require consecutive rows
        elif not inner.isdisjoint({step.vector, step.across}):
            return None
    return replace(stage, steps=tuple(_moved(step, moved) for step in stage.steps))


def _moved(step: Step, moved: Callable[[str, Expr], Expr]) -> Step:
    match step:
        case Loop():
            return replace(step, body=tuple(_moved(inner, moved) for inner in step.body))
        case Pass():
            ops = (replace(o, index=moved(o.buffer, o.index)) if isinstance(o, Load) else o for o in step.ops)
            sinks = (replace(sink, index=moved(sink.buffer, sink.index)) for sink in step.sinks)
            return replace(step, ops=tuple(ops), sinks=tuple(sinks))
    return step


def shares_of(stage: Stage, parameters: Ranges) -> Shares | None:
    """Return how the coordinates of a stage are divided among threads; None if only whole tasks can be."""
    counted = [axis for axis in stage.grid if isinstance(axis.size, Expr)]
    if stage.sort is not None or len(counted) != 1 or math.prod(a.extent for a in stage.grid if a not in counted) != 1:
        return None
    (tasks,) = counted
    axes = {axis for loops, step in stage.leaves for axis in (*(loop.axis for loop in loops), *step.axes)}
    inner = {axis for axis in axes if axis.ragged is not None and axis.ragged[0] == tasks.name}
    parts, ends = {axis.extent for axis in inner}, {axis.ragged[1] for axis in inner if axis.ragged is not None}
    if len(parts) != 1 or len(ends) != 1:
        return None
    (most,), (end,) = parts, ends
    names = [name for name in parameters if end == var(name)]
    if not names or tasks.size != parts_of(end, most, parameters):
        return None
    others = [axis.ragged[1] for axis in axes - inner if axis.ragged is not None]
    guarded = [guard.expr for _, leaf in stage.leaves for guard in _guards(leaf)]
    if any(names[0] in expr.variables for expr in (*others, *guarded) if isinstance(expr, Expr)):
        return None  # a share's end would also end another axis
    steps = _steps(stage, tasks.name, {axis.name for axis in inner}, most, is_by_rows=PART in parameters)
    return Shares(names[0], most, _unit(stage), steps, tasks.name) if steps else None


def _steps(stage: Stage, tasks: str, inner: set[str], most: int, *, is_by_rows: bool) -> dict[str, int]:
    """Return by how many elements each buffer advances per coordinate; empty if one has no constant step."""
    found: dict[str, set[int | None]] = {}
    own = written_by(stage.steps)
    for access in accesses(stage):
        # For example, a row's position modulo 32 in a task of 64 rows depends on the row, but not on the task.
        is_within = tasks not in access.index.variables and access.buffer not in own
        is_cyclic = is_within and not inner.isdisjoint(access.index.variables)
        found.setdefault(access.buffer, set()).add(
            None if is_cyclic and not is_by_rows else _step(access, tasks, inner, most)
        )
    guards = [guard for _, leaf in stage.leaves for guard in _guards(leaf)]
    has_guard = any(not guard.expr.variables.isdisjoint({tasks, *inner}) for guard in guards)
    if has_guard or not all(len(own) == 1 and None not in own for own in found.values()):
        return {}
    return {buffer: step for buffer, (step,) in sorted(found.items()) if step}


def _step(access: Access, tasks: str, inner: set[str], most: int) -> int | None:
    """Return by how many elements an access advances per coordinate: 0 if not at all, None if the step varies."""
    if tasks not in access.index.variables:
        return 0
    own = [axis.name for axis in access.axes if axis.name in inner]
    return (step_of(access, {tasks: most, own[0]: 1}) or None) if len(own) == 1 else None


def step_of(access: Access, axes: Mapping[str, int]) -> int | None:
    """Return by how many elements an access advances per coordinate; None if this differs between the axes.

    `axes`: by name of an axis, by how many coordinates a step along it advances.
    """
    slopes = {name: access.index.coefficient(name) for name in axes}
    if any(slope is None or slope % axes[name] for name, slope in slopes.items()):
        return None
    steps = {slope // axes[name] for name, slope in slopes.items() if slope is not None}
    return steps.pop() if len(steps) == 1 else None


def _guards(step: Pass | Contract) -> Iterable[Inside]:
    return step.where if isinstance(step, Contract) else guards_of(step)


def _unit(stage: Stage) -> int:
    products = [step.product for _, step in stage.leaves if isinstance(step, Contract)]
    return SPLIT_ROWS if Product.SPLIT in products else PRODUCT_ROWS if products else 1
