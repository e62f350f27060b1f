"""What a fission rule sees of its operator, and the verbs with which it emits primitives.

Operands of different shapes are broadcast explicitly; numbers and uniform constants become
constants of the full shape, which cost nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from korch.fission.products import conv_products, matmul_products
from korch.frontend.operator import Operator
from korch.primitive.graph import GraphBuilder
from korch.primitive.op import Array, Attributes
from korch.primitive.ops import OPS
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
from korch.primitive.types import DType, ValueType

Shape = tuple[int, ...]

LINEAR = ("matmul", "conv", "conv_transpose")


class Context:
    """One operator while it is split.

    Attributes:
        operator: the operator.
        builder: the primitive graph so far.
    """

    def __init__(
        self,
        operator: Operator,
        builder: GraphBuilder,
        values: Mapping[str, int],
        types: Mapping[str, ValueType],
        read: frozenset[str] = frozenset(),
    ) -> None:
        self.operator, self.builder = operator, builder
        self._values, self._types, self._read = values, types, read

    # What the operator says.

    @property
    def version(self) -> int:
        """The opset."""
        return self.operator.version

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values of the inputs that are given."""
        return tuple(self._values[name] for name in self.operator.inputs if name)

    def input(self, position: int) -> int:
        """Return the value of an input that must be given."""
        return self._values[self.operator.inputs[position]]

    def optional(self, position: int) -> int | None:
        """Return the value of an input, or None if it is left out."""
        return self.input(position) if self.is_given(position) else None

    def is_given(self, position: int) -> bool:
        """Return whether an input is given."""
        return position < len(self.operator.inputs) and bool(self.operator.inputs[position])

    def array(self, position: int) -> Array | None:
        """Return the elements of an input that is known now, else None."""
        value = self.optional(position)
        constant = None if value is None else self.builder.constant_of(value)
        return None if constant is None else constant.array

    def ints(self, position: int) -> Shape | None:
        """Return the elements of a known input of integers, else None."""
        array = self.array(position)
        return None if array is None else tuple(int(n) for n in array.reshape(-1))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value."""
        return self.operator.attributes.get(name, default)

    def output_type(self, position: int = 0) -> ValueType:
        """Return the type of an output that is given."""
        return self._types[self.operator.outputs[position]]

    def is_read(self, position: int) -> bool:
        """Return whether anything reads an output."""
        outputs = self.operator.outputs
        return position < len(outputs) and bool(outputs[position]) and (outputs[position] in self._read)

    # What is known of values.

    def shape(self, value: int) -> Shape:
        """Return a value's shape."""
        return self.builder.type(value).shape

    def rank(self, value: int) -> int:
        """Return a value's number of axes."""
        return len(self.shape(value))

    def dtype(self, value: int) -> DType:
        """Return a value's element type."""
        return self.builder.type(value).dtype

    def is_float(self, value: int) -> bool:
        """Return whether a value's elements are real numbers."""
        return self.dtype(value).is_float

    # Verbs.

    def add(self, op: str, *values: int, attributes: Attributes | None = None) -> int:
        """Emit one primitive; a linear one of other elements than float32 as what can be run."""
        if op in LINEAR:
            if not all(self.builder.type(value).size for value in values):  # sums of no numbers
                types = [self.builder.type(value) for value in values]
                return self.full(0, OPS[op].infer(types, attributes))
            dtype = self.dtype(values[0])
            if dtype in (DType.F16, DType.BF16):
                wide = [self.cast(value, DType.F32) for value in values]
                return self.cast(self.add(op, *wide, attributes=attributes), dtype)
            if dtype is not DType.F32:
                products = self._products(op, values, attributes)
                if products is not None:
                    return products
        return self.builder.add(op, values, attributes, origin=self.operator.label)

    def _products(self, op: str, values: tuple[int, ...], attributes: Attributes | None) -> int | None:
        if op == "matmul":
            return matmul_products(self, *values)
        types = [self.builder.type(value) for value in values]
        output = OPS[op].infer(types, attributes).shape
        x, w = values
        return conv_products(self, op, x, w, attributes, output)

    def constant(self, array: Array) -> int:
        """Return a constant's value."""
        return self.builder.constant(np.asarray(array))

    def full(self, number: Any, type_: ValueType) -> int:
        """Return a constant whose elements are all `number`."""
        with np.errstate(all="ignore"):
            item = np.asarray(number).astype(type_.dtype.numpy)
        return self.constant(np.broadcast_to(item, type_.shape))

    def elementwise(self, op: str, *operands: int | float) -> int:
        """Emit an elementwise primitive of operands that are broadcast to one shape.

        Args:
            op: the operation.
            operands: values (int), or numbers (float), which take the type of the last value.
        """
        values = [x for x in operands if not isinstance(x, float)]
        dtype = self.dtype(values[-1])
        shape = np.broadcast_shapes(*(self.shape(value) for value in values))
        return self.add(
            op,
            *(
                self.full(x, ValueType(shape, dtype)) if isinstance(x, float) else self.broadcast(x, shape)
                for x in operands
            ),
        )

    def broadcast(self, value: int, shape: Sequence[int]) -> int:
        """Return a value broadcast to a shape, itself if it has the shape already."""
        shape = tuple(shape)
        if self.shape(value) == shape:
            return value
        if self.builder.constant_of(value) is not None:
            value = self.reshape(value, (1,) * (len(shape) - self.rank(value)) + self.shape(value))
            if self.shape(value) == shape:
                return value
        return self.add("broadcast", value, attributes=BroadcastAttributes(shape))

    def reshape(self, value: int, shape: Sequence[int]) -> int:
        """Return a value with another shape, itself if it has the shape already."""
        shape = tuple(int(n) for n in shape)
        if self.shape(value) == shape:
            return value
        return self.add("reshape", value, attributes=ReshapeAttributes(shape))

    def transpose(self, value: int, perm: Sequence[int]) -> int:
        """Return a value with its axes permuted."""
        perm = tuple(int(axis) for axis in perm)
        if perm == tuple(range(len(perm))):
            return value
        return self.add("transpose", value, attributes=TransposeAttributes(perm))

    def slice(self, value: int, start: Sequence[int], size: Sequence[int], step: Sequence[int] | None = None) -> int:
        """Return a part of a value: start, size and step per axis."""
        step = tuple(step) if step is not None else (1,) * len(tuple(start))
        if tuple(size) == self.shape(value) and all(s == 1 or n <= 1 for s, n in zip(step, size, strict=True)):
            return value
        return self.add("slice", value, attributes=SliceAttributes(tuple(start), tuple(size), step))

    def slice_axis(self, value: int, axis: int, start: int, size: int, step: int = 1) -> int:
        """Return a part of a value along one axis."""
        shape = self.shape(value)
        starts, steps = [0] * len(shape), [1] * len(shape)
        starts[axis], steps[axis] = start, step
        return self.slice(value, starts, (*shape[:axis], size, *shape[axis + 1 :]), steps)

    def take(self, value: int, axis: int, indices: Sequence[int]) -> int:
        """Return the elements of a value at indices along one axis; a slice if they are even."""
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

    def concat(self, values: Sequence[int], axis: int) -> int:
        """Return values laid one after another along an axis."""
        if len(values) == 1:
            return values[0]
        return self.add("concat", *values, attributes=ConcatAttributes(axis))

    def pad(
        self, value: int, before: Sequence[int], after: Sequence[int], mode: str = "constant", fill: float = 0.0
    ) -> int:
        """Return a value with elements added around it."""
        if not any((*before, *after)):
            return value
        attributes = PadAttributes(tuple(before), tuple(after), mode, fill)
        return self.add("pad", value, attributes=attributes)

    def cast(self, value: int, dtype: DType) -> int:
        """Return a value with its elements converted."""
        if self.dtype(value) is dtype:
            return value
        return self.add("cast", value, attributes=CastAttributes(dtype.value))

    def reduce(self, name: str, value: int, axes: Sequence[int]) -> int:
        """Return a reduction (sum, prod, max, min) along axes, which stay with size 1."""
        axes = tuple(sorted(axes))
        if not axes:
            return value
        return self.add(f"reduce_{name}", value, attributes=ReduceAttributes(axes))

    def divide_exactly(self, value: int, count: int) -> int:
        """Return a value divided by a number: a product if the reciprocal is exact.

        Division rounds once; a product with a rounded reciprocal rounds twice.
        """
        if count > 0 and count & (count - 1) == 0:
            return value if count == 1 else self.elementwise("mul", value, 1.0 / count)
        return self.elementwise("div", value, float(count))

    def mean(self, value: int, axes: Sequence[int]) -> int:
        """Return the mean along axes, which stay with size 1."""
        count = math.prod(self.shape(value)[axis] for axis in axes)
        return self.divide_exactly(self.reduce("sum", value, axes), count)

    def variance(self, value: int, axes: Sequence[int]) -> tuple[int, int, int]:
        """Return the deviations from the mean, their mean square, and the mean.

        Two passes: E[x²] - E[x]² would cancel where the mean is large.
        """
        mean = self.mean(value, axes)
        deviation = self.elementwise("sub", value, mean)
        square = self.elementwise("mul", deviation, deviation)
        return deviation, self.mean(square, axes), mean


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    return axis + rank if axis < 0 else axis
