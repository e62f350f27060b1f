"""Steps that can't lead to the result by any law: a search without pruning by expressions also visits them.

They are used only to count what this pruning saves. Any operation of the computation may be applied to any available
values, along any axis; equal steps give one class.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from korch.superopt.expressions import COMMUTATIVE, Expression, Expressions


@dataclass
class Unpruned:
    """All steps over some operations."""

    ways: Expressions  # the expressions that lead to the result; the axes of other classes are added to them
    # the class of each other expression
    others: dict[tuple[str, tuple[int, ...], str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = dict(self.ways.axes)
        self.ways = replace(self.ways, axes=self.axes)
        steps = self.ways.steps
        self.known = {(step.op, step.arguments, step.axis) for step in steps}
        self.operations = sorted({(step.op, len(step.arguments)) for step in steps if not step.axis})
        self.reductions = sorted({(step.op, step.axis) for step in steps if step.axis})

    def following(self, there: Collection[int]) -> Iterator[Expression]:
        """Yield the steps over the available classes, without those that lead to the result."""
        values = sorted(there)
        for op, count in self.operations:
            for arguments in itertools.product(values, repeat=count):
                if op in COMMUTATIVE and list(arguments) != sorted(arguments):
                    continue
                axes = tuple(sorted({axis for a in arguments for axis in self.axes[a]}))
                if axes in [self.axes[a] for a in arguments]:
                    yield from self._step(op, arguments, "", axes)
        for op, axis in self.reductions:
            for value in values:
                if axis in self.axes[value]:
                    yield from self._step(op, (value,), axis, tuple(a for a in self.axes[value] if a != axis))
            for x, y in itertools.combinations(values, 2) if op == "reduce_sum" else ():
                axes = tuple(sorted({*self.axes[x], *self.axes[y]} - {axis}))
                if axis in self.axes[x] and axis in self.axes[y] and self.axes[x] != self.axes[y]:
                    yield from self._step("contract", (x, y), axis, axes)

    def _step(self, op: str, arguments: tuple[int, ...], axis: str, axes: tuple[str, ...]) -> Iterator[Expression]:
        key = op, arguments, axis
        if key in self.known:
            return
        result = self.others.setdefault(key, max(self.axes) + 1)
        self.axes[result] = axes
        step = Expression(op, arguments, result, axis)
        yield step if axis else replace(step, body=(step,))
