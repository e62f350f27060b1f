"""A group's body -> tensor expressions of TVM, whose elementwise operations are Korch's own.

TVM simplifies floats as if they were real numbers (x + y - y is x, and 0 x is 0), and its passes treat an expression as
a tree, in which the operands of a polynomial are repeated at each of its steps. So each elementwise operation is a call
of a function that TVM does not know. Korch prints these functions, and LLVM inlines them (`lower.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.reduce import PoolAttributes, ReduceAttributes, identity
from korch.primitive.types import DType, row_major_strides
from korch.tile.llvm.arithmetic import KIND, Arithmetic
from korch.tile.llvm.emit import Emit, SsaValue
from korch.tile.llvm.isa import Isa

Index = tuple[Any, ...]


def stored(dtype: DType) -> str:
    """Return TVM's name of an element type."""
    return str(dtype.numpy)


class Operations:
    """Functions of scalars, which are printed when they are first called."""

    def __init__(self, isa: Isa) -> None:
        self.emit = Emit()
        self.arithmetic = Arithmetic(self.emit, isa)
        self._names: set[str] = set()

    def apply(self, op: str, dtype: DType, types: Sequence[DType], arguments: Sequence[Any]) -> Any:
        """Return the call of an elementwise operation."""
        return self._call(op, dtype, types, arguments, lambda x: self.arithmetic.apply(op, dtype, types[-1], x))

    def combine(self, op: str, dtype: DType, a: Any, b: Any) -> Any:
        """Return the call that combines two numbers in a reduction."""
        return self._call(op, dtype, (dtype, dtype), (a, b), lambda x: self.arithmetic.combine(op, dtype, *x))

    def _call(
        self,
        op: str,
        dtype: DType,
        types: Sequence[DType],
        arguments: Sequence[Any],
        printed: Callable[[list[SsaValue]], SsaValue],
    ) -> Any:
        name = "_".join(("NAME", op, dtype.value, *(type_.value for type_ in types)))
        if name not in self._names:
            self._names.add(name)
            given = [SsaValue(f"%x{i}", KIND[type_]) for i, type_ in enumerate(types)]
            head = f"internal {KIND[dtype]} @{name}({', '.join(x.typed for x in given)}) alwaysinline nounwind"
            with self.emit.function(head):
                self.emit.effect(f"ret {printed(given).typed}")
        return tirx.call_pure_extern(stored(dtype), name, *arguments)


