"""Checks that indices stay inside their buffers and that tasks do not race.

Both are first tried by algebra, for loops of any length and all values of parameters
(`korch.tile.check.digits`). What algebra can't prove is enumerated, for a few values of parameters and at
most a few million points. Enumeration can refute a property, and proves it if nothing was left out. A
property that is neither proved nor refuted is undecided and is returned as a line of text.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NoReturn

import numpy as np

from korch.errors import InvalidGraphError
from korch.primitive.op import Array
from korch.tile.check.accesses import Access, accesses
from korch.tile.check.digits import (
    Elements,
    Poly,
    Symbols,
    cut_variables,
    is_inside,
    keeps_to_tasks,
    place_of,
    ranges_of_axes,
)
from korch.tile.check.points import Points
from korch.tile.ir.bind import bind
from korch.tile.ir.index import Expr, Ranges, Times, Var, bounds, constant, substitute
from korch.tile.ir.passes import map_step
from korch.tile.ir.program import Axis, Level, Loop, Stage, Step, TileProgram, known
from korch.tile.ir.sort import Sort

MOST_POINTS = 1 << 22
"""The maximum number of points of an access that are enumerated."""

MOST_VALUES = 1 << 16
"""The maximum number of values of a quotient, remainder, choice or table entry that are enumerated."""

MOST_CORNERS = 1 << 12
"""The maximum number of corners (first or last iteration of each loop) that are tried for longer loops."""

MOST_BINDINGS = 64
"""Up to this many combinations of parameter values, all are enumerated; of more, only some are tried."""


def indices_stay_inside(program: TileProgram) -> list[str]:
    """Check that no access leaves its buffer. Return the undecided accesses as lines of text."""
    undecided: list[str] = []
    for number, stage in enumerate(program.stages):
        open_ = [i for i, access in enumerate(accesses(stage)) if not _shown_inside(program, stage, access)]
        if not open_:
            continue
        is_decided = dict.fromkeys(open_, True)
        for bound, values, is_all in _bindings(program):
            found = list(accesses(bound.stages[number]))
            for i in open_:
                is_whole = _enumerate_inside(bound, bound.stages[number], found[i], values)
                is_decided[i] &= is_whole and is_all
        texts = [access.text for access in accesses(stage)]
        undecided += [f"{texts[i]!r}: whether its index stays inside" for i in open_ if not is_decided[i]]
    return undecided


def tasks_do_not_race(program: TileProgram) -> list[str]:
    """Check that no task touches an element that another task of its stage writes. Return undecided cases as text."""
    undecided: list[str] = []
    shared = {buffer.name for buffer in program.buffers if buffer.level is not Level.TILE}
    orders = {stage.sort.order for stage in program.stages if isinstance(stage.sort, Sort)}
    for number, whole in enumerate(program.stages):
        stage = _by_place(whole, orders)
        written = {access.buffer for access in accesses(stage) if access.is_write} & shared
        open_ = [name for name in sorted(written) if not _shown_apart(program, stage, name)]
        is_decided = dict.fromkeys(open_, True)
        for bound, values, is_all in _bindings(program) if open_ else ():
            for name in open_:
                is_whole = _enumerate_races(bound, _by_place(bound.stages[number], orders), name, values)
                is_decided[name] &= is_whole and is_all
        undecided += [f"stage {number}: whether tasks race for {name}" for name in open_ if not is_decided[name]]
    return undecided


def _by_place(stage: Stage, orders: Set[str]) -> Stage:
    """Return a stage in which row numbers read from a sort's `order` buffer are replaced by their positions there.

    Each position holds a different row, so if tasks touch different positions, they touch different rows. This does
    not follow if a buffer is also indexed in other ways; the stage is then returned unchanged.
    """
    names = set(_rows_of(stage.steps, orders))
    if not names:
        return stage
    by_row = {a.buffer for a in accesses(stage) if a.index.variables & names}
    if any(a.buffer in by_row and not a.index.variables & names for a in accesses(stage)):
        return stage
    ranges = ranges_of_axes(stage.grid, {})
    return replace(stage, steps=tuple(_moved(step, orders, {}, ranges) for step in stage.steps))


def _rows_of(steps: Sequence[Step], orders: Set[str]) -> Iterator[str]:
    """Yield the variable of each loop whose only iteration is a row number from one of the `orders` buffers."""
    for step in steps:
        if isinstance(step, Loop):
            if step.only is not None and step.only.buffer in orders:
                yield step.axis.name
            yield from _rows_of(step.body, orders)


def _moved(step: Step, orders: Set[str], places: Mapping[str, Expr], ranges: Ranges) -> Step:
    """Return a step with row numbers replaced by their positions in the order."""
    if not isinstance(step, Loop):
        inner = {**ranges, **ranges_of_axes(step.axes, {})}
        return map_step(step, lambda expr: substitute(expr, places, inner))
    if step.only is not None and step.only.buffer in orders:
        places = {**places, step.axis.name: step.only.index}
        step = replace(step, axis=replace(step.axis, size=1), only=None)
    inner = {**ranges, **ranges_of_axes((step.axis,), {})}
    return replace(step, body=tuple(_moved(own, orders, places, inner) for own in step.body))


# By algebra


def _shown_inside(program: TileProgram, stage: Stage, access: Access) -> bool:
    buffer = program.buffer(access.buffer)
    symbols = Symbols(dict(program.parameter_ranges))
    ranges = {**symbols.ranges, **ranges_of_axes((*stage.grid, *access.axes), symbols.ranges)}
    ends = [_term_bounds(Expr(0, (term,)), ranges) for term in access.index.terms]
    low, high = (access.index.constant + sum(side) for side in zip((0, 0), *ends, strict=True))
    if low >= 0 and isinstance(buffer.elements, int) and high < buffer.elements:
        return True
    (nest,) = cut_variables([access.nest(stage)], symbols.ranges)
    place, size = place_of(nest, symbols, narrow=True), symbols.poly(buffer.elements)
    return place is not None and size is not None and is_inside(place, size, symbols)


def _term_bounds(term: Expr, ranges: Ranges) -> tuple[int, int]:
    """Return the least and greatest value of a term, exactly if it has few values."""
    low, high = bounds(term, ranges)
    axes = [Axis(name, ranges[name][1] + 1) for name in term.variables if ranges[name][0] == 0]
    is_small = len(axes) == len(term.variables) and _count(axes) <= MOST_VALUES
    if isinstance(term.terms[0][0], Var | Times) or not is_small:
        return low, high
    values = Points((), axes, np.zeros(1, np.int64)).at(term)
    return int(values.min()), int(values.max())


def _shown_apart(program: TileProgram, stage: Stage, buffer: str) -> bool:
    symbols = Symbols(dict(program.parameter_ranges))
    found = [access for access in accesses(stage) if access.buffer == buffer]
    nests = cut_variables([access.nest(stage) for access in found], symbols.ranges)
    places = [place_of(nest, symbols) for nest in nests]
    if None in places:
        return False
    # What is shown of two places is shown of all that lie as far from each other.
    pairs = {
        (Elements(Poly(), place.digits), Elements(other.base - place.base, other.digits))
        for access, place in zip(found, places, strict=True)
        for other in places
        if access.is_write and place is not None and other is not None
    }
    return all(keeps_to_tasks(write, other, nests[0].grid, symbols) for write, other in pairs)


# By enumeration


def _bindings(program: TileProgram) -> Iterator[tuple[TileProgram, str, bool]]:
    """Yield programs of known sizes, their parameter values as text, and whether all combinations are yielded."""
    spans = [range(p.low, p.high + 1) for p in program.parameters]
    is_all = math.prod(map(len, spans)) <= MOST_BINDINGS
    if is_all:
        chosen = list(itertools.product(*spans))
    else:
        rng = np.random.default_rng(0)
        near = [tuple(int(rng.integers(s.start, min(s.stop, s.start + 40))) for s in spans) for _ in range(12)]
        ends = [tuple(s[number] for s in spans) for number in (0, -1)]
        chosen = list(dict.fromkeys([*ends, tuple(s[min(1, len(s) - 1)] for s in spans), *near]))
    for values in chosen:
        named = {p.name: value for p, value in zip(program.parameters, values, strict=True)}
        yield bind(program, named), " ".join(f"{name}={value}" for name, value in named.items()), is_all


def _some_tasks(grid: Sequence[Axis], most: int) -> Array:
    """Return all tasks; if there are more than `most`, tasks adjacent along each axis and random ones."""
    tasks = math.prod(axis.extent for axis in grid)
    if tasks <= most:
        return np.arange(tasks)
    steps = itertools.accumulate((axis.extent for axis in reversed(grid)), lambda a, b: a * b, initial=1)
    near = [0, *(step for step in steps if step < tasks)]
    random = np.random.default_rng(0).integers(0, tasks, max(0, min(most, MOST_POINTS) - len(near)))
    return np.unique(np.concatenate([np.array(near, np.int64), random]))[: max(most, 2)]


def _touched(stage: Stage, access: Access, tasks: Array) -> tuple[Array, Array]:
    """Return the element index and the task of each point at which an access happens."""
    points = Points(stage.grid, access.axes, tasks)
    holds = points.spread(points.live & points.holds(access.guards))
    return points.spread(points.at(access.index))[holds], points.spread(points.task)[holds]


def _count(axes: Sequence[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)


def _shrunk(access: Access, most: int) -> Access:
    """Return an access with fewer iterations of its longest loops, if it has more than `most` points."""
    axes = list(access.axes)
    while _count(axes) > most:
        longest = max((a for a in axes if a.ragged is None), key=lambda a: a.extent, default=None)
        if longest is None or longest.extent < 2:
            return replace(access, axes=())
        axes[axes.index(longest)] = replace(longest, size=longest.extent // 2)
    return replace(access, axes=tuple(axes))


def _enumerate_inside(program: TileProgram, stage: Stage, access: Access, values: str) -> bool:
    """Raise an error if an access leaves its buffer; return whether all its points were enumerated."""
    buffer = program.buffer(access.buffer)
    some = _shrunk(access, MOST_POINTS)
    tasks = _some_tasks(stage.grid, MOST_POINTS // max(_count(some.axes), 1))
    is_whole = len(tasks) == stage.tasks and some == access
    places, _ = _touched(stage, some, tasks)
    if not is_whole:
        corners = itertools.islice(_corners(stage, access), MOST_CORNERS)
        places = np.concatenate([places, np.fromiter(corners, np.int64)])
    if places.size:
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= buffer.size:
            _refuse(f"an index of {buffer.size} reaches [{low}, {high}]", access.text, values)
    return is_whole


def _corners(stage: Stage, access: Access) -> Iterator[int]:
    """Yield the indices at points where each loop is in its first or its last iteration."""
    axes = (*stage.grid, *access.axes)
    cut = [(a, *a.ragged) for a in axes if a.ragged is not None and isinstance(a.ragged[1], int)]
    ragged = {a.name: (outer, a.extent, known(total, a.name)) for a, outer, total in cut}
    ends = [{0, a.extent - 1} | ({(ragged[a.name][2] - 1) % a.extent} if a.name in ragged else set()) for a in axes]
    for values in itertools.product(*ends):
        number = {axis.name: value for axis, value in zip(axes, values, strict=True)}
        at = {name: constant(value) for name, value in number.items()}
        is_live = all(number[o] * part + number[name] < total for name, (o, part, total) in ragged.items())
        guards = [(guard, substitute(guard.expr, at, {}).constant) for guard in access.guards]
        if is_live and all(guard.low <= value < guard.high for guard, value in guards):
            yield substitute(access.index, at, {}).constant


def _enumerate_races(program: TileProgram, stage: Stage, name: str, values: str) -> bool:
    """Raise an error if tasks race for a buffer; return whether all points were enumerated."""
    whole = [access for access in accesses(stage) if access.buffer == name]
    found = [_shrunk(access, MOST_POINTS // 4 // len(whole)) for access in whole]
    tasks = _some_tasks(stage.grid, MOST_POINTS // max(sum(_count(access.axes) for access in found), 1))
    touched = [_touched(stage, access, tasks) for access in found]
    _, places = np.unique(np.concatenate([places for places, _ in touched]), return_inverse=True)
    at = iter(np.split(places, np.cumsum([len(own) for _, own in touched])[:-1]))
    accessed = [(access, next(at), own) for access, (_, own) in zip(found, touched, strict=True)]
    writer = np.full(len(places), -1)
    for access, at_, own in accessed:
        if access.is_write:
            is_free = np.all((writer[at_] < 0) | (writer[at_] == own))
            writer[at_] = own
            if not is_free or not np.array_equal(writer[at_], own):
                _refuse("two tasks of a stage write one element", access.text, values)
    for access, at_, own in accessed:
        if not access.is_write and not np.all((writer[at_] < 0) | (writer[at_] == own)):
            _refuse("a task reads what another task of its stage writes", access.text, values)
    return len(tasks) == stage.tasks and found == whole


def _refuse(what: str, line: str, values: str) -> NoReturn:
    raise InvalidGraphError(what + (f" with {values}" if values else ""), where=f"tile program, {line!r}")
