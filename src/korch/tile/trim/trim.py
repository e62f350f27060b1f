"""Trims a tile program for the largest size of a range to a smaller size that is known at run time only.

A smaller size needs only the first elements, along one axis, of the outputs that the program for the largest size
writes. The trimmed program runs a subset of the points of the whole one: the tasks whose elements are needed, and in
the last of these tasks only the needed rows. So it needs no checks of its own, and strides, blocks and inner loops
stay constant. Elements that it does not compute have undefined contents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from korch.system.alignment import ceil_div, round_up
from korch.target import EDGE
from korch.tile.check.accesses import Access, accesses
from korch.tile.check.digits import ranges_of_axes
from korch.tile.ir.index import Expr, Ranges, add, bounds, constant, scale, substitute, var
from korch.tile.ir.passes import map_step
from korch.tile.ir.program import (
    Axis,
    Contract,
    Level,
    Loop,
    Parameter,
    Pass,
    Product,
    Stage,
    Step,
    TileProgram,
    parts_of,
    written_by,
)
from korch.tile.trim.shares import shares_of, step_of

LIVE = "live"
"""The parameter of a trimmed program: the number of needed coordinates."""

TASKS_PER_THREAD = 8
"""Tasks per thread for the largest size; with this many, smaller sizes are divided evenly, too."""

ROW_STEP = 6
"""The rows of a task are a multiple of this: contractions hold 6 or 12 rows in registers. On matrix units: `EDGE`."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Element i of a buffer is needed if (i // stride) % extent is less than the number of needed coordinates."""

    stride: int
    extent: int


