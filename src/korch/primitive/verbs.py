"""Methods that add primitives to a graph, here called verbs.

Operands of different shapes are broadcast explicitly. Numbers and uniform constants become
uniform constants of the full shape, which store one element.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueId, ValueType

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiteralOperand:
    """A number as an operand; made by `lit`."""

    number: float


def lit(number: float) -> LiteralOperand:
    """Return a number as an operand; it takes the element type of the operation."""
    return LiteralOperand(float(number))


class Verbs:
    """Adds primitives to a builder.

    Attributes:
        builder: the primitive graph so far.
        origin: the model's node or the rule that the primitives come from.
    """

    def __init__(self, builder: GraphBuilder, origin: str) -> None:
        self.builder, self.origin = builder, origin

    def shape(self, value: ValueId) -> Shape:
        """Return a value's shape."""
        return self.builder.type(value).shape

    def rank(self, value: ValueId) -> int:
        """Return a value's number of axes."""
        return len(self.shape(value))

    def dtype(self, value: ValueId) -> DType:
        """Return a value's element type."""
        return self.builder.type(value).dtype

    def is_float(self, value: ValueId) -> bool:
        """Return whether a value's elements are real numbers."""
        return self.dtype(value).is_float

    def add(self, op: str, *values: ValueId, attributes: Attributes | None = None) -> ValueId:
        """Add one primitive."""
        return self.builder.add(op, values, attributes, origin=self.origin)

    def constant(self, array: Array) -> ValueId:
        """Return a constant's value."""
        return self.builder.constant(np.asarray(array))

    def full(self, number: npt.ArrayLike, type_: ValueType) -> ValueId:
        """Return a constant whose elements are all `number`."""
        with np.errstate(all="ignore"):
            item = np.asarray(number).astype(type_.dtype.numpy)
        return self.constant(np.broadcast_to(item, type_.shape))

    def elementwise(self, op: str, *operands: ValueId | LiteralOperand) -> ValueId:
        """Add an elementwise primitive after broadcasting its operands to one shape.

        Args:
            op: the operation.
            operands: values, or numbers, which take the type of the last value.
        """
        values = [x for x in operands if not isinstance(x, LiteralOperand)]
        dtype = self.dtype(values[-1])
        shape = np.broadcast_shapes(*(self.shape(value) for value in values))
        return self.add(
            op,
            *(
                self.full(x.number, ValueType(shape, dtype))
                if isinstance(x, LiteralOperand)
                else self.broadcast(x, shape)
                for x in operands
            ),
        )

    def broadcast(self, value: ValueId, shape: Sequence[int]) -> ValueId:
        """Return a value broadcast to a shape; the value itself if it already has this shape."""
        shape = tuple(shape)
        if self.shape(value) == shape:
            return value
        if self.builder.constant_of(value) is not None:
            value = self.reshape(value, (1,) * (len(shape) - self.rank(value)) + self.shape(value))
            if self.shape(value) == shape:
                return value
        return self.add("broadcast", value, attributes=BroadcastAttributes(shape))

    def reshape(self, value: ValueId, shape: Sequence[int]) -> ValueId:
        """Return a value reshaped to a shape; the value itself if it already has this shape."""
        shape = tuple(int(n) for n in shape)
        if self.shape(value) == shape:
            return value
        return self.add("reshape", value, attributes=ReshapeAttributes(shape))

    def transpose(self, value: ValueId, perm: Sequence[int]) -> ValueId:
        """Return a value with its axes permuted."""
        perm = tuple(int(axis) for axis in perm)
        if perm == tuple(range(len(perm))):
            return value
        return self.add("transpose", value, attributes=TransposeAttributes(perm))

    def slice(
        self, value: ValueId, start: Sequence[int], size: Sequence[int], step: Sequence[int] | None = None
    ) -> ValueId:
        """Return a part of a value: start, size and step per axis."""
        step = tuple(step) if step is not None else (1,) * len(tuple(start))
        if tuple(size) == self.shape(value) and all(s == 1 or n <= 1 for s, n in zip(step, size, strict=True)):
            return value
        return self.add("slice", value, attributes=SliceAttributes(tuple(start), tuple(size), step))

    def slice_axis(self, value: ValueId, axis: int, start: int, size: int, step: int = 1) -> ValueId:
        """Return a part of a value along one axis."""
        shape = self.shape(value)
        starts, steps = [0] * len(shape), [1] * len(shape)
        starts[axis], steps[axis] = start, step
        return self.slice(value, starts, (*shape[:axis], size, *shape[axis + 1 :]), steps)

    def take(self, value: ValueId, axis: int, indices: Sequence[int]) -> ValueId:
        """Return the elements of a value at indices along one axis; a slice if the indices are evenly spaced."""
        size, count = self.shape(value)[axis], len(indices)
        step = indices[1] - indices[0] if count > 1 else 1
        is_even = count > 0 and step != 0 and all(b - a == step for a, b in itertools.pairwise(indices))
        if is_even:
            return self.slice_axis(value, axis, int(indices[0]), count, int(step))
        if count and size == 1:
            shape = self.shape(value)
            return self.broadcast(value, (*shape[:axis], count, *shape[axis + 1 :]))
        whole = tuple(int(i) for i in indices)
        return self.add("take", value, attributes=TakeAttributes(axis, whole))

    def concat(self, values: Sequence[ValueId], axis: int) -> ValueId:
        """Return values concatenated along an axis."""
        if len(values) == 1:
            return values[0]
        return self.add("concat", *values, attributes=ConcatAttributes(axis))

    def pad(
        self, value: ValueId, before: Sequence[int], after: Sequence[int], mode: str = "constant", fill: float = 0.0
    ) -> ValueId:
        """Return a value with elements added around it."""
        if not any((*before, *after)):
            return value
        attributes = PadAttributes(tuple(before), tuple(after), mode, fill)
        return self.add("pad", value, attributes=attributes)

    def cast(self, value: ValueId, dtype: DType) -> ValueId:
        """Return a value with its elements converted."""
        if self.dtype(value) is dtype:
            return value
        return self.add("cast", value, attributes=CastAttributes(dtype.value))

    def reduce(self, name: str, value: ValueId, axes: Sequence[int]) -> ValueId:
        """Return a reduction (sum, prod, max, min) along axes, which remain with size 1."""
        axes = tuple(sorted(axes))
        if not axes:
            return value
        return self.add(f"reduce_{name}", value, attributes=ReduceAttributes(axes))

    def divide_exactly(self, value: ValueId, count: int) -> ValueId:
        """Return a value divided by a number, as a product if the reciprocal is exact.

        A division rounds once; a product by a rounded reciprocal rounds twice.
        """
        if count > 0 and count & (count - 1) == 0:
            return value if count == 1 else self.elementwise("mul", value, lit(1.0 / count))
        return self.elementwise("div", value, lit(count))

    def mean(self, value: ValueId, axes: Sequence[int]) -> ValueId:
        """Return the mean along axes, which remain with size 1."""
        count = math.prod(self.shape(value)[axis] for axis in axes)
        return self.divide_exactly(self.reduce("sum", value, axes), count)

    def variance(self, value: ValueId, axes: Sequence[int]) -> tuple[ValueId, ValueId, ValueId]:
        """Return the deviations from the mean, their mean square, and the mean.

        It takes two passes, because E[x²] - E[x]² would cancel where the mean is large.
        """
        mean = self.mean(value, axes)
        deviation = self.elementwise("sub", value, mean)
        square = self.elementwise("mul", deviation, deviation)
        return deviation, self.mean(square, axes), mean


