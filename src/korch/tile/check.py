"""What every tile program must fulfil: small named checks.

They find mistakes of lowering before a compiler or a crash does. Whether the results are right, the
interpreter in `korch.tile.reference` shows. All checks are linear in the program's text except the
one for races, which visits the points of the loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from korch.errors import InvalidGraphError
from korch.primitive.op import Array, Category
from korch.primitive.ops import OPS
from korch.tile.index import Expr, Ranges, Var, bounds
from korch.tile.points import Points
from korch.tile.program import (
    Accumulate,
    Apply,
    Level,
    Load,
    Pass,
    Select,
    Stage,
    TileOp,
    TileProgram,
    arguments_of,
    ranges_of,
)
from korch.tile.text import format_op, format_sink

MOST_POINTS = 1 << 22
"""The largest number of points of a stage that is checked for races."""


def check_program(program: TileProgram) -> None:
    """Run every check.

    Raises:
        InvalidGraphError: a check fails; the text names the offending line.
    """
    for check in CHECKS:
        check(program)


def buffers_are_known(program: TileProgram) -> None:
    """Buffers have one name each, and only known ones are read; inputs are not written."""
    levels = {buffer.name: buffer.level for buffer in program.buffers}
    _require(len(levels) == len(program.buffers), "two buffers have one name", "")
    for _, pass_ in _passes(program):
        for op in pass_.ops:
            if isinstance(op, Load):
                _require(op.buffer in levels, "there is no such buffer", format_op(op))
        for sink in pass_.sinks:
            _require(sink.buffer in levels, "there is no such buffer", format_sink(sink))
            is_input = levels[sink.buffer] is Level.INPUT
            _require(not is_input, "an input is written", format_sink(sink))


def axes_are_sound(program: TileProgram) -> None:
    """Loop variables have one name each; kept loops stand before reduced ones; grids keep all."""
    for stage, pass_ in _passes(program):
        axes = (*stage.grid, *pass_.axes)
        names = [axis.name for axis in axes]
        text = " ".join(names)
        _require(len(set(names)) == len(names), "two loops have one variable", text)
        reduced = [axis.is_reduced for axis in axes]
        _require(reduced == sorted(reduced), "a reduced loop stands outside of a kept one", text)
        _require(not any(axis.is_reduced for axis in stage.grid), "a grid axis is reduced", text)
        for axis in axes:
            _require(axis.extent >= (not axis.is_reduced), "a kept loop is empty", axis.name)
            if axis.ragged is not None:
                outer, total = axis.ragged
                tiles = {a.name: a.extent for a in axes}.get(outer)
                _require(tiles is not None, "the outer loop of a tile does not exist", axis.name)
                is_covered = tiles == -(-total // axis.extent)
                _require(is_covered, "tiles do not cover their axis", axis.name)


def vector_is_an_axis(program: TileProgram) -> None:
    """The vector axis, if there is one, is a loop of its pass, the innermost kept or a reduced."""
    for _, pass_ in _passes(program):
        if pass_.vector:
            names = [axis.name for axis in pass_.axes]
            _require(pass_.vector in names, "the vector axis is no loop of its pass", pass_.vector)


def squares_are_free(program: TileProgram) -> None:
    """The axes of squares are the innermost loops of a pass of stores, and no guard turns."""
    for _, pass_ in _passes(program):
        if pass_.across:
            names = [axis.name for axis in pass_.axes]
            innermost = {pass_.across, pass_.vector}
            _require(set(names[-2:]) == innermost, "squares are no innermost loops", pass_.across)
            _require(not pass_.is_reduction, "squares are reduced", pass_.across)
            turns = any(
                pass_.across in guard.expr.variables
                for op in pass_.ops
                if isinstance(op, Load | Select)
                for guard in op.guards
            )
            _require(not turns, "a guard turns inside of squares", pass_.across)


def names_are_bound(program: TileProgram) -> None:
    """Each value is computed before it is used, once; each loop variable is one of the pass."""
    for stage, pass_ in _passes(program):
        variables = {axis.name for axis in (*stage.grid, *pass_.axes)}
        bound: set[str] = set()
        for op in pass_.ops:
            text = format_op(op)
            _require(bound.issuperset(arguments_of(op)), "a value is used before it is bound", text)
            _require(op.name not in bound, "a value is bound twice", text)
            used = {v for expr in _expressions(op) for v in expr.variables}
            _require(used <= variables, "a variable is no loop", text)
            bound.add(op.name)
        for sink in pass_.sinks:
            text = format_sink(sink)
            _require(sink.value in bound, "a value is used before it is bound", text)
            _require(sink.index.variables <= variables, "a variable is no loop", text)


def operations_are_elementwise(program: TileProgram) -> None:
    """What is applied is an elementwise operation of the table, to as many values as it takes."""
    for _, pass_ in _passes(program):
        for op in pass_.ops:
            if isinstance(op, Apply):
                row = OPS.get(op.op)
                is_known = row is not None and row.category is Category.ELEMENTWISE
                _require(is_known, "this is no elementwise operation", format_op(op))
                fits = row is not None and row.arity == len(op.arguments)
                _require(fits, "an operation takes another number of values", format_op(op))


def sinks_suit_the_loops(program: TileProgram) -> None:
    """A pass stores or accumulates; reduced loops only accumulate, into places of kept ones."""
    for _, pass_ in _passes(program):
        _require(bool(pass_.sinks), "a pass writes nothing", pass_.vector)
        reduced = {axis.name for axis in pass_.axes if axis.is_reduced}
        for sink in pass_.sinks:
            text = format_sink(sink)
            is_accumulator = isinstance(sink, Accumulate)
            _require(is_accumulator == pass_.is_reduction, "a pass stores and accumulates", text)
            _require(is_accumulator or not reduced, "a store stands in a reduced loop", text)
            _require(not sink.index.variables & reduced, "a place depends on a reduced loop", text)


def indices_stay_inside(program: TileProgram) -> None:
    """No store leaves its buffer, and no load of an affine index that nothing guards.

    Bounds of choices and tables are too wide to judge by; the interpreter meets such loads.
    """
    sizes = {buffer.name: buffer.size for buffer in program.buffers}
    for stage, pass_ in _passes(program):
        if any(axis.extent == 0 for axis in pass_.axes):
            continue
        places = [(sink.buffer, sink.index, format_sink(sink)) for sink in pass_.sinks]
        places += [
            (op.buffer, op.index, format_op(op))
            for op in pass_.ops
            if isinstance(op, Load) and not op.guards and _is_affine(op.index)
        ]
        for ranges in _ranges(stage, pass_):
            for buffer, index, text in places:
                low, high = bounds(index, ranges)
                inside = low >= 0 and high < sizes[buffer]
                _require(inside, f"an index of {sizes[buffer]} reaches [{low}, {high}]", text)


def buffers_are_written_first(program: TileProgram) -> None:
    """What a pass reads is an input, or written before; a tile by an earlier pass of its stage."""
    levels = {buffer.name: buffer.level for buffer in program.buffers}
    written = {name for name, level in levels.items() if level is Level.INPUT}
    for stage in program.stages:
        own: set[str] = set()
        for pass_ in stage.passes:
            for op in pass_.ops:
                if isinstance(op, Load):
                    is_tile = levels[op.buffer] is Level.TILE
                    known = own if is_tile else written | own
                    _require(op.buffer in known, "a buffer is read before it is written", format_op(op))
            own.update(sink.buffer for sink in pass_.sinks)
        written |= own
    for name, level in levels.items():
        _require(
            level is not Level.OUTPUT or name in written or not program.buffer(name).size,
            "an output is never written",
            name,
        )


def tasks_do_not_race(program: TileProgram) -> None:
    """No task reads or writes an element that another task of the same stage writes.

    Stages of more than `MOST_POINTS` points are not looked at.
    """
    sizes = {buffer.name: buffer.size for buffer in program.buffers if buffer.level is not Level.TILE}
    for stage in program.stages:
        points = stage.tasks * sum(math.prod(axis.extent for axis in pass_.axes) for pass_ in stage.passes)
        if stage.tasks < 2 or points > MOST_POINTS:
            continue
        passes = [(pass_, Points(stage, pass_, np.arange(stage.tasks))) for pass_ in stage.passes]
        writers: dict[str, Array] = {}
        for pass_, at in passes:
            for sink in pass_.sinks:
                if sink.buffer in sizes:
                    writer = writers.setdefault(sink.buffer, np.full(sizes[sink.buffer], -1))
                    places, tasks = _touched(at, sink.index, at.live)
                    other = (writer[places] >= 0) & (writer[places] != tasks)
                    writer[places] = tasks
                    is_own = not np.any(other) and np.array_equal(writer[places], tasks)
                    _require(is_own, "two tasks of a stage write one element", format_sink(sink))
        for pass_, at in passes:
            for op in pass_.ops:
                if isinstance(op, Load) and op.buffer in writers:
                    places, tasks = _touched(at, op.index, at.live & at.holds(op.guards))
                    writer = writers[op.buffer][places]
                    is_own = bool(np.all((writer < 0) | (writer == tasks)))
                    _require(is_own, "a task reads what another task of its stage writes", format_op(op))


def _touched(points: Points, index: Expr, holds: Array) -> tuple[Array, Array]:
    """Return the place in a buffer and the task of each point at which a condition holds."""
    arrays = [np.broadcast_to(array, points.shape) for array in (points.at(index), points.task, holds)]
    return arrays[0][arrays[2]], arrays[1][arrays[2]]


CHECKS = (
    buffers_are_known,
    axes_are_sound,
    vector_is_an_axis,
    squares_are_free,
    names_are_bound,
    operations_are_elementwise,
    sinks_suit_the_loops,
    indices_stay_inside,
    buffers_are_written_first,
    tasks_do_not_race,
)
"""Those that stand later rely on those before."""


def _passes(program: TileProgram) -> Iterator[tuple[Stage, Pass]]:
    for stage in program.stages:
        for pass_ in stage.passes:
            yield stage, pass_


def _expressions(op: TileOp) -> Iterator[Expr]:
    if isinstance(op, Load):
        yield op.index
    if isinstance(op, Load | Select):
        yield from (guard.expr for guard in op.guards)


def _is_affine(expr: Expr) -> bool:
    return all(isinstance(atom, Var) for atom, _ in expr.terms)


def _ranges(stage: Stage, pass_: Pass) -> Iterator[Ranges]:
    """Yield ranges that together hold every point: for ragged loops, whole tiles and the last."""
    whole = ranges_of(stage, pass_)
    found: list[Ranges] = [whole]
    for axis in pass_.axes:
        if axis.ragged is None:
            continue
        outer, total = axis.ragged
        last = whole[outer][1]
        rest = (0, total - last * axis.extent - 1)
        parts: list[Ranges] = [{outer: (0, last - 1)}] if last else []
        found = [{**ranges, **part} for ranges in found for part in (*parts, {outer: (last, last), axis.name: rest})]
    yield from found


def _require(condition: bool, what: str, line: str) -> None:
    if not condition:
        raise InvalidGraphError(what, where=f"tile program, {line!r}" if line else "tile program")
