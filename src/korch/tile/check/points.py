"""The points of a loop nest as arrays: evaluates index expressions and guards at all points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import numpy as np

from korch.primitive.op import Array
from korch.tile.ir.index import Atom, Choice, Expr, Quotient, Remainder, TableEntry, Times, Var
from korch.tile.ir.program import Axis, Inside


class Points:
    """All points of a loop nest for some tasks of its stage.

    Attributes:
        shape: the number of tasks, then the extent of each axis.
        task: the number of each task, counted along the grid.
        live: which points exist; a ragged axis ends early in its last tile.
    """

    def __init__(
        self, grid: Sequence[Axis], axes: Sequence[Axis], tasks: Array, fixed: Mapping[str, int] | None = None
    ) -> None:
        """Make the points of `axes` while the enclosing loops have the values `fixed`."""
        self.grid, self.axes, self.tasks, self.fixed = grid, axes, tasks, fixed
        self.shape = (len(tasks), *(axis.extent for axis in axes))
        self.ones = [1] * len(self.shape)
        self.task: Array = tasks.reshape(-1, *self.ones[1:])
        self._values: dict[str, Array] = {name: np.full(self.ones, value) for name, value in (fixed or {}).items()}
        rest = self.task
        for axis in reversed(grid):
            self._values[axis.name] = rest % max(axis.extent, 1)
            rest = rest // max(axis.extent, 1)
        for position, axis in enumerate(axes, 1):
            shape = [*self.ones]
            shape[position] = axis.extent
            self._values[axis.name] = np.arange(axis.extent).reshape(shape)
        self.live: Array = np.ones(self.ones, bool)
        for axis in axes:
            if axis.ragged is not None:
                outer, total = axis.ragged
                end = total if isinstance(total, int) else self.at(total)
                self.live = self.live & (self._values[outer] * axis.extent + self._values[axis.name] < end)

    def kept(self) -> Points:
        """Return the points of the loops that are not reduced."""
        return Points(self.grid, [axis for axis in self.axes if not axis.is_reduced], self.tasks, self.fixed)

    def holds(self, guards: Sequence[Inside]) -> Array:
        """Return at which points all guards hold."""
        result: Array = np.ones(self.ones, bool)
        for guard in guards:
            at = self.at(guard.expr)
            result = result & (at >= guard.low) & (at < guard.high)
        return result

    def at(self, expr: Expr) -> Array:
        """Return the value of an expression at each point."""
        total: Array = np.full(self.ones, expr.constant, np.int64)
        for atom, coefficient in expr.terms:
            total = total + coefficient * self._atom(atom)
        return total

    def spread(self, array: Array) -> Array:
        """Return an array broadcast to one element for each point."""
        return np.broadcast_to(array, self.shape)

    def _atom(self, atom: Atom) -> Array:
        match atom:
            case Var(name):
                return self._values[name]
            case Quotient(inner, divisor):
                return self.at(inner) // divisor
            case Remainder(inner, divisor):
                return self.at(inner) % divisor
            case TableEntry(table, inner):
                found: Array = np.asarray(table)[np.clip(self.at(inner), 0, len(table) - 1)]
                return found
            case Choice(inner, cases, otherwise):
                at, result = self.at(inner), self.at(otherwise)
                for limit, then in reversed(cases):
                    result = np.where(at < limit, self.at(then), result)
                return result
            case Times(factor, inner):
                return np.asarray(self._atom(factor) * self.at(inner))
            case _:
                assert_never(atom)
