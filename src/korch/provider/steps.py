"""What follows a convolution inside of its kernel, as lines of C++.

The elementwise primitives after it become one function of a vector of W results, `finish`: `y` are
the results, `channel` is the channel of the first, and `at` its place in a tensor of the result's
layout. Parameters of a channel are loaded; tensors of the result's shape are read at `at`.
"""

from __future__ import annotations

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.provider.vector import call, literal


class Steps:
    """The lines of `finish` of one convolution, `anchor`, whose channels are axis 1.

    Attributes:
        lines: the C++.
        full: positions of the inputs that are read in the result's layout.
    """

    def __init__(self, group: Group, anchor: Primitive) -> None:
        self.lines: list[str] = []
        self.full: set[int] = set()
        self._body = group.body
        self._shape = group.body.types[anchor.output].shape
        self._position = group.position
        self._beside = {p.output: p.inputs[0] for p in group.body.primitives if p.op == "broadcast"}
        self._names = {anchor.output: "y"}

    def knows(self, value: int) -> bool:
        """Return whether a value is computed from the convolution."""
        return value in self._names

    def name(self, value: int) -> str:
        """Return the variable that has a value."""
        return self._names[value]

    def add(self, primitive: Primitive) -> Refusal | None:
        """Add the line of a primitive; they come in order. Broadcasts need none."""
        if primitive.op == "broadcast":
            return None
        if self._body.types[primitive.output].shape != self._shape:
            return Refusal(f"{primitive.op} has another shape than the convolution")
        if primitive.row.category is not Category.ELEMENTWISE:
            return Refusal(f"{primitive.op} is not fused into the convolution")
        arguments = [self._argument(value) for value in primitive.inputs]
        known = [a for a in arguments if a is not None]
        if len(known) < len(arguments):
            return Refusal(f"an operand of {primitive.op} is not fused into the convolution")
        name = f"t{len(self.lines)}"
        self.lines.append(f"const korch::Vec<float, W> {name} = {call(primitive.op, known)};")
        self._names[primitive.output] = name
        return None

    def store(self) -> Refusal | None:
        """Add the lines that write the group's outputs."""
        for i, (_, value) in enumerate(self._body.outputs):
            if value not in self._names:
                return Refusal("an output is not computed from the convolution")
            at = f"static_cast<float*>(buffers[{len(self._body.inputs) + i}]) + at"
            self.lines.append(f"korch::store<float, W>({at}, {self._names[value]});")
        return None

    def _argument(self, value: int) -> str | None:
        if value in self._names:
            return self._names[value]
        if value in self._beside:
            return self._parameter(self._beside[value])
        constant = self._body.constants.get(value)
        if constant is not None:
            return literal(float(constant.scalar)) if constant.is_uniform else None
        position = self._position.get(value)
        if position is None or self._body.types[value].shape != self._shape:
            return None
        self.full.add(position)
        return f"korch::load<float, W>(static_cast<const float*>(buffers[{position}]) + at)"

    def _parameter(self, value: int) -> str | None:
        """Return a broadcast of one number, or of one number per channel."""
        constant = self._body.constants.get(value)
        if constant is not None:
            return literal(float(constant.scalar)) if constant.is_uniform else None
        position = self._position.get(value)
        shape = self._body.types[value].shape
        if position is None or position in self.full:
            return None
        sizes = (1,) * (len(self._shape) - len(shape)) + shape
        source = f"static_cast<const float*>(buffers[{position}])"
        if all(n == 1 for n in sizes):
            return f"korch::splat<float, W>(*{source})"
        if all(n == 1 for axis, n in enumerate(sizes) if axis != 1):
            return f"korch::load<float, W>({source} + channel)"
        return None
