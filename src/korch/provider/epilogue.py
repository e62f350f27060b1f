"""What follows a convolution in a kernel of `native/`, as C++.

These kernels call a function for each vector of W neighbouring results, `y`. Its lines are printed here from tile
operations.
"""

from __future__ import annotations

from typing import assert_never

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.contraction import NotFusedError, follow, refuse_computed
from korch.tile.cpp_op import applied
from korch.tile.cpp_text import Writer, literal, stored_type
from korch.tile.emit import Emitter, Index, physical_offset
from korch.tile.index import ZERO, Expr, Ranges, var
from korch.tile.program import Apply, Literal, Load, Select, TileProgram

RESULT = "y"
"""The variable that has the results."""


AT, CHANNEL = "at", "channel"
"""The variables of a convolution's results: their place in the output, and their channel."""


class ConvEpilogue:
    """What follows one convolution, whose channels are axis 1.

    A vector has results of neighbouring channels. Parameters of a channel are loaded; tensors of
    the result's shape are read in the result's layout.

    Attributes:
        full: positions of the inputs that are read in the result's layout.
    """

    def __init__(self, group: Group, root: Primitive) -> None:
        self.full: set[int] = set()
        self._parameters: set[int] = set()
        self._group = group
        self._root = root
        shape = group.body.types[root.output].shape
        self._shape = shape
        axes = [CHANNEL if axis == 1 else f"x{axis}" for axis in range(len(shape))]
        self._index = tuple(ZERO if n == 1 else var(axis) for axis, n in zip(axes, shape, strict=True))
        ranges: dict[str, tuple[int, int]] = {axis: (0, n - 1) for axis, n in zip(axes, shape, strict=True)}
        self._emitter = Emitter(group.body, self._home, ranges)
        names = [*group.body.inputs, *group.body.outputs]
        self._memory = {
            name: (stored_type(group.body.types[value].dtype), position) for position, (name, value) in enumerate(names)
        }
        self._indices = follow(self._emitter, root, self._index, RESULT)

    def value(self, value: int) -> tuple[str, ...]:
        """Return the lines that return a value computed from the convolution."""
        name = self._computed(value)
        lines, names = self._lines()
        return (*lines, f"return {names[name]};")

    def stores(self) -> tuple[str, ...]:
        """Return the lines that write the group's outputs."""
        outputs = [(name, self._computed(value)) for name, value in self._group.body.outputs]
        lines, names = self._lines()
        stores = (f"korch::store<float, W>({self._place(buffer, AT)}, {names[name]});" for buffer, name in outputs)
        return (*lines, *stores)

    def _lines(self) -> tuple[list[str], dict[str, str]]:
        """Return the lines of the operations, computed in float32, and the variable of each value."""
        lines, names = [], {RESULT: RESULT}
        for op in self._emitter.ops:
            match op:
                case Literal(name, dtype, value):
                    names[name] = f"korch::splat<float, W>({literal(dtype, value)})"
                    continue
                case Load():
                    text = self._load(op)
                case Apply(arguments=arguments):
                    text = applied(op, DType.F32, [names[a] for a in arguments], "W")
                case Select():
                    raise NotFusedError("a pad or a concatenation is not fused into the kernel")
                case _:
                    assert_never(op)
            lines.append(f"const korch::Vec<float, W> {op.name} = {text};")
            names[op.name] = op.name
        return lines, names

    def _place(self, buffer: str, at: str, const: str = "") -> str:
        type_, position = self._memory[buffer]
        return f"static_cast<{const}{type_}*>(buffers[{position}]) + {at}"

    def _load(self, op: Load) -> str:
        if op.guards:
            raise NotFusedError("a pad or a concatenation is not fused into the kernel")
        place = self._place(op.buffer, Writer(TileProgram((), ()), lanes=1).expr(op.index), "const ")
        return f"korch::load<float, W>({place})" if op.index.variables else f"korch::splat<float, W>(*({place}))"

    def _computed(self, value: int) -> str:
        if self._indices.get(value) != self._index:
            raise NotFusedError("an output is not computed from the convolution element by element")
        return self._emitter.value(value, self._index)

    def _home(self, value: int, index: Index, ranges: Ranges) -> tuple[str, Expr] | None:
        position = self._group.position.get(value)
        if position is None:
            refuse_computed(self._group.body, value)
            return None
        name, shape = self._group.body.inputs[position][0], self._group.body.types[value].shape
        if shape == self._shape and index == self._index:
            self.full.add(position)
            self._require_one_layout()
            return name, var(AT)
        place = physical_offset(Layout.plain(len(shape)), shape, index, ranges)
        if place.variables and (place.variables != {CHANNEL} or place.coefficient(CHANNEL) != 1):
            raise NotFusedError("a tensor beside the convolution has neither its shape nor one number per channel")
        self._parameters.add(position)
        self._require_one_layout()
        return name, place

    def _require_one_layout(self) -> None:
        if self.full & self._parameters:
            raise NotFusedError("a tensor beside the convolution would be read in two layouts")
