"""Group -> a convolution in Winograd's space, how it reads its image, what follows it.

Pads, slices and takes of rows and columns before it become one table of sources per axis. The
elementwise steps after it become one C++ function of a vector of results, `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.ops.layout import pad_source
from korch.primitive.ops.winograd import tile_counts
from korch.primitive.types import DType
from korch.provider.vector import call, literal

FILL, ZERO = -1, -2


@dataclass(frozen=True, slots=True)
class Match:
    """What a kernel computes.

    Attributes:
        primitive: the convolution.
        image: the position of the image among the group's inputs.
        weights: the position of the transformed weights.
        sources: per spatial axis, the image's row or column that each padded position reads: FILL
            where it is `fill`, ZERO in the convolution's own pads.
        fill: the value of pads before the convolution.
        steps: the lines of `finish`.
        full: positions of the inputs that are read in the output's layout.
    """

    primitive: Primitive
    image: int
    weights: int
    sources: tuple[tuple[int, ...], tuple[int, ...]]
    fill: float
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
        reading = self._reading(image)
        if isinstance(reading, Refusal):
            return reading
        source, chain = reading
        sources = self._sources(source, chain)
        if isinstance(sources, Refusal):
            return sources
        for primitive in self.body.primitives:
            refusal = None if primitive in (*chain, self.primitive) else self._step(primitive)
            if refusal is not None:
                return refusal
        for i, (_, value) in enumerate(self.body.outputs):
            if value not in self.names:
                return Refusal("an output is not computed from the convolution")
            at = f"static_cast<float*>(buffers[{len(self.body.inputs) + i}]) + at"
            self.lines.append(f"korch::store<float, W>({at}, {self.names[value]});")
        fills = {p.attributes.value for p in chain if _is_filled(p)} or {0.0}
        return Match(self.primitive, self.position[source], self.position[weights], sources,
                     fills.pop(), tuple(self.lines), frozenset(self.full))  # fmt: skip

    def _reading(self, value: int) -> tuple[int, list[Any]] | Refusal:
        """Return the image, and the steps from the convolution down to it."""
        chain: list[Any] = []
        while value not in self.position:
            found = [p for p in self.body.primitives if p.output == value and p.op in _MOVES]
            if not found:
                return Refusal("the image is computed in the group")
            chain.append(found[0])
            value = found[0].inputs[0]
        if len({p.attributes.value for p in chain if _is_filled(p)}) > 1:
            return Refusal("two pads have different values")
        return value, chain

    def _sources(
        self, source: int, chain: list[Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | Refusal:
        shape = self.body.types[source].shape
        tables = [list(range(n)) for n in shape]
        for step in reversed(chain):
            for axis in range(4):
                size = len(tables[axis])
                tables[axis] = [i if i < 0 else tables[axis][i] for i in _moves(step, axis, size)]
        if any(tables[axis] != list(range(shape[axis])) for axis in (0, 1)):
            return Refusal("images or channels are moved")
        attributes: Any = self.primitive.attributes
        edge = attributes.tile + 2
        counts = tile_counts(self.shape, attributes.tile)
        padded = []
        for table, begin, count in zip(tables[2:], attributes.pads_begin, counts, strict=True):
            line = [ZERO] * begin + table
            padded.append(tuple(line + [ZERO] * ((count - 1) * attributes.tile + edge - len(line))))
        return padded[0], padded[1]

    def _step(self, primitive: Primitive) -> Refusal | None:
        """Add the line of an elementwise primitive or a broadcast; they come in order."""
        if self.body.types[primitive.output].shape != self.shape:
            return Refusal(f"{primitive.op} has another shape than the convolution")
        if primitive.op == "broadcast":
            text = self._broadcast(primitive.inputs[0])
        elif primitive.row.category is Category.ELEMENTWISE:
            arguments = [self._argument(value) for value in primitive.inputs]
            known = [a for a in arguments if a is not None]
            text = call(primitive.op, known) if len(known) == len(arguments) else None
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
            return literal(float(constant.scalar)) if constant.is_uniform else None
        position = self.position.get(value)
        if position is None or self.body.types[value].shape != self.shape:
            return None
        self.full.add(position)
        return f"korch::load<float, W>(static_cast<const float*>(buffers[{position}]) + at)"

    def _broadcast(self, value: int) -> str | None:
        constant = self.body.constants.get(value)
        if constant is not None:
            return literal(float(constant.scalar)) if constant.is_uniform else None
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


_MOVES = ("pad", "slice", "take")


def _is_filled(step: Primitive) -> bool:
    attributes: Any = step.attributes
    return step.op == "pad" and attributes.mode == "constant" and attributes.value != 0


def _moves(step: Primitive, axis: int, size: int) -> list[int]:
    """Return where a step's output reads its input along an axis of `size` elements."""
    a: Any = step.attributes
    if step.op == "slice":
        return [a.start[axis] + i * a.step[axis] for i in range(a.size[axis])]
    if step.op == "take":
        return list(a.indices) if a.axis == axis else list(range(size))
    places = range(a.before[axis] + size + a.after[axis])
    fill = FILL if _is_filled(step) else ZERO
    found = (pad_source(i, size, a.before[axis], a.mode) for i in places)
    return [fill if i < 0 else i for i in found]