class GroupTensors:
    """Tensors of TVM for the values of a body. A scalar is a tensor of one element."""

    def __init__(self, body: PrimitiveGraph, isa: Isa) -> None:
        self.body, self.operations = body, Operations(isa)
        self.tensors: dict[int, Any] = {}
        for name, value in body.inputs:
            type_ = body.types[value]
            self.tensors[value] = te.placeholder(type_.shape or (1,), stored(type_.dtype), name)
        for primitive in body.primitives:
            self.tensors[primitive.output] = self._computed(primitive)

    def function(self) -> Any:
        """Return the group as a function of its inputs, then its outputs."""
        ends = [*(value for _, value in self.body.inputs), *(value for _, value in self.body.outputs)]
        return te.create_prim_func([self.tensors[value] for value in ends])

    def _computed(self, primitive: Primitive) -> Any:
        body, name = self.body, f"v{primitive.output}"
        type_, rank = body.types[primitive.output], body.types[primitive.output].rank
        shape = type_.shape or (1,)
        if primitive.row.category is Category.ELEMENTWISE:

            def element(*index: Any) -> Any:
                given = [self._read(value, index[:rank]) for value in primitive.inputs]
                types = [body.types[value].dtype for value in primitive.inputs]
                return self.operations.apply(primitive.op, type_.dtype, types, given)

            return te.compute(shape, element, name)
        if primitive.op.startswith(("reduce_", "pool_")) or primitive.op == "matmul":
            return self._reduced(primitive, shape, name)
        return te.compute(shape, lambda *index: self._moved(primitive, index[:rank]), name)

    def _read(self, value: int, index: Index) -> Any:
        """Return an element of a value."""
        if value in self.body.constants:
            return self._number(self.body.constants[value].scalar.item(), self.body.types[value].dtype)
        return self.tensors[value][tuple(index) or (0,)]

    def _number(self, value: float | int, dtype: DType) -> Any:
        return tirx.const(value, stored(dtype))

    # Sums, products and other reductions

    def _reduced(self, primitive: Primitive, shape: Sequence[int], name: str) -> Any:
        type_ = self.body.types[primitive.output]
        source = self.body.types[primitive.inputs[0]]
        attributes = primitive.attributes
        if isinstance(attributes, ReduceAttributes):
            extents = [source.shape[axis] for axis in attributes.axes]
        elif isinstance(attributes, PoolAttributes):
            extents = list(attributes.kernel)
        else:
            extents = [source.shape[-1]]
        axes = [te.reduce_axis((0, extent), f"{name}_r{i}") for i, extent in enumerate(extents)]
        op = primitive.op.partition("_")[2] if primitive.op != "matmul" else "sum"

        def element(*index: Any) -> Any:
            found = self._term(primitive, op, index[: type_.rank], [axis.var for axis in axes])
            return self._reducer(op, type_.dtype)(found, axis=axes) if axes else found

        return te.compute(shape, element, name)

    def _reducer(self, op: str, dtype: DType) -> Any:
        if op == "sum" and dtype is not DType.BOOL:
            return te.sum
        operations = self.operations
        return te.comm_reducer(
            lambda a, b: operations.combine(op, dtype, a, b), lambda _: self._number(identity(op, dtype), dtype)
        )

    def _term(self, primitive: Primitive, op: str, index: Index, reduced: Sequence[Any]) -> Any:
        """Return the element of a reduction at the indices of its result and of the reduced axes."""
        attributes, value = primitive.attributes, primitive.inputs[0]
        if isinstance(attributes, ReduceAttributes):
            place = list(index)
            for axis, variable in zip(attributes.axes, reduced, strict=True):
                place[axis] = variable
            return self._read(value, tuple(place))
        if isinstance(attributes, PoolAttributes):
            lead = len(index) - len(reduced)
            moved = [
                index[lead + i] * attributes.strides[i] + tap * attributes.dilations[i] - attributes.pads_begin[i]
                for i, tap in enumerate(reduced)
            ]
            dtype = self.body.types[value].dtype
            return self._inside(value, (*index[:lead], *moved), self._number(identity(op, dtype), dtype))
        *batch, row, column = index
        (k,) = reduced
        factors = [
            self._read(v, (*self._batch(v, batch), *own))
            for v, own in zip(primitive.inputs, ((row, k), (k, column)), strict=True)
        ]
        return factors[0] * factors[1]

    def _batch(self, value: int, batch: Sequence[Any]) -> list[Any]:
        return [0 if n == 1 else i for n, i in zip(self.body.types[value].shape[:-2], batch, strict=True)]

    # Moves

    def _inside(self, value: int, index: Index, outside: Any) -> Any:
        """Return an element of a value, or another number where the index is outside of it."""
        shape, conditions = self.body.types[value].shape, []
        for i, n in zip(index, shape, strict=True):
            conditions += [i >= 0, i < n]
        return tirx.if_then_else(tirx.all(*conditions), self._read(value, index), outside)

    def _moved(self, primitive: Primitive, index: Index) -> Any:
        """Return the element that a layout primitive or a broadcast reads for an index of its result."""
        value = primitive.inputs[0]
        shape = self.body.types[value].shape
        match primitive.attributes:
            case TransposeAttributes(perm):
                return self._read(value, tuple(index[perm.index(axis)] for axis in range(len(perm))))
            case ReshapeAttributes(out_shape):
                strides = row_major_strides(out_shape)
                rest = sum((i * s for i, s in zip(index, strides, strict=True)), tirx.const(0, "int32"))
                own = row_major_strides(shape)
                return self._read(
                    value, tuple(tirx.floormod(tirx.floordiv(rest, s), n) for n, s in zip(shape, own, strict=True))
                )
            case SliceAttributes(start, _, step):
                return self._read(value, tuple(s + i * k for s, i, k in zip(start, index, step, strict=True)))
            case TakeAttributes(axis, _) as take:
                place = tirx.floordiv(index[axis], take.repeats)
                return self._read(value, (*index[:axis], place, *index[axis + 1 :]))
            case PadAttributes() as pad:
                return self._padded(value, pad, index)
            case ConcatAttributes(axis):
                return self._joined(primitive.inputs, axis, index)
        lead = len(index) - len(shape)
        return self._read(value, tuple(0 if n == 1 else index[lead + a] for a, n in enumerate(shape)))

    def _padded(self, value: int, pad: PadAttributes, index: Index) -> Any:
        type_ = self.body.types[value]
        moved = [i - before for i, before in zip(index, pad.before, strict=True)]
        if pad.mode == "constant":
            kind = float if type_.dtype.is_float else int
            return self._inside(value, tuple(moved), self._number(kind(pad.value), type_.dtype))
        for axis, n in enumerate(type_.shape):
            i = moved[axis]
            low, high = (0, n - 1) if pad.mode == "edge" else (0 - i, 2 * (n - 1) - i)
            if pad.after[axis]:
                i = tirx.Select(i >= n, tirx.const(high, "int32") if isinstance(high, int) else high, i)
            if pad.before[axis]:
                i = tirx.Select(moved[axis] < 0, tirx.const(low, "int32") if isinstance(low, int) else low, i)
            moved[axis] = i
        return self._read(value, tuple(moved))

    def _joined(self, values: Sequence[int], axis: int, index: Index) -> Any:
        """Return the element of a concatenation."""
        sizes = [self.body.types[value].shape[axis] for value in values]
        end, made = sum(sizes), None
        for value, size in reversed(list(zip(values, sizes, strict=True))):
            end -= size
            found = self._read(value, (*index[:axis], index[axis] - end, *index[axis + 1 :]))
            made = found if made is None else tirx.if_then_else(index[axis] < end + size, found, made)
        return made
