"""Group -> a convolution in Winograd's space, the pad before it, the elementwise steps after it.

The steps become one C++ function of a vector of results, `finish`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.types import DType

INFIX = {"add": "+", "sub": "-", "mul": "*"}


@dataclass(frozen=True, slots=True)
class Match:
    """What a kernel computes.

    Attributes:
        primitive: the convolution.
        image: the position of the image among the group's inputs.
        weights: the position of the transformed weights.
        pad: the pad before it, or None.
        steps: the lines of `finish`.
        full: positions of the inputs that are read in the output's layout.
    """

    primitive: Primitive
    image: int
    weights: int
    pad: PadAttributes | None
    steps: tuple[str, ...]
    full: frozenset[int]


def match_group(group: Group) -> Match | Refusal:
    """Return what a group is, or why it is no convolution in Winograd's space."""
    found = [p for p in group.body.primitives if p.op == "winograd"]
    if len(found) != 1:
        return Refusal("it is not one convolution in Winograd's space")
    if any(type_.dtype is not DType.F32 for type_ in group.body.types):
        return Refusal("an element is no float32")
    return _Matcher(group, found[0]).run()


class _Matcher:
    def __init__(self, group: Group, primitive: Primitive) -> None:
        self.group = group
        self.body = group.body
        self.primitive = primitive
        self.shape = self.body.types[primitive.output].shape
        self.position = {value: i for i, (_, value) in enumerate(self.body.inputs)}
        self.names = {primitive.output: "y"}
        self.lines: list[str] = []
        self.full: set[int] = set()

    def run(self) -> Match | Refusal:
        image, weights = self.primitive.inputs
        if self.position.get(weights) not in self.group.constant_inputs:
            return Refusal("the weights are not constant")
        pad = next((p for p in self.body.primitives if p.output == image and p.op == "pad"), None)
        attributes: Any = pad.attributes if pad is not None else None
        source = image if pad is None else pad.inputs[0]
        if source not in self.position or self.position[source] in self.group.constant_inputs:
            return Refusal("the image is computed in the group")
        if pad is not None and any((*attributes.before[:2], *attributes.after[:2])):
            return Refusal("the pad adds images or channels")
        for primitive in self.body.primitives:
            refusal = None if primitive in (pad, self.primitive) else self._step(primitive)
            if refusal is not None:
                return refusal
        for i, (_, value) in enumerate(self.body.outputs):
            if value not in self.names:
                return Refusal("an output is not computed from the convolution")
            at = f"static_cast<float*>(buffers[{len(self.body.inputs) + i}]) + at"
            self.lines.append(f"korch::store<float, W>({at}, {self.names[value]});")
        return Match(self.primitive, self.position[source], self.position[weights], attributes,
                     tuple(self.lines), frozenset(self.full))  # fmt: skip

    def _step(self, primitive: Primitive) -> Refusal | None:
        """Add the line of an elementwise primitive or a broadcast; they come in order."""
        if self.body.types[primitive.output].shape != self.shape:
            return Refusal(f"{primitive.op} has another shape than the convolution")
        if primitive.op == "broadcast":
            text = self._broadcast(primitive.inputs[0])
        elif primitive.row.category is Category.ELEMENTWISE:
            arguments = [self._argument(value) for value in primitive.inputs]
            known = [a for a in arguments if a is not None]
            text = _call(primitive.op, known) if len(known) == len(arguments) else None
        else:
            text = None
        if text is None:
            return Refusal(f"{primitive.op} is not fused into the convolution")
        name = f"t{len(self.lines)}"
        self.lines.append(f"const Vector {name} = {text};")
        self.names[primitive.output] = name
        return None

    def _argument(self, value: int) -> str | None:
        if value in self.names:
            return self.names[value]
        constant = self.body.constants.get(value)
        if constant is not None:
            return _literal(float(constant.scalar)) if constant.is_uniform else None
        position = self.position.get(value)
        if position is None or self.body.types[value].shape != self.shape:
            return None
        self.full.add(position)
        return f"korch::load<float, W>(static_cast<const float*>(buffers[{position}]) + at)"

    def _broadcast(self, value: int) -> str | None:
        constant = self.body.constants.get(value)
        if constant is not None:
            return _literal(float(constant.scalar)) if constant.is_uniform else None
        position = self.position.get(value)
        shape = self.body.types[value].shape
        if position is None or position in self.full:
            return None
        sizes = (1,) * (len(self.shape) - len(shape)) + shape
        source = f"static_cast<const float*>(buffers[{position}])"
        if all(n == 1 for n in sizes):
            return f"korch::splat<float, W>(*{source})"
        if all(n == 1 for axis, n in enumerate(sizes) if axis != 1):
            return f"korch::load<float, W>({source} + channel)"
        return None


def _call(op: str, arguments: list[str]) -> str:
    if op in INFIX and len(arguments) == 2:
        return f"{arguments[0]} {INFIX[op]} {arguments[1]}"
    return f"korch::op_{op}<float, W>({', '.join(arguments)})"


def _literal(value: float) -> str:
    if math.isnan(value):
        text = '__builtin_nanf("")'
    elif math.isinf(value):
        text = "-__builtin_inff()" if value < 0 else "__builtin_inff()"
    else:
        text = f"{value!r}f"
    return f"korch::splat<float, W>({text})"
