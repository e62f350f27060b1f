"""A value, an axis and a number -> the value with this number in the elements beyond the valid ones.

The invariant of a masked graph: an element is *valid* if all of its coordinates along free factors are less than the
model's sizes, and each valid element equals the element that the model computes at these coordinates. All other
elements are arbitrary, possibly NaN, unless a `Fill` says more. Executables pad their inputs with zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.primitive.gathers import gather
from korch.primitive.graph import GraphBuilder, Primitive
from korch.primitive.op import Category
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import identity
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.verbs import Verbs, lit
from korch.ranges.form import SIZES, Along, Extent, Factor, Form, Hidden, Places, Table, axis_of, is_free, prefix

NARROW = (DType.I8, DType.U8)
"""The types of quantized values that are multiplied."""

DEQUANTIZES = ("cast", "sub", "mul")
"""The operations of a dequantization."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The number in all elements beyond the valid ones along an axis, at any coordinates along other axes."""

    number: float  # the value of all of them
    # whether these elements of a line along the axis may have another value if valid elements of the line are NaN, so
    # that a sum or a matrix product over the line is NaN in the model, too
    is_soft: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a masked graph."""

    id: ValueId  # its number in the graph
    form: Form  # how its axes depend on the dimensions
    fills: tuple[Fill | None, ...]  # per axis, what is known of the elements beyond the valid ones
    # the operation "reduce_max", "reduce_sum" or "isnan" that gave it, with its operand, for softmax
    part: tuple[str, ValueId] | None = None


def plain(id: ValueId, form: Form, fills: Sequence[Fill | None] = ()) -> Value:
    """Return a value; fills of axes that are not free are dropped."""
    known = tuple(fills) or (None,) * len(form)
    return Value(id, form, tuple(f if is_free(a) else None for f, a in zip(known, form, strict=True)))


def identity_of(name: str, dtype: DType) -> float:
    """Return the identity of a reduction, of a whole axis or of windows."""
    return identity(name.partition("_")[2], dtype)


class Masks:
    """Adds masks to a graph, without duplicates.

    Attributes:
        verbs: adds primitives.
        hidden: the inputs from which masks and numbers are read.
        makers: for some values, the primitive that computes it, and the operand that it moves or dequantizes.
    """

    def __init__(self, builder: GraphBuilder) -> None:
        self.verbs = Verbs(builder, "")
        self.hidden: dict[Hidden, ValueId] = {}
        self.makers: dict[ValueId, tuple[Primitive, Value]] = {}

    def input(self, wanted: Hidden) -> ValueId:
        """Return a hidden input; equal inputs are shared."""
        key = replace(wanted, name="")
        if key not in self.hidden:
            self.hidden[key] = self.verbs.builder.input(
                _named(key, len(self.hidden)), ValueType(key.shape, DType(key.dtype))
            )
        return self.hidden[key]

    def records(self) -> tuple[Hidden, ...]:
        """Return the hidden inputs in order, with their names."""
        return tuple(replace(key, name=_named(key, i)) for i, key in enumerate(self.hidden))

    def filled(self, value: Value, axes: Sequence[int], number: float, accepts_soft: bool = False) -> Value:
        """Return a value with a number beyond its valid elements along some axes.

        The mask is put before transposes and reshapes that compute the value, so that the kernel before them can store
        the masked value, and before a dequantization, so that bytes remain operands of products. Axes that are masked
        at the same place share one mask.
        """
        todo = [
            axis
            for axis in axes
            if (fill := value.fills[axis]) is None or fill.number != number or (fill.is_soft and not accepts_soft)
        ]
        before = [self._before(value, axis, number) for axis in todo]
        moved = [found for found in before if found is not None]
        if moved and len(moved) < len(before):
            for axis in todo:
                value = self.filled(value, (axis,), number, accepts_soft)
            return value
        if not moved:
            return self._masked(value, todo, number) if todo else value
        maker, source, _, wanted = moved[0]
        found = self.filled(source, [place for _, _, places, _ in moved for place in places], wanted, accepts_soft)
        inputs = tuple(found.id if v == source.id else v for v in maker.inputs)
        id_ = self.verbs.add(maker.op, *map(ValueId, inputs), attributes=maker.attributes)
        self.makers[id_] = (replace(maker, inputs=inputs), found)
        for axis, (_, _, places, _) in zip(todo, moved, strict=True):
            is_soft = any(fill.is_soft for place in places if (fill := found.fills[place]) is not None)
            value = replace(value, id=id_, fills=_with(value, axis, number, is_soft))
        return value

    def _masked(self, value: Value, axes: Sequence[int], number: float) -> Value:
        mask = self._along(value, axes, "mask")
        type_ = self.verbs.builder.type(value.id)
        id_ = self.verbs.add("where", mask, value.id, self.verbs.full(number, type_))
        for axis in axes:
            value = replace(value, id=id_, fills=_with(value, axis, number), part=None)
        return value

    def _before(self, value: Value, axis: int, number: float) -> tuple[Primitive, Value, tuple[int, ...], float] | None:
        """Return how to mask before the primitive that computes a value, or None to mask the value itself.

        The result has that primitive, its operand, the operand's axes to mask, and the number for them.
        """
        if value.id not in self.makers:
            return None
        maker, source = self.makers[value.id]
        if maker.row.category is not Category.ELEMENTWISE:
            places = _axes_before(maker, source.form, value.form, axis)
            return (maker, source, places, number) if places else None
        wanted = self._preimage(maker, source, number)
        if wanted is None or source.form[axis] != value.form[axis]:
            return None
        is_bytes = self.verbs.dtype(source.id) in NARROW
        return (maker, source, (axis,), wanted) if is_bytes or self._before(source, axis, wanted) is not None else None

    def _preimage(self, maker: Primitive, source: Value, number: float) -> float | None:
        """Return the number from which an operation of a dequantization computes `number`; None if there is none."""
        constants = [self.verbs.builder.constant_of(v) for v in maker.inputs if v != source.id]
        if not math.isfinite(number) or any(c is None or not c.is_uniform for c in constants):
            return None
        arrays = [c.array.reshape(-1)[0] for c in constants if c is not None]
        if maker.op != "cast" and not (len(arrays) == 1 and maker.inputs[0] == source.id):
            return None
        shift = float(arrays[0]) if maker.op == "sub" else 0.0  # a product is 0 only for 0
        found = np.asarray(number + shift).astype(self.verbs.dtype(source.id).numpy)
        made = maker.row.reference([found, *arrays], maker.attributes)
        return float(found) if made == number else None

    def only_last(self, value: Value, axis: int, offset: int) -> ValueId:
        """Return the element along an axis that `offset` valid ones follow, as a sum in which all others are 0."""
        mask = self._along(value, (axis,), "end", offset)
        type_ = self.verbs.builder.type(value.id)
        alone = self.verbs.add("where", mask, value.id, self.verbs.full(0, type_))
        return self.verbs.reduce("sum", alone, (axis,))

    def places(self, count: int, places: Places) -> ValueId:
        """Return the input with `count` places of an axis."""
        return self.input(Hidden("", "places", (Factor(count),), 1, dtype="i64", places=places))

    def gathered(self, value: Value, axis: int, count: int, places: Places | Table) -> Value:
        """Return the `count` elements of a value at places along an axis, which become a factor without a form."""
        if isinstance(places, Table):
            indices = self.input(Hidden("", "table", (Factor(count),), 1, dtype="i64", table=places))
        else:
            indices = self.places(count, places)
        return self._gathered(value, axis, indices, Factor(count))

    def ordered(self, value: Value, axis: int, valid: Extent) -> Value:
        """Return a concatenation with its valid elements first, of which there are `valid`."""
        indices = self.input(Hidden("", "order", value.form[axis] or (), 1, dtype="i64"))
        return self._gathered(value, axis, indices, Factor(self.verbs.shape(value.id)[axis], valid))

    def _gathered(self, value: Value, axis: int, indices: ValueId, factor: Factor) -> Value:
        if self.verbs.dtype(value.id) is not DType.BOOL:
            value = self.filled(value, (axis,), 0)  # so that elements beyond the valid ones need not be computed
        form = tuple((factor,) if i == axis else own for i, own in enumerate(value.form))
        return plain(gather(self.verbs, value.id, indices, axis), form)

    def count(self, extent: Extent, type_: ValueType) -> ValueId:
        """Return the number of elements of an extent in all elements of a value of a type."""
        number = Hidden("", "number", (Factor(1, extent),), type_.rank, dtype=type_.dtype.value, coefficient=1.0)
        return self.verbs.broadcast(self.input(number), type_.shape)

    def extended(self, value: Value, axis: int) -> Value:
        """Return a value with its last valid element along an axis in all elements beyond the valid ones."""
        along = prefix(value.form[axis])
        if along is None:
            raise AssertionError("an axis whose valid elements are not its first ones")
        last = self.gathered(value, axis, 1, Places(along.then(-1), 1, along))
        value = self.filled(value, (axis,), 0)
        whole = self.verbs.broadcast(last.id, self.verbs.shape(value.id))
        id_ = self.verbs.add("where", self._along(value, (axis,), "mask"), value.id, whole)
        return plain(id_, value.form)

    def _along(self, value: Value, axes: Sequence[int], kind: str, offset: int = 0) -> ValueId:
        found = [Along(axis, factors) for axis in axes if (factors := value.form[axis]) is not None]
        if len(found) < len(axes):
            raise AssertionError("an axis without factors")
        first, *others = found
        shape = self.verbs.shape(value.id)
        line = self.input(Hidden("", kind, first.factors, len(shape), first.axis, offset=offset, others=tuple(others)))
        whole = self.verbs.broadcast(line, shape)  # kernels of products can compute a condition from floats
        return self.verbs.elementwise("less", lit(0.0), whole)


def _named(hidden: Hidden, number: int) -> str:
    return SIZES if hidden.kind == "sizes" else f"range {hidden.kind} {number}"


def _with(value: Value, axis: int, number: float, is_soft: bool = False) -> tuple[Fill | None, ...]:
    """Return the fills of a value with one more; fills that contradict it in common elements are dropped."""
    return tuple(
        Fill(number, is_soft) if i == axis else (fill if fill is not None and fill.number == number else None)
        for i, fill in enumerate(value.fills)
    )


def _axes_before(maker: Primitive, before: Form, after: Form, axis: int) -> tuple[int, ...]:
    """Return which free axes of a layout primitive's operand become a free axis of its result; none if unclear.

    An element beyond the valid ones of a product of axes is beyond the valid ones of at least one of these axes.
    """
    match maker.attributes:
        case TransposeAttributes(perm):
            return (perm[axis],) if before[perm[axis]] == after[axis] else ()
        case ReshapeAttributes():
            free = [i for i, factors in enumerate(before) if is_free(factors)]
            runs = [free[i:j] for i in range(len(free)) for j in range(i + 1, len(free) + 1)]
            found = [run for run in runs if axis_of([f for i in run for f in before[i] or ()]) == after[axis]]
            same = [i for i, factors in enumerate(after) if factors == after[axis]]
            return tuple(found[0]) if len(found) == len(same) == 1 else ()
    return ()
