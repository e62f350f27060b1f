"""What follows a product or a convolution in its kernel, as C++.

The kernels of `native/` call a function for each vector of W neighbouring results, `y`. Its lines
are printed here from tile operations: the same for products, attention and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from korch.tile.program import Apply, Literal, Load, Select, TileOp, TileProgram

RESULT = "y"
"""The variable that has the results."""


class Epilogue:
    """Prints operations on vectors of results.

    Attributes:
        tables: constant tables that the lines read, by their names.
    """

    def __init__(self, group: Group, step: Callable[[Expr], int | None]) -> None:
        """Begin without tables.

        Args:
            group: the group whose buffers are read and written.
            step: returns the step between the elements of a vector, or None if it varies.
        """
        names = [name for name, _ in (*group.body.inputs, *group.body.outputs)]
        self._position = {name: position for position, name in enumerate(names)}
        self._types = {name: group.body.types[value].dtype for name, value in (*group.body.inputs, *group.body.outputs)}
        self._writer = Writer(TileProgram((), ()), lanes=1)
        self._step = step

    @property
    def tables(self) -> str:
        """The declarations of the tables that were read so far."""
        return "".join(
            f"static const int32_t NAME_{name}[] = {{{', '.join(map(str, table))}}};\n"
            for table, name in self._writer.tables.items()
        )

    def expr(self, expr: Expr) -> str:
        """Return an index expression as C++."""
        return self._writer.expr(expr)

    def lines(self, ops: Sequence[TileOp], names: dict[str, str]) -> list[str]:
        """Return the lines of operations on floats, computed in float32.

        Args:
            ops: each stands after its arguments.
            names: the variables of values that are known; those of the operations are added.
        """
        lines: list[str] = []
        for op in ops:
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
        return lines

    def store(self, buffer: str, place: Expr, value: str, is_single: bool = False) -> str:
        """Return the line that writes a vector; `is_single` says that all have one element."""
        if self._step(place) != 1 and not is_single:
            raise NotFusedError("the columns of an output are not adjacent in memory")
        return f"korch::store<float, W>({self.pointer(buffer, place)}, {value});"

    def pointer(self, buffer: str, place: Expr) -> str:
        """Return the address of an element that is written."""
        return f"{self._memory(buffer)} + {self.expr(place)}"

    def _memory(self, buffer: str, const: str = "") -> str:
        type_ = stored_type(self._types[buffer])
        return f"static_cast<{const}{type_}*>(buffers[{self._position[buffer]}])"

    def _load(self, op: Load) -> str:
        step = self._step(op.index)
        if op.guards:
            raise NotFusedError("a pad or a concatenation is not fused into the kernel")
        if step not in (0, 1):
            raise NotFusedError("the columns of a tensor are not adjacent in memory")
        pointer = f"{self._memory(op.buffer, 'const ')} + {self.expr(op.index)}"
        return f"korch::load<float, W>({pointer})" if step else f"korch::splat<float, W>(*({pointer}))"


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
        self._printer = Epilogue(group, lambda expr: len(expr.variables))
        self._indices = follow(self._emitter, root, self._index, RESULT)

    def value(self, value: int) -> tuple[str, ...]:
        """Return the lines that return a value computed from the convolution."""
        names = {RESULT: RESULT}
        name = self._computed(value)
        lines = self._printer.lines(self._emitter.ops, names)
        return (*lines, f"return {names[name]};")

    def stores(self) -> tuple[str, ...]:
        """Return the lines that write the group's outputs."""
        names = {RESULT: RESULT}
        outputs = [(name, self._computed(value)) for name, value in self._group.body.outputs]
        lines = self._printer.lines(self._emitter.ops, names)
        lines += [self._printer.store(buffer, var(AT), names[name]) for buffer, name in outputs]
        return tuple(lines)

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
