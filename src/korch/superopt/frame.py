"""Sizes of tiles -> where the values of a block graph are: loops, tiles, and indices into inputs and the output."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from korch.primitive.types import DType
from korch.superopt.axes import AxisTerm, Named
from korch.superopt.expressions import Expressions
from korch.superopt.generate import GraphOperand
from korch.system.alignment import round_up
from korch.tile.ir.index import ZERO, Expr, add, scale, var
from korch.tile.ir.program import At, Axis, Buffer, Level, Panels

F32 = DType.F32


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The block sizes of a block graph."""

    blocks: Mapping[str, int]  # elements of each axis of the result in a task, and of the loop's axis in an iteration
    lanes: int  # elements of a vector
    # positions of inputs that are packed in panels, with the columns of a panel
    packed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile: its name, the order of its axes in memory, and the stride of each axis."""

    name: str
    order: tuple[str, ...]
    steps: Mapping[str, int]


class Frame:
    """The loops, tiles and buffers of a program."""

    def __init__(
        self, computation: Named, ways: Expressions, sizes: BlockSizes, inputs: Sequence[tuple[int, ...]]
    ) -> None:
        """Begin a program without tiles."""
        self.computation, self.ways, self.sizes, self.inputs = computation, ways, sizes, inputs
        self.order = computation.order
        self.leaves: dict[int, AxisTerm] = {c: computation.terms[t] for t, c in ways.inputs.items()}
        self.buffers: list[Buffer] = []

    def _memory(self) -> Iterable[Buffer]:
        for position, shape in enumerate(self.inputs):
            width = self.sizes.packed.get(position)
            if width is None:
                yield Buffer(f"i{position}", Level.INPUT, F32, math.prod(shape))
                continue
            columns = round_up(shape[-1], width)
            yield Buffer(f"i{position}", Level.INPUT, F32, shape[-2] * columns, (Panels(columns, width),))
        size = math.prod(self.computation.sizes[axis] for axis in self.computation.result if axis)
        yield Buffer("o0", Level.OUTPUT, F32, size)

    # Axes

    def _block(self, axis: str) -> int:
        return self.sizes.blocks.get(axis, self.computation.sizes[axis])

    def _count(self, axis: str) -> int:
        return -(-self.computation.sizes[axis] // self._block(axis))

    def _outer(self, axis: str) -> str:
        return f"g_{axis}"

    def _inner(self, axis: str, is_reduced: bool = False) -> Axis:
        size, block = self.computation.sizes[axis], self._block(axis)
        return Axis(axis, block, is_reduced, (self._outer(axis), size) if size % block else None)

    def _index(self, axis: str) -> Expr:
        inside = var(axis) if self._block(axis) > 1 else ZERO
        return add(scale(var(self._outer(axis)), self._block(axis)), inside) if self._count(axis) > 1 else inside

    def _in_tile(self, axes: Iterable[str]) -> list[str]:
        return [axis for axis in axes if self._block(axis) > 1]

    def _sorted(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(axes, key=self.order.index))

    def _axes_of(self, operand: GraphOperand) -> tuple[str, ...]:
        return self._sorted(self.ways.axes[operand.expression])

    def _nest(self, order: Sequence[str]) -> tuple[Axis, ...]:
        """Return the loops over a tile: at least two, because contractions need two."""
        axes = tuple(self._inner(axis) for axis in self._in_tile(order))
        return (*(Axis(f"one{i}", 1) for i in range(2 - len(axes))), *axes)

    # Places

    def _tile(self, name: str, order: Sequence[str], is_wide: bool = False, layout: tuple[Panels, ...] = ()) -> Tile:
        order = tuple(self._in_tile(order))
        steps, step = {}, 1
        for axis in reversed(order):
            steps[axis] = step
            block = self._block(axis)
            is_last = axis == order[-1]
            step *= round_up(block, self.sizes.lanes) if is_last and is_wide else block
        size = max(step, self.sizes.lanes if is_wide else 1)
        name = f"{name}{len(self.buffers)}"
        self.buffers.append(Buffer(name, Level.TILE, F32, size, layout))
        return Tile(name, order, steps)

    def _at(self, tile: Tile) -> At:
        return At(tile.name, add(ZERO, *(scale(var(axis), step) for axis, step in tile.steps.items())))

    def _input_at(self, expression: int) -> At:
        term = self.leaves[expression]
        shape, width = self.inputs[term.position], self.sizes.packed.get(term.position)
        index, step = ZERO, 1
        for d in reversed(range(len(shape))):
            index = add(index, scale(self._index(term.places[d]), step)) if term.places[d] else index
            is_panel = width is not None and d == len(shape) - 1
            step *= round_up(shape[d], width) if is_panel and width else shape[d]
        return At(f"i{term.position}", index)

    def _output_at(self) -> At:
        index, step = ZERO, 1
        for axis in reversed([axis for axis in self.computation.result if axis]):
            index, step = add(index, scale(self._index(axis), step)), step * self.computation.sizes[axis]
        return At("o0", index)