Rewrite = Callable[[Verbs, Primitive, Mapping[int, ValueId]], ValueId]
"""Adds what computes a primitive's value to a graph; given the new value of each old one that was computed before."""


def copied(verbs: Verbs, primitive: Primitive, values: Mapping[int, ValueId]) -> ValueId:
    """Add the same primitive."""
    return verbs.add(primitive.op, *(values[v] for v in primitive.inputs), attributes=primitive.attributes)


def rebuilt(graph: PrimitiveGraph, write: Rewrite = copied, order: Iterable[int] | None = None) -> PrimitiveGraph:
    """Return a graph without alternatives with each of its primitives written anew.

    `order`: the values in an order in which they can be computed; None if they are numbered so.
    """
    builder = GraphBuilder()
    values = {value: builder.input(name, graph.types[value]) for name, value in graph.inputs}
    makers = {primitive.output: p for p, primitive in enumerate(graph.primitives)}
    for value in range(len(graph.types)) if order is None else order:
        if value in graph.constants:
            values[value] = builder.constant(graph.constants[value].array)
        elif value in makers:
            verbs = Verbs(builder, graph.origins[makers[value]] if graph.origins else "")
            values[value] = write(verbs, graph.primitives[makers[value]], values)
    for name, value in graph.outputs:
        builder.output(name, values[value])
    return builder.freeze()
