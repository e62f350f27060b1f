"""What the tasks of a stage read and write: accesses, and the boxes of a buffer that they touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from korch.tile.affine import Nest, Symbols, number, ranges_of_axes
from korch.tile.index import Choice, Expr, Ranges, add, bounds, constant, scale, var
from korch.tile.program import At, Axis, Contract, Inside, Load, Loop, Pass, Size, Stage, Step, Store
from korch.tile.sort import Ordering, Sort
from korch.tile.text import format_contract, format_loop, format_op, format_sink


@dataclass(frozen=True)
class Access:
    """A place in the text at which each task reads or writes elements of a buffer.

    Attributes:
        buffer: the buffer.
        index: the element.
        guards: where one does not hold, nothing is touched.
        axes: the loops around it inside of the task, outermost first.
        is_write: whether it writes.
        text: the line of the text form.
    """

    buffer: str
    index: Expr
    guards: tuple[Inside, ...]
    axes: tuple[Axis, ...]
    is_write: bool
    text: str

    def nest(self, stage: Stage) -> Nest:
        """Return the index with all loops around it."""
        return Nest(self.index, self.guards, stage.grid, self.axes)


@dataclass(frozen=True)
class Region:
    """What one task touches: begin + the sum of step * i, each i from 0 to its count - 1.

    Attributes:
        buffer: the buffer.
        is_write: whether it is written.
        begin: the first element, in the grid's variables.
        box: (step, count) per direction; a count may depend on the grid's variables.
        is_exact: whether exactly these elements are touched, or only some of them.
    """

    buffer: str
    is_write: bool
    begin: Expr
    box: tuple[tuple[Size, Size], ...]
    is_exact: bool


def accesses(stage: Stage) -> Iterator[Access]:
    """Yield every access of a stage, in the order of the text; of a contraction, reads come first."""
    if stage.sort is not None:
        yield from accesses_of_sort(stage.sort, stage.grid)
    yield from _accesses(stage.steps, ())


def accesses_of(step: Pass | Contract, outer: tuple[Axis, ...] = ()) -> Iterator[Access]:
    """Yield the accesses of a pass or contraction inside of the loops `outer`."""
    axes = (*outer, *step.axes)
    kept = tuple(axis for axis in axes if not axis.is_reduced)
    if isinstance(step, Pass):
        for op in step.ops:
            if isinstance(op, Load):
                yield Access(op.buffer, op.index, (*step.where, *op.guards), axes, False, format_op(op))
        for sink in step.sinks:
            own = axes if isinstance(sink, Store) else kept
            yield Access(sink.buffer, sink.index, step.where, own, True, format_sink(sink))
        return
    text = format_contract(step)

    def access(at: At, own: tuple[Axis, ...], is_write: bool, guards: tuple[Inside, ...] = ()) -> Access:
        return Access(at.buffer, at.index, guards, own, is_write, text)

    yield access(step.a, axes, False, step.where)
    yield access(step.b, axes, False, step.where)
    if step.factor is not None:
        yield access(step.factor, axes, False, step.where)
    if step.rescale is not None:
        yield access(step.rescale, kept, False)
    yield access(step.out, kept, False)
    yield access(step.out, kept, True)


def accesses_of_choice(loop: Loop, outer: tuple[Axis, ...]) -> Iterator[Access]:
    """Yield the access that says which turn of a loop is run, if only one is."""
    if loop.only is not None:
        yield Access(loop.only.buffer, loop.only.index, (), outer, False, format_loop(loop))


def accesses_of_sort(step: Ordering, grid: tuple[Axis, ...]) -> Iterator[Access]:
    """Yield the accesses of a step that orders: of a sort in one task, of the largest elements by the grid's row."""
    parts = [(*step.read, False), *((name, size, True) for name, size in step.written.items())]
    for name, size, is_write in parts:
        own = size if isinstance(step, Sort) else size // step.rows
        row = add(*(scale(var(axis.name), own) for axis in grid))
        yield Access(name, add(row, var("place")), (), (Axis("place", own),), is_write, step.text)


def _accesses(steps: tuple[Step, ...], outer: tuple[Axis, ...]) -> Iterator[Access]:
    for step in steps:
        match step:
            case Loop():
                yield from accesses_of_choice(step, outer)
                yield from _accesses(step.body, (*outer, step.axis))
            case _:
                yield from accesses_of(step, outer)


def regions(stage: Stage, buffer: str, parameters: Ranges | None = None) -> list[Region]:
    """Return which box of a buffer each task touches at each access, as far as it touches any.

    Args:
        stage: the stage.
        buffer: the buffer.
        parameters: the range of each parameter.
    """
    symbols = Symbols(dict(parameters or {}))
    return [_region(stage, access, symbols) for access in accesses(stage) if access.buffer == buffer]


def _region(stage: Stage, access: Access, symbols: Symbols) -> Region:
    own = {axis.name for axis in access.axes}
    inner = tuple(term for term in access.index.terms if own & Expr(0, (term,)).variables)
    outer = tuple(term for term in access.index.terms if term not in inner)
    begin, linear = Expr(access.index.constant, outer), symbols.linear(Expr(0, inner))
    if linear is None:
        ranges = {**symbols.ranges, **ranges_of_axes((*stage.grid, *access.axes), symbols.ranges)}
        low, high = bounds(Expr(0, inner), ranges)
        return Region(access.buffer, access.is_write, add(begin, constant(low)), ((1, high - low + 1),), False)
    begin, steps = add(begin, symbols.expr(linear[0])), dict(linear[1])
    box: list[tuple[Size, Size]] = []
    is_exact = not access.guards
    for axis in reversed(access.axes):
        if axis.name not in steps:
            continue
        poly, count = steps.pop(axis.name), axis.size
        step = symbols.expr(poly)
        if axis.ragged is not None:
            name, total = axis.ragged
            if name not in own:
                count = _rest(axis.extent, name, total)
            elif steps.get(name) == poly * number(axis.extent):
                count = total
                del steps[name]
            else:
                is_exact = False
        if not step.terms and step.constant < 0:
            begin = add(begin, scale(_expr(count, -1), step.constant))
            step = scale(step, -1)
        box.append((step if step.terms else step.constant, count))
    return Region(access.buffer, access.is_write, begin, tuple(reversed(box)), is_exact)


def _expr(size: Size, more: int = 0) -> Expr:
    return add(constant(size) if isinstance(size, int) else size, constant(more))


def _rest(part: int, outer: str, total: Size) -> Expr:
    """Return the number of elements of a ragged part: those of a whole one, or what is left."""
    left = add(_expr(total), scale(var(outer), -part))
    return Expr(0, ((Choice(add(constant(part), scale(left, -1)), ((1, constant(part)),), left), 1),))
