"""A trimmed stage -> how threads share its needed coordinates evenly, though its tasks are many coordinates each.

Of 197 rows in tasks of 128, one of two threads would compute 128 and the other 69. So threads begin and end within
tasks: a task of some coordinates is computed as one of those before it, with all buffers that it indexes moved on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from korch.tile.index import Expr, Ranges, var
from korch.tile.loops import guards_of
from korch.tile.program import Contract, Inside, Pass, Product, Stage, parts_of
from korch.tile.region import Access, accesses

SPLIT_ROWS, PRODUCT_ROWS = 16, 6
"""Rows of a tile of matrix units, and rows that contractions hold in registers."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How threads share the coordinates of a stage.

    Attributes:
        parameter: how many there are.
        most: of a task.
        unit: threads begin at multiples of it.
        steps: how many elements each coordinate moves a buffer on.
    """

    parameter: str
    most: int
    unit: int
    steps: Mapping[str, int]


def shares_of(stage: Stage, parameters: Ranges) -> Shares | None:
    """Return how threads share the coordinates of a stage; None if they can only share its tasks.

    Args:
        stage: one whose number of tasks depends on a parameter.
        parameters: their ranges.
    """
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
    steps = _steps(stage, tasks.name, {axis.name for axis in inner}, most)
    return Shares(names[0], most, _unit(stage), steps) if steps else None


def _steps(stage: Stage, tasks: str, inner: set[str], most: int) -> dict[str, int]:
    """Return how far each buffer that a task indexes moves on with a coordinate; nothing if one moves otherwise."""
    found: dict[str, set[int | None]] = {}
    for access in accesses(stage):
        found.setdefault(access.buffer, set()).add(_step(access, tasks, inner, most))
    guards = [guard for _, leaf in stage.leaves for guard in _guards(leaf)]
    has_guard = any(tasks in guard.expr.variables for guard in guards)
    if has_guard or not all(len(own) == 1 and None not in own for own in found.values()):
        return {}
    return {buffer: step for buffer, (step,) in sorted(found.items()) if step}


def _step(access: Access, tasks: str, inner: set[str], most: int) -> int | None:
    """Return how far an access moves on with a coordinate: 0 if it does not depend on the task, None if otherwise."""
    if tasks not in access.index.variables:
        return 0
    own = [axis.name for axis in access.axes if axis.name in inner]
    return (step_of(access, {tasks: most, own[0]: 1}) or None) if len(own) == 1 else None


def step_of(access: Access, axes: Mapping[str, int]) -> int | None:
    """Return how many elements an access moves on with a coordinate; None if not by the same number with each axis.

    Args:
        access: to a buffer.
        axes: by name, how many coordinates a value of an axis stands for.
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
