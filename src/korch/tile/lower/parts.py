"""Splits a pass whose elements come from several operands into one pass per operand.

A concatenation tests, at each point, which of its operands the point belongs to, and all operands share
one vector axis. If the pass is cut where the operand changes, the parts need no test, and each has its
own loop order, vector axis and squares.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import assert_never

from korch.tile.ir.index import Expr, Ranges, add, constant, substitute, turning_point, var
from korch.tile.ir.passes import map_indices, needed
from korch.tile.ir.program import Apply, Axis, Inside, Literal, Load, Pass, Select, TileOp, arguments_of, holds
from korch.tile.lower.loops import arrange

MOST_PARTS = 8
"""The maximum number of parts that an axis is cut into; each adds its own source text."""


def cut_pass(pass_: Pass, lanes: int, sizes: Mapping[str, int]) -> list[Pass]:
    """Return the arranged passes that a pass of stores is cut into; a single one if it is not cut.

    Args:
        pass_: the pass, not arranged.
        lanes: elements of a vector.
        sizes: elements of each buffer.
    """
    arranged = arrange(pass_, lanes, sizes, {})
    for axis in pass_.axes:
        ends = _turns(pass_, axis)
        if not 2 < len(ends) <= MOST_PARTS + 1:
            continue
        parts = [_part(pass_, axis, low, high) for low, high in itertools.pairwise(ends)]
        if arranged.vector != axis.name or any(_is_torn(part, axis.name) for part in parts):
            return [each for part in parts for each in cut_pass(part, lanes, sizes)]
    return [arranged]


def _turns(pass_: Pass, axis: Axis) -> list[int]:
    """Return the beginning of an axis, the points where the operand that is read changes, and the end.

    A border of constants, where nothing is read, is not a separate part.
    """
    readers, ends = _readers(pass_.ops), {0, axis.extent}
    for op in pass_.ops:
        if isinstance(op, Select) and readers.issuperset(arguments_of(op)):
            for guard in op.guards:
                for limit in (guard.low, guard.high):
                    ends |= turning_point(guard.expr, limit, axis.name)
    return sorted(end for end in ends if 0 <= end <= axis.extent)


def _readers(ops: Sequence[TileOp]) -> set[str]:
    """Return the values that depend on memory."""
    found: set[str] = set()
    for op in ops:
        if isinstance(op, Load) or not found.isdisjoint(arguments_of(op)):
            found.add(op.name)
    return found


def _is_torn(part: Pass, name: str) -> bool:
    """Return whether a part is longer than 1 along an axis and reads elements that are not contiguous along it."""
    is_long = any(axis.name == name and axis.extent > 1 for axis in part.axes)
    loads = (op for op in part.ops if isinstance(op, Load))
    return is_long and any(op.index.coefficient(name) not in (0, 1) for op in loads)


def _part(pass_: Pass, axis: Axis, low: int, high: int) -> Pass:
    """Return the part of a pass in which an axis runs from `low` to `high`."""
    own = dataclasses.replace(axis, size=high - low)
    axes = tuple(own if a is axis else a for a in pass_.axes)
    ranges = {a.name: (0, max(a.extent - 1, 0)) for a in axes}
    place = constant(low) if high - low == 1 else add(var(axis.name), constant(low))

    def change(expr: Expr) -> Expr:
        return substitute(expr, {axis.name: place}, ranges)

    return _decided(map_indices(dataclasses.replace(pass_, axes=axes), change), ranges)


def _decided(pass_: Pass, ranges: Ranges) -> Pass:
    """Return a pass simplified: guards that always hold, and operations whose guards never hold, are removed."""
    names: dict[str, str] = {}
    ops: list[TileOp] = []
    for op in pass_.ops:
        if isinstance(op, Load | Select):
            op = dataclasses.replace(op, guards=_open(op.guards, ranges))
        match op:
            case Select(guards=guards) if not guards or _never(guards, ranges):
                names[op.name] = names.get(chosen := op.outside if guards else op.inside, chosen)
                continue
            case Load(guards=guards) if _never(guards, ranges):
                op = Literal(op.name, op.dtype, 0)
            case Select(inside=inside, outside=outside):
                op = dataclasses.replace(op, inside=names.get(inside, inside), outside=names.get(outside, outside))
            case Apply(arguments=arguments):
                op = dataclasses.replace(op, arguments=tuple(names.get(a, a) for a in arguments))
            case Load() | Literal():
                pass
            case _:
                assert_never(op)
        ops.append(op)
    sinks = tuple(dataclasses.replace(s, value=names.get(s.value, s.value)) for s in pass_.sinks)
    return dataclasses.replace(pass_, ops=tuple(needed(ops, *(sink.value for sink in sinks))), sinks=sinks)


def _open(guards: tuple[Inside, ...], ranges: Ranges) -> tuple[Inside, ...]:
    return tuple(guard for guard in guards if holds(guard, ranges) is not True)


def _never(guards: tuple[Inside, ...], ranges: Ranges) -> bool:
    return any(holds(guard, ranges) is False for guard in guards)