@dataclass(frozen=True, slots=True)
class Count:
    """The number of coordinates needed for a size n: the maximum over terms of floor((times * n + plus) / over).

    Attributes:
        terms: (times, plus, over, step) of each term, which is rounded up to a multiple of its step.
        step: the result is rounded up to a multiple of this, too.
        dimension: the position of n among the sizes.
        rows: for rows that combine two coordinates: the count of the outer one, and the maximum of the inner one.
    """

    terms: tuple[tuple[int, int, int, int], ...] = ((1, 0, 1, 1),)
    step: int = 1
    dimension: int = 0
    rows: tuple[Count, int] | None = None

    def at(self, sizes: Sequence[int]) -> int:
        """Return the count for the sizes of all dimensions."""
        size = sizes[self.dimension]
        most = max(round_up((n * size + plus) // over, step) for n, plus, over, step in self.terms)
        found = round_up(most, self.step)
        return found if self.rows is None else self.rows[0].at(sizes) * min(self.rows[1], found)

    def text(self, sizes: str) -> str:
        """Return the count as a C++ expression; `sizes` is the text of a pointer to the sizes."""
        size = f"{sizes}[{self.dimension}]"
        terms = (_rounded(f"({n} * {size} + {plus}) / {over}", step) for n, plus, over, step in self.terms)
        most = functools.reduce(lambda text, other: f"korch::larger({text}, {other})", terms)
        text = _rounded(most, self.step)
        if self.rows is None:
            return text
        outer, inner = self.rows
        return f"{outer.text(sizes)} * korch::smaller({inner}, {text})"


def _rounded(text: str, step: int) -> str:
    return f"({text} + {step - 1}) / {step} * {step}" if step > 1 else text


def trimmed(program: TileProgram, needed: Mapping[str, Needed], threads: int) -> TileProgram | None:
    """Return a program with the parameter `LIVE`, or None if no stage can be trimmed.

    Args:
        program: the program for the largest size, without parameters.
        needed: by output buffer. All have the same extent; other outputs are needed completely.
        threads: the number of threads that run it.
    """
    extents = {entry.extent for entry in needed.values()}
    if program.parameters or len(extents) != 1 or program.is_sorted:
        return None
    (extent,) = extents
    known, stages = dict(needed), list(program.stages)
    for i, stage in reversed(list(enumerate(stages))):
        known |= _read_in_part(program, stages[i + 1 :], written_by(stage.steps), extent)
        stages[i] = _stage(program, stage, known, extent, threads) or stage
    if tuple(stages) == program.stages:
        return None
    return replace(program, stages=tuple(stages), parameters=(Parameter(LIVE, 1, extent),))


def whole(program: TileProgram) -> TileProgram:
    """Return a program whose grids have the sizes for the largest values of its parameters."""
    ranges = program.parameter_ranges

    def most(axis: Axis) -> Axis:
        return axis if isinstance(axis.size, int) else replace(axis, size=bounds(axis.size, ranges)[1])

    return replace(program, stages=tuple(replace(s, grid=tuple(map(most, s.grid))) for s in program.stages))


def _stage(program: TileProgram, stage: Stage, needed: Mapping[str, Needed], extent: int, threads: int) -> Stage | None:
    """Return a stage that runs the needed tasks only, or None if they can't be determined."""
    levels = {buffer.name: buffer.level for buffer in program.buffers}
    written = {name for name in written_by(stage.steps) if levels[name] is not Level.TILE}
    if not written or not written <= needed.keys():
        return None
    stage = _split(stage, needed)
    for axis in stage.grid:
        part = _part(stage, axis, needed)
        if part is not None and part < extent and math.ceil(extent / part) == axis.extent:  # it covers all coordinates
            break
    else:
        return _looped(stage, needed) or _inside(stage, needed, extent)
    stage = _ragged(stage, axis, part, extent)
    coarse = _of_live(stage, axis, part, needed, extent)
    if part.denominator > 1 or shares_of(coarse, {LIVE: (1, extent)}) is not None:
        return coarse
    finer = _finer(stage, axis, int(part), extent, threads)
    return _of_live(finer[0], axis, Fraction(finer[1]), needed, extent) if finer is not None else coarse


def _of_live(stage: Stage, axis: Axis, part: Fraction, needed: Mapping[str, Needed], extent: int) -> Stage:
    """Return a stage with the tasks for needed coordinates only; each value of a grid axis covers `part` of them."""
    count = parts_of(scale(var(LIVE), part.denominator), part.numerator, {LIVE: (1, extent)})
    steps = stage.steps
    if _ends_in_order(stage, axis, needed):
        steps = tuple(_ended(step, axis.name, int(part), extent) for step in steps)
    return Stage(tuple(replace(a, size=count) if a.name == axis.name else a for a in stage.grid), steps)


def _read_in_part(program: TileProgram, later: Sequence[Stage], names: Iterable[str], extent: int) -> dict[str, Needed]:
    """Return, by workspace buffer, what trimmed stages read, if they read only needed coordinates of it."""
    workspace = {buffer.name for buffer in program.buffers if buffer.level is Level.WORKSPACE}
    found = {}
    for name in workspace.intersection(names):
        own = {_read(stage, access, extent) for stage in later for access in accesses(stage) if access.buffer == name}
        needed = own.pop() if len(own) == 1 else None
        if needed is not None:
            found[name] = needed
    return found


def _read(stage: Stage, access: Access, extent: int) -> Needed | None:
    """Return how an access maps needed coordinates to a buffer; None if it also touches other coordinates."""
    tasks = [axis for axis in stage.grid if not isinstance(axis.size, int)]
    inner = [axis for axis in access.axes if axis.ragged is not None and not isinstance(axis.ragged[1], int)]
    part = inner[0].extent if inner else 1
    counts = {axis.size for axis in tasks} | {axis.ragged[1] for axis in inner if axis.ragged is not None}
    known = {parts_of(var(LIVE), part, {LIVE: (1, extent)}), var(LIVE)} if tasks and inner else {var(LIVE)}
    if len(tasks) > 1 or len(inner) > 1 or not counts or not counts <= known:
        return None
    axes = {axis.name: part for axis in tasks} | {axis.name: 1 for axis in inner}
    stride = step_of(access, axes)
    if stride is None or stride <= 0:
        return None
    rest = add(access.index, *(scale(var(name), -stride * count) for name, count in axes.items()))
    ranges = {**ranges_of_axes((*stage.grid, *access.axes), {LIVE: (1, extent)}), "coordinate": (0, extent - 1)}
    needed = Needed(stride, extent)
    place = _place(add(rest, scale(var("coordinate"), stride)), needed, (), ranges)
    if place is None:
        return None
    low, high = bounds(add(place, scale(var("coordinate"), -stride)), ranges)
    return needed if low >= 0 and high < stride else None


def _looped(stage: Stage, needed: Mapping[str, Needed]) -> Stage | None:
    """Return a stage whose loops around steps cover needed coordinates only; None if no loop is over coordinates."""
    all_of = Axis("all_tasks", 1)
    steps = tuple(_loop_ended(step, stage.grid, needed, all_of.name) for step in stage.steps)
    return None if steps == stage.steps else Stage((all_of, *stage.grid), steps)


def _loop_ended(step: Step, grid: tuple[Axis, ...], needed: Mapping[str, Needed], outer: str) -> Step:
    if not isinstance(step, Loop) or step.carried or step.axis.ragged is not None:
        return step
    parts, axis = set(), step.axis
    for place, entry, _, ranges in _places(Stage(grid, (step,)), needed):
        parts.add((_share(place, entry, axis, ranges), entry.extent))
    (part, extent), *others = parts or {(None, 0)}
    if part is None or others:
        return step
    count = parts_of(scale(var(LIVE), part.denominator), part.numerator, {LIVE: (1, extent)})
    return replace(step, axis=replace(axis, ragged=(outer, count)))


def _inside(stage: Stage, needed: Mapping[str, Needed], extent: int) -> Stage | None:
    """Return a stage in which axes over all coordinates end with the needed ones; None if there are none."""
    names: set[str] = set()
    for place, entry, axes, _ in _places(stage, needed):
        own = [a for a in axes if a.size == extent and a.ragged is None and not a.is_reduced]
        own = [a for a in own if place is not None and place.coefficient(a.name) == entry.stride]
        if len(own) != 1:
            return None
        names.add(own[0].name)
    if len(names) != 1 or not _is_elementwise(stage, *names):
        return None
    (name,), whole_grid = names, Axis(f"{next(iter(names))}_all", 1)
    steps = tuple(_ended_inside(step, name, whole_grid.name) for step in stage.steps)
    return Stage((whole_grid, *stage.grid), steps)


def _is_elementwise(stage: Stage, name: str) -> bool:
    """Return whether steps read buffers that they write at the same value of an axis only, and none reduces it."""
    slopes: dict[str, set[int | None]] = {}
    for access in accesses(stage):
        slopes.setdefault(access.buffer, set()).add(access.index.coefficient(name))
        if any(axis.name == name and axis.is_reduced for axis in access.axes):
            return False
    tiles = written_by(stage.steps)
    return all(len(slopes[buffer]) == 1 for buffer in tiles)


def _ended_inside(step: Step, name: str, grid: str) -> Step:
    if isinstance(step, Loop):
        return replace(step, body=tuple(_ended_inside(inner, name, grid) for inner in step.body))
    return replace(step, axes=tuple(replace(a, ragged=(grid, var(LIVE))) if a.name == name else a for a in step.axes))


def _split(stage: Stage, needed: Mapping[str, Needed]) -> Stage:
    """Return a stage in which a grid axis that runs through all coordinates several times is split into two axes."""
    for name, index, axes in _writes(stage.steps, ()):
        entry = needed.get(name)
        around = entry.stride * entry.extent if entry is not None else 0
        for axis in stage.grid:
            step = index.coefficient(axis.name) or 0
            turn = around // step if step > 0 and around % step == 0 else 0
            is_outer = any(a.ragged is not None and a.ragged[0] == axis.name for a in axes)
            if 1 < turn < axis.extent and axis.extent % turn == 0 and not is_outer:
                return _in_turns(stage, axis, turn)
    return stage


def _in_turns(stage: Stage, axis: Axis, turn: int) -> Stage:
    """Return a stage in which a grid axis is split into two: an outer one, and an inner one of `turn` values."""
    outer, inner = Axis(f"{axis.name}_turn", axis.extent // turn), Axis(f"{axis.name}_in_turn", turn)
    grid = tuple(new for old in stage.grid for new in ((outer, inner) if old is axis else (old,)))
    values = {axis.name: add(scale(var(outer.name), turn), var(inner.name))}

    def moved(step: Step, scope: Ranges) -> Step:
        if isinstance(step, Loop):
            around = {**scope, **ranges_of_axes((step.axis,), {})}
            return replace(step, body=tuple(moved(own, around) for own in step.body))
        ranges = {**scope, **ranges_of_axes(step.axes, {})}
        return map_step(step, lambda expr: substitute(expr, values, ranges))

    return Stage(grid, tuple(moved(step, ranges_of_axes(grid, {})) for step in stage.steps))


def _part(stage: Stage, axis: Axis, needed: Mapping[str, Needed]) -> Fraction | None:
    """Return how many coordinates each value of a grid axis writes; None if the values overlap or it is unclear."""
    parts = {_share(place, entry, axis, ranges) for place, entry, _, ranges in _places(stage, needed)}
    return parts.pop() if len(parts) == 1 else None


def _share(place: Expr | None, entry: Needed, axis: Axis, ranges: Ranges) -> Fraction | None:
    """Return by how many coordinates a write advances with each value of an axis; None if it may also go back."""
    step = place.coefficient(axis.name) if place is not None else None
    if place is None or step is None or step <= 0:
        return None
    lowest = bounds(add(place, scale(var(axis.name), -step)), ranges)[0]
    return Fraction(step, entry.stride) if lowest >= 0 else None


def _ends_in_order(stage: Stage, grid: Axis, needed: Mapping[str, Needed]) -> bool:
    """Return whether all axes that end early in the last task of a grid axis count single coordinates."""
    for place, entry, axes, _ in _places(stage, needed):
        ragged = [axis for axis in axes if axis.ragged is not None and axis.ragged[0] == grid.name]
        if place is None or any(place.coefficient(axis.name) != entry.stride for axis in ragged):
            return False
    return True


def _places(
    stage: Stage, needed: Mapping[str, Needed]
) -> Iterator[tuple[Expr | None, Needed, tuple[Axis, ...], Ranges]]:
    """Yield, for each write to an output, its index modulo `stride * extent`, with the loops around it.

    The index is None if it is not known.
    """
    for name, index, axes in _writes(stage.steps, ()):
        entry = needed.get(name)
        if entry is not None:  # else it is a tile
            ranges = ranges_of_axes((*stage.grid, *axes), {})
            yield _place(index, entry, axes, ranges), entry, axes, ranges


def _place(index: Expr, entry: Needed, axes: Sequence[Axis], ranges: Ranges) -> Expr | None:
    """Return an index modulo `stride * extent` as a sum that never exceeds the modulus; None if there is none."""
    around = entry.stride * entry.extent
    terms = tuple(term for term in index.terms if term[1] % around)
    place = Expr(index.constant % around, terms)
    most = place
    for axis in axes:  # the last task of a ragged axis ends early
        outer, total = axis.ragged or ("", 0)
        if not isinstance(total, int) or not outer:
            continue
        step = most.coefficient(axis.name)
        if step and most.coefficient(outer) == step * axis.extent:
            whole_axis = f"{axis.name} of all"
            ranges = {**ranges, whole_axis: (0, total - 1)}
            moved = add(
                scale(var(outer), -step * axis.extent), scale(var(axis.name), -step), scale(var(whole_axis), step)
            )
            most = add(most, moved)
    low, high = bounds(most, ranges)
    return place if low >= 0 and high < around else None


def _writes(steps: Sequence[Step], outer: tuple[Axis, ...]) -> Iterator[tuple[str, Expr, tuple[Axis, ...]]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _writes(step.body, (*outer, step.axis))
        elif isinstance(step, Pass):
            for sink in step.sinks:
                yield sink.buffer, sink.index, (*outer, *step.axes)
        else:
            yield step.out.buffer, step.out.index, (*outer, *step.axes)


def _ended(step: Step, outer: str, part: int, extent: int) -> Step:
    """Return a step whose axis of coordinates, if it has one, ends after the needed ones."""
    if isinstance(step, Loop):
        return replace(step, body=tuple(_ended(inner, outer, part, extent) for inner in step.body))

    def ended(axis: Axis) -> Axis:
        is_own = axis.ragged == (outer, extent) and axis.size == part
        return replace(axis, ragged=(outer, var(LIVE))) if is_own else axis

    return replace(step, axes=tuple(map(ended, step.axes)))


def _finer(stage: Stage, axis: Axis, part: int, extent: int, threads: int) -> tuple[Stage, int] | None:
    """Return a stage with more, smaller tasks along an axis, and their size; None if there are enough tasks."""
    others = stage.tasks // max(1, axis.extent)
    products = [step.product for _, step in stage.leaves if isinstance(step, Contract)]
    on_matrix_units = Product.SPLIT in products
    if on_matrix_units and others % threads == 0:  # already even, and each task splits its part of the weights
        return None
    count = ceil_div(TASKS_PER_THREAD * threads, max(1, others))
    size = round_up(ceil_div(extent, count), EDGE if on_matrix_units else ROW_STEP)
    if count <= axis.extent or size >= part:
        return None
    finer = _cut(stage, axis, part, size, extent)
    return (finer, size) if finer is not None else None


def _ragged(stage: Stage, axis: Axis, part: Fraction, extent: int) -> Stage:
    """Return a stage whose last task along an axis may end early; the stage itself if it can't."""
    has_rows = part.denominator == 1 and part > 1
    return (_cut(stage, axis, int(part), int(part), extent) if has_rows else None) or stage


def _cut(stage: Stage, axis: Axis, part: int, size: int, extent: int) -> Stage | None:
    """Return a stage whose tasks along an axis compute `size` instead of `part` coordinates; None if impossible."""
    cutter = _Cutter(axis, part, size, extent)
    steps = [cutter.step(step, ranges_of_axes(stage.grid, {})) for step in stage.steps]
    if any(step is None for step in steps) or len(cutter.names) != 1:
        return None
    grid = tuple(replace(a, size=ceil_div(extent, size)) if a.name == axis.name else a for a in stage.grid)
    return Stage(grid, tuple(cutter.named(step) for step in steps if step is not None))


class _Cutter:
    """Makes the tasks of a stage smaller along a grid axis.

    Attributes:
        names: the axes inside tasks that count the coordinates of a task.
    """

    def __init__(self, grid: Axis, part: int, size: int, extent: int) -> None:
        self.grid, self.part, self.size, self.extent = grid, part, size, extent
        self.names: set[str] = set()

    def step(self, step: Step, scope: Ranges) -> Step | None:
        """Return a step for tasks of `size` instead of `part` coordinates; None if its form does not allow this."""
        if isinstance(step, Loop):
            body = [self.step(inner, {**scope, **ranges_of_axes((step.axis,), {})}) for inner in step.body]
            if self._is_named(step.axis) or any(inner is None for inner in body):
                return None
            return replace(step, body=tuple(inner for inner in body if inner is not None))
        exprs = [expr for expr in exprs_of(step) if self.grid.name in expr.variables]
        named = [axis for axis in step.axes if self._is_named(axis)]
        if not exprs and not named:
            return step
        own = [a for a in step.axes if a.extent == self.part and all(self._is_coordinate(e, a) for e in exprs)]
        own = [a for a in own if not a.is_reduced and a.ragged in (None, (self.grid.name, self.extent))]
        if len(own) != 1 or any(axis is not own[0] for axis in named):
            return None
        self.names.add(own[0].name)
        ranges = {**scope, **ranges_of_axes(step.axes, {})}
        return map_step(step, lambda expr: self._moved(expr, ranges))

    def named(self, step: Step) -> Step:
        """Return a step whose axes of coordinates have the new number of coordinates per task."""
        if isinstance(step, Loop):
            return replace(step, body=tuple(map(self.named, step.body)))
        return replace(step, axes=tuple(map(self._cut, step.axes)))

    def _cut(self, axis: Axis) -> Axis:
        if axis.name not in self.names or axis.extent != self.part:
            return axis
        return replace(axis, size=self.size, ragged=(self.grid.name, self.extent))

    def _is_named(self, axis: Axis) -> bool:
        return axis.ragged is not None and axis.ragged[0] == self.grid.name

    def _is_coordinate(self, expr: Expr, axis: Axis) -> bool:
        """Return whether an expression grows as much with the next task as with `part` values of an axis."""
        outer, inner = expr.coefficient(self.grid.name), expr.coefficient(axis.name)
        return bool(outer) and inner is not None and outer == inner * self.part

    def _moved(self, expr: Expr, ranges: Ranges) -> Expr:
        coefficient = expr.coefficient(self.grid.name)
        if not coefficient:
            return expr
        own = var(self.grid.name)
        rest = substitute(expr, {self.grid.name: constant(0)}, ranges)
        return add(rest, scale(own, coefficient // self.part * self.size))


def exprs_of(step: Pass | Contract) -> list[Expr]:
    """Return every index and the expression of every guard of a step."""
    found: list[Expr] = []

    def seen(expr: Expr) -> Expr:
        found.append(expr)
        return expr

    map_step(step, seen)
    return found
