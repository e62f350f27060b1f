"""The accesses of a stage: which elements its tasks read and write."""

from collections.abc import Iterator
from dataclasses import dataclass

from korch.tile.check.digits import Nest
from korch.tile.ir.index import Expr, add, scale, var
from korch.tile.ir.program import At, Axis, Contract, Inside, Load, Loop, Pass, Stage, Step, Store
from korch.tile.ir.sort import Ordering, Sort
from korch.tile.ir.text import format_contract, format_loop, format_op, format_sink


@dataclass(frozen=True)
class Access:
    """A read or write of elements of a buffer by each task, at one point of the program text."""

    buffer: str  # the buffer
    index: Expr  # the index of the element
    guards: tuple[Inside, ...]  # where one of them fails, nothing is accessed
    axes: tuple[Axis, ...]  # the loops around the access inside the task, outermost first
    is_write: bool  # whether it is a write
    text: str  # its line in the text form of the program

    def nest(self, stage: Stage) -> Nest:
        """Return the index with all loops around it."""
        return Nest(self.index, self.guards, stage.grid, self.axes)


def accesses(stage: Stage) -> Iterator[Access]:
    """Yield every access of a stage in the order of the program text; the reads of a contraction come first."""
    if stage.sort is not None:
        yield from accesses_of_sort(stage.sort, stage.grid)
    yield from _accesses(stage.steps, ())


def accesses_of(step: Pass | Contract, outer: tuple[Axis, ...] = ()) -> Iterator[Access]:
    """Yield the accesses of a pass or contraction inside the loops `outer`."""
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
    """Yield the read of `loop.only`, which selects the iteration to run, if the loop has it."""
    if loop.only is not None:
        yield Access(loop.only.buffer, loop.only.index, (), outer, False, format_loop(loop))


def accesses_of_sort(step: Ordering, grid: tuple[Axis, ...]) -> Iterator[Access]:
    """Yield the accesses of an ordering: one task accesses all elements in a sort, one row of the grid in a `Top`."""
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
