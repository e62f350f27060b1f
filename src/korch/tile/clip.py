"""Guards of a reduction -> the part of each reduced axis in which they hold.

A window that hangs over the border of an image collects the identity there: nothing changes if its
loops leave these points out. Then nothing is asked for each point.
"""

from __future__ import annotations

from korch.tile.identity import identity
from korch.tile.index import Expr, Ranges, add, bounds, constant, scale, var
from korch.tile.program import Accumulate, Inside, Literal, Pass, Select, Sink


def clipping_guards(pass_: Pass) -> dict[str, tuple[Inside, ...]]:
    """Return, for each reduced axis, the guards that its loop can ensure by its ends.

    Only guards that turn on one reduced axis, and with which it grows, are among them.
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
    """Return guards outside of which a sink collects the identity."""
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
    """Return what bounds a loop variable: least values, and ends, as (numerator, divisor).

    A quotient rounded towards 0 will do for both: the loop starts at 0 or later, and where an end
    is negative it is empty.
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
