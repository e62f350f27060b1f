"""The order of a pass's loops: merge what can be one loop, choose the vector axis, cut the grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from korch.tile.index import ZERO, Expr, add, scale, substitute, var
from korch.tile.program import Accumulate, Axis, Inside, Load, Pass, Select, Sink, Stage, TileOp

TASK_POINTS = 8192
"""How many points a task of a free stage has at most: enough to outweigh its start."""


def arrange(pass_: Pass, is_free: bool, sizes: Mapping[str, int]) -> Pass:
    """Return a pass with its loops merged and ordered, and its vector axis chosen.

    Args:
        pass_: the pass, with its axes in the order of the value's.
        is_free: whether its stage's grid is still to be cut from its axes.
        sizes: elements of each buffer.
    """
    pass_ = _merge_all(pass_)
    vector = _vector_axis(pass_, sizes)
    reference = _reference(pass_, sizes)

    def key(axis: Axis) -> tuple[bool, bool, int]:
        step = reference.coefficient(axis.name)
        return axis.is_reduced, axis.name == vector, -(abs(step) if step else 0)

    return dataclasses.replace(pass_, axes=tuple(sorted(pass_.axes, key=key)), vector=vector)


def grid_for(pass_: Pass, threads: int, lanes: int) -> Stage:
    """Return the stage of a free pass: outer loops become the grid, long ones are cut."""
    axes, grid = list(pass_.axes), []
    while len(axes) > 1 and math.prod(axis.extent for axis in axes) > TASK_POINTS:
        if axes[0].is_reduced or (axes[0].extent <= 4 and turns_on(pass_, axes[0].name)):
            break
        grid.append(axes.pop(0))
    tasks = math.prod(axis.extent for axis in grid)
    last = axes[0] if len(axes) == 1 else None
    is_whole = last is None or last.is_reduced or turns_on(pass_, last.name)
    if last is not None and not is_whole and last.extent > TASK_POINTS // 2:
        wanted = -(-last.extent // max(1, 4 * threads // tasks))
        tile = min(TASK_POINTS, max(TASK_POINTS // 4, wanted))
        tile = -(-tile // (4 * lanes)) * 4 * lanes
        if tile < last.extent:
            outer = Axis(f"{last.name}t", -(-last.extent // tile))
            ragged = (outer.name, last.extent) if last.extent % tile else None
            inner = Axis(last.name, tile, ragged=ragged)
            whole = add(scale(var(outer.name), tile), var(last.name))
            ranges = {a.name: (0, a.extent - 1) for a in (*grid, outer, inner)}
            pass_ = map_indices(pass_, lambda expr: substitute(expr, {last.name: whole}, ranges))
            grid.append(outer)
            axes = [inner]
    return Stage(tuple(grid), (dataclasses.replace(pass_, axes=tuple(axes)),))


def turns_on(pass_: Pass, name: str) -> bool:
    """Return whether a guard of a pass depends on a loop variable."""
    return any(
        name in guard.expr.variables
        for op in pass_.ops
        if isinstance(op, Load | Select)
        for guard in op.guards
    )


def indices(pass_: Pass) -> Iterator[Expr]:
    """Yield every index expression of a pass, those in guards included."""
    for op in pass_.ops:
        if isinstance(op, Load):
            yield op.index
        if isinstance(op, Load | Select):
            yield from (guard.expr for guard in op.guards)
    for sink in pass_.sinks:
        yield sink.index


def map_indices(pass_: Pass, change: Callable[[Expr], Expr]) -> Pass:
    """Return a pass with a function applied to every index expression."""

    def guards_of(op: Load | Select) -> tuple[Inside, ...]:
        return tuple(dataclasses.replace(guard, expr=change(guard.expr)) for guard in op.guards)

    ops: list[TileOp] = []
    for op in pass_.ops:
        if isinstance(op, Load):
            op = dataclasses.replace(op, index=change(op.index), guards=guards_of(op))
        elif isinstance(op, Select):
            op = dataclasses.replace(op, guards=guards_of(op))
        ops.append(op)
    sinks: list[Sink] = [dataclasses.replace(s, index=change(s.index)) for s in pass_.sinks]
    return dataclasses.replace(pass_, ops=tuple(ops), sinks=tuple(sinks))


def _merge_all(pass_: Pass) -> Pass:
    """Merge pairs of loops that together step through every index as one loop would."""
    merged = True
    while merged:
        merged = False
        for outer in pass_.axes:
            for inner in pass_.axes:
                if outer is not inner and _can_merge(pass_, outer, inner):
                    pass_ = _merge(pass_, outer, inner)
                    merged = True
                    break
            if merged:
                break
    return pass_


def _can_merge(pass_: Pass, outer: Axis, inner: Axis) -> bool:
    if outer.is_reduced != inner.is_reduced or 0 in (outer.extent, inner.extent):
        return False
    for expr in indices(pass_):
        step, small = expr.coefficient(outer.name), expr.coefficient(inner.name)
        if step is None or small is None or step != small * inner.extent:
            return False
    return True


def _merge(pass_: Pass, outer: Axis, inner: Axis) -> Pass:
    pass_ = map_indices(pass_, lambda expr: _without(expr, outer.name))
    joined = dataclasses.replace(inner, extent=outer.extent * inner.extent)
    axes = tuple(joined if axis is inner else axis for axis in pass_.axes if axis is not outer)
    return dataclasses.replace(pass_, axes=axes)


def _without(expr: Expr, name: str) -> Expr:
    kept = tuple(term for term in expr.terms if name not in Expr(0, (term,)).variables)
    return Expr(expr.constant, kept)


def _vector_axis(pass_: Pass, sizes: Mapping[str, int]) -> str:
    """Return the axis along which most elements lie side by side; stores count double."""
    scores: dict[str, float] = {axis.name: 0 for axis in pass_.axes if axis.extent > 1}
    for name in scores:
        for op in pass_.ops:
            if isinstance(op, Load) and op.index.coefficient(name) == 1:
                scores[name] += sizes[op.buffer]
        for sink in pass_.sinks:
            if not isinstance(sink, Accumulate) and sink.index.coefficient(name) == 1:
                scores[name] += 2 * sizes[sink.buffer]
    extents = {axis.name: axis.extent for axis in pass_.axes}
    return max(scores, key=lambda name: (scores[name], extents[name]), default="")


def _reference(pass_: Pass, sizes: Mapping[str, int]) -> Expr:
    """Return the index that decides the order of the loops: the store's, or the largest load's."""
    if not pass_.is_reduction:
        return max(pass_.sinks, key=lambda sink: sizes[sink.buffer]).index
    loads = [op for op in pass_.ops if isinstance(op, Load)]
    return max(loads, key=lambda op: sizes[op.buffer]).index if loads else ZERO
