"""Guards of a reduction -> the range of each reduced axis in which they hold.

A window that extends beyond the border of an image accumulates the identity there, so its loops can
skip these points. Then the guards need not be tested at each point.
"""

import itertools
from collections.abc import Mapping

from korch.primitive.ops.reduce import identity
from korch.tile.ir.index import Expr, Ranges, add, bounds, breakpoints, constant, scale, turning_point, var
from korch.tile.ir.program import Accumulate, Axis, Inside, Literal, Load, Pass, Select, Sink


def clipping_guards(pass_: Pass) -> dict[str, tuple[Inside, ...]]:
    """Return, for each reduced axis, the guards that the bounds of its loop can guarantee.

    These are the guards that depend on one reduced axis only and whose expression grows with it.
    """
    shared = [_droppable(pass_, sink) for sink in pass_.sinks]
    common = [g for g in shared[0] if all(g in others for others in shared)] if shared else []
    reduced = {axis.name for axis in pass_.axes if axis.is_reduced}
    found: dict[str, tuple[Inside, ...]] = {}
    for guard in common:
        names = guard.expr.variables & reduced
        name = next(iter(names), "")
        if len(names) == 1 and (guard.expr.coefficient(name) or 0) > 0:
            found[name] = (*found.get(name, ()), guard)
    return found


def _droppable(pass_: Pass, sink: Sink) -> tuple[Inside, ...]:
    """Return guards such that a sink accumulates the identity wherever one of them fails."""
    ops = {op.name: op for op in pass_.ops}
    chosen = ops[sink.value]
    if not isinstance(sink, Accumulate) or not isinstance(chosen, Select):
        return ()
    outside = ops[chosen.outside]
    if isinstance(outside, Literal) and outside.value == identity(sink.op, outside.dtype):
        return chosen.guards
    return ()


def loop_ends(
    guards: tuple[Inside, ...], name: str, ranges: Ranges
) -> tuple[list[tuple[Expr, int]], list[tuple[Expr, int]]]:
    """Return the bounds of a loop variable, lower ones and exclusive upper ones, as (numerator, divisor).

    The quotients may be rounded towards 0: the loop starts at 0 or later, and where an upper bound
    is negative the loop is empty.
    """
    lows, ends = [], []
    for guard in guards:
        step = guard.expr.coefficient(name) or 1
        rest = add(guard.expr, scale(var(name), -step))
        least, most = bounds(guard.expr, ranges)
        if least < guard.low:
            lows.append((add(constant(guard.low + step - 1), scale(rest, -1)), step))
        if most >= guard.high:
            ends.append((add(constant(guard.high + step - 1), scale(rest, -1)), step))
    return lows, ends


def parts_of(pass_: Pass, axis: Axis, clips: Mapping[str, tuple[Inside, ...]], ranges: Ranges) -> list[tuple[int, int]]:
    """Return the parts of an axis, cut where the result of a guard or a choice changes.

    `clips`: the guards that the bounds of the loop over each axis guarantee.
    """
    ends = {0, axis.extent}
    for op in pass_.ops:
        if isinstance(op, Load):
            ends |= breakpoints(op.index, axis.name, ranges)
        if isinstance(op, Load | Select):
            for guard in op.guards:
                if guard in clips.get(axis.name, ()):
                    continue
                ends |= breakpoints(guard.expr, axis.name, ranges)
                least, most = _extremes(guard.expr, axis, pass_, ranges)
                ends |= turning_point(least, guard.low, axis.name)
                ends |= turning_point(most, guard.high, axis.name)
    inside = sorted(end for end in ends if 0 <= end <= axis.extent)
    return list(itertools.pairwise(inside))


def _extremes(expr: Expr, axis: Axis, pass_: Pass, ranges: Ranges) -> tuple[Expr, Expr]:
    """Return the least and greatest expression over the reduced variables, if no other variables occur.

    Between the points where guards on these change, a guard of a window holds for the whole window.
    """
    slope = expr.coefficient(axis.name)
    inner = {a.name for a in pass_.axes if a.is_reduced} - {axis.name}
    if slope is None or not expr.variables & inner or expr.variables - inner != {axis.name}:
        return expr, expr
    own = scale(var(axis.name), slope)
    least, most = bounds(add(expr, scale(own, -1)), ranges)
    return add(own, constant(least)), add(own, constant(most))
