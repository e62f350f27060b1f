"""Loops over extents of which only the first elements are needed -> loops that end at parameters of the program."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from korch.ranges.live import Count, Limit, Live
from korch.system.alignment import ceil_div
from korch.tile.ir.index import Expr, Ranges, add, bounds, choice, constant, scale, var
from korch.tile.ir.program import Axis, Inside, Loop, Parameter, Pass, Size, Stage, Step, TileProgram, parts_of

LIVE, PART = "live", "part"
"""The parameter that counts rows, and for rows that combine two axes, the needed elements of the inner axis."""

ALL = Axis("all", 1)
"""A grid axis of one task, around axes that are not divided into blocks, but end early."""


def parametric(program: TileProgram) -> tuple[TileProgram, Mapping[str, Count]]:
    """Return a program with a parameter for each count of its extents, and the counts by parameter."""
    limits = dict[Count, int]()
    for size in (size for stage in program.stages for size in _lives(stage)):
        limits[size.count] = max(limits.get(size.count, 0), size.limit)
    if not limits:
        return program, {}
    names = {count: f"{LIVE}{i}" if i else LIVE for i, count in enumerate(limits)}
    counts = {name: count for count, name in names.items()}
    parameters = [Parameter(names[count], 0, limit) for count, limit in limits.items()]
    for count in limits:
        if count.rows is not None and PART not in counts:
            counts[PART] = replace(count, rows=None)
            parameters.append(Parameter(PART, 0, count.rows[1]))
    maker = _Maker(names, {p.name: (p.low, p.high) for p in parameters})
    return replace(program, stages=tuple(map(maker.stage, program.stages)), parameters=tuple(parameters)), counts


def by_outer(program: TileProgram) -> TileProgram:
    """Return a program in which rows that combine two axes have all elements of the inner axis."""

    def outer(size: Size) -> Size:
        count = size.count.by_outer if isinstance(size, Live) else None
        return Live(size.limit, count, size.over) if isinstance(size, Live) and count is not None else size

    def of_axis(axis: Axis) -> Axis:
        ragged = axis.ragged and (axis.ragged[0], outer(axis.ragged[1]))
        return replace(axis, size=outer(axis.size), ragged=ragged)

    return replace(program, stages=tuple(_with_axes(s, tuple(map(of_axis, s.grid)), of_axis) for s in program.stages))


def whole(program: TileProgram) -> TileProgram:
    """Return a program whose grids have the sizes for the largest values of its parameters."""
    ranges = program.parameter_ranges

    def most(axis: Axis) -> Axis:
        return axis if isinstance(axis.size, int) else replace(axis, size=bounds(axis.size, ranges)[1])

    return replace(program, stages=tuple(replace(s, grid=tuple(map(most, s.grid))) for s in program.stages))


def count_ended(program: TileProgram, names: Set[str]) -> int:
    """Return how many axes of reductions of a program end at some parameters."""
    found = 0
    for stage in program.stages:
        for loops, step in stage.leaves:
            around = [loop.axis for loop in loops]
            reduced = [axis for axis in (*around, *step.axes) if axis.is_reduced or axis in around]
            ends = [axis.ragged[1] for axis in reduced if axis.ragged is not None]
            count = sum(isinstance(end, Expr) and not end.variables.isdisjoint(names) for end in ends)
            found += count * (len(step.sinks) if isinstance(step, Pass) else 1)
    return found


class _Maker:
    """Makes loops end at parameters."""

    def __init__(self, names: Mapping[Count, str], ranges: Ranges) -> None:
        self._names, self._ranges = names, ranges

    def stage(self, stage: Stage) -> Stage:
        """Return a stage whose loops end early; loops inside of tasks end as the last block of an axis does."""
        grid = tuple(replace(axis, size=self._size(axis.size)) for axis in stage.grid)
        if any(isinstance(axis.size, Live) and axis.ragged is None for axis in _inner_axes(stage)):
            grid = (ALL, *grid)
        return _with_axes(stage, grid, self._inside, self._guards)

    def _inside(self, axis: Axis) -> Axis:
        if axis.ragged is not None:
            return replace(axis, size=axis.extent + 0, ragged=(axis.ragged[0], self._size(axis.ragged[1])))
        if isinstance(axis.size, Live):
            return replace(axis, size=axis.extent + 0, ragged=(ALL.name, self._size(axis.size)))
        return axis

    def _guards(self, guards: tuple[Inside, ...]) -> tuple[Inside, ...]:
        found = list[Inside]()
        for guard in guards:
            found.append(guard)
            if isinstance(guard.high, Limit) and isinstance(size := self._size(guard.high), Expr):
                left = add(guard.expr, scale(size, -1), constant(guard.high))
                found[-1:] = [replace(guard, high=int(guard.high)), replace(guard, expr=left, high=int(guard.high))]
        return tuple(found)

    def _size(self, size: Size) -> Size:
        if not isinstance(size, Live):
            return size
        name = self._names[size.count]
        found, most = var(name), self._ranges[name][1]
        if ceil_div(most, size.over) > size:  # another axis with this count is longer
            found = choice(found, ((size.limit, found),), constant(size.limit), self._ranges)
        return parts_of(found, size.over, self._ranges)


def _inner_axes(stage: Stage) -> Iterator[Axis]:
    for loops, step in stage.leaves:
        yield from (loop.axis for loop in loops)
        yield from step.axes


def _lives(stage: Stage) -> Iterator[Live]:
    for axis in (*stage.grid, *_inner_axes(stage)):
        for size in (axis.size if axis.ragged is None else axis.ragged[1],):
            if isinstance(size, Live):
                yield size
    for _, step in stage.leaves:
        yield from (
            guard.high for guard in (step.where if isinstance(step, Pass) else ()) if isinstance(guard.high, Limit)
        )


def _with_axes(
    stage: Stage,
    grid: tuple[Axis, ...],
    change: Callable[[Axis], Axis],
    guarded: Callable[[tuple[Inside, ...]], tuple[Inside, ...]] = tuple,
) -> Stage:
    """Return a stage with another grid, and with functions applied to all axes inside of its tasks, and to guards."""

    def changed(step: Step) -> Step:
        if isinstance(step, Loop):
            return replace(step, axis=change(step.axis), body=tuple(map(changed, step.body)))
        if isinstance(step, Pass):
            step = replace(step, where=guarded(step.where))
        return replace(step, axes=tuple(map(change, step.axes)))

    return replace(stage, grid=grid, steps=tuple(map(changed, stage.steps)))
