"""The kernels of a masked plan -> reductions that may end early, because all elements beyond a size are the identity.

Going forward from the inputs, which are padded with zeros, and from the masks, this module finds the axes along which
all elements of a value from some count on are the same number. A reduction over such an axis may leave out the elements
from the count on if their number is the identity of its operation: 0 for a sum, -inf for a maximum, and 0 in one
operand for a matrix product. By the invariant of a masked graph (`mask.py`), its result is then the model's result over
the elements before the count. For this, 0 times anything counts as 0: if it were NaN, the result would not be the
model's anyway.
"""

import math
from collections.abc import Sequence

import numpy as np

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import ConcatAttributes, SliceAttributes, TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.types import DType
from korch.ranges.form import Extent, prefix
from korch.ranges.live import whole_groups
from korch.ranges.mask import identity_of
from korch.ranges.needed import Ends, before_reshape
from korch.ranges.plan import RangePlan

Behind = tuple[Extent | None, float]
"""The count from which on all elements are a number, and the number; the count None means all elements."""


def ends(graph: PrimitiveGraph, plan: RangePlan) -> dict[int, Ends]:
    """Return where reductions may end, by the primitive's number.

    `graph`: the plan's graph, which may have alternatives.
    """
    fills = _Fills(graph, plan)
    before = -1
    while before != fills.count:  # repeated, since alternatives may depend on each other
        before = fills.count
        for primitive in graph.primitives:
            fills.add(primitive)
    found = {number: fills.ends(primitive) for number, primitive in enumerate(graph.primitives)}
    return {number: own for number, own in found.items() if own}


class _Fills:
    """The number in the elements from some count on, by value and axis."""

    def __init__(self, graph: PrimitiveGraph, plan: RangePlan) -> None:
        self._graph = graph
        hidden = {own.name: own.form for own in plan.hidden}
        seen = [name for name, _ in graph.inputs if name not in hidden]
        forms = {**hidden, **dict(zip(seen, plan.inputs, strict=True))}
        self._known: dict[int, dict[int, Behind]] = {  # all inputs are padded with zeros
            value: {axis: (e, 0.0) for axis, factors in enumerate(forms[name]) if (e := prefix(factors)) is not None}
            for name, value in graph.inputs
        }

    @property
    def count(self) -> int:
        """The number of known pairs of a value and an axis."""
        return sum(map(len, self._known.values()))

    def of(self, value: int, axis: int) -> Behind | None:
        """Return what is known of an axis of a value."""
        constant = self._graph.constants.get(value)
        if constant is not None:
            return (None, float(constant.scalar)) if constant.is_uniform else None
        return self._known.get(value, {}).get(axis)

    def ends(self, primitive: Primitive) -> Ends:
        """Return where a reduction may end."""
        type_ = self._graph.types[primitive.inputs[0]]
        rank = len(type_.shape)
        if isinstance(primitive.attributes, ReduceAttributes) and type_.dtype is not DType.BOOL:
            number = identity_of(primitive.op, type_.dtype)
            sides = [(axis, self.of(primitive.inputs[0], axis)) for axis in primitive.attributes.axes]
        elif primitive.op == "matmul":
            number = 0.0
            sides = [(rank - 1, self.of(primitive.inputs[k], rank - 1 - k)) for k in (1, 0)]
        else:
            return {}
        known = {axis: fill for axis, fill in sides if fill is not None and fill[1] == number}
        return {axis: extent for axis, (extent, _) in sorted(known.items()) if extent is not None}

    def add(self, primitive: Primitive) -> None:
        """Record what is known of a primitive's result."""
        found = {}
        for axis in range(len(self._graph.types[primitive.output].shape)):
            behind = self._behind(primitive, axis)
            if behind is not None and behind[0] is not None:
                found[axis] = behind
        known = self._known.setdefault(primitive.output, {})
        self._known[primitive.output] = {**found, **known}

    def _behind(self, primitive: Primitive, axis: int) -> Behind | None:
        first = primitive.inputs[0]
        before, after = self._graph.types[first].shape, self._graph.types[primitive.output].shape
        match primitive.attributes:
            case _ if primitive.row.category is Category.ELEMENTWISE:
                return self._elementwise(primitive, axis)
            case TransposeAttributes(perm):
                return self.of(first, perm[axis])
            case ReduceAttributes(axes):
                fill = self.of(first, axis) if axis not in axes else None
                is_kept = fill is not None and (fill[1] == 0 or primitive.op in ("reduce_max", "reduce_min"))
                return fill if is_kept and primitive.op != "reduce_prod" else None
            case SliceAttributes():
                return self.of(first, axis) if before[axis] == after[axis] else None
            case ConcatAttributes(joined):
                fills = {self.of(value, axis) for value in primitive.inputs}
                return fills.pop() if axis != joined and len(fills) == 1 else None
        if primitive.op == "reshape":
            return self._reshaped(first, before, after, axis)
        lead = len(after) - len(before)
        is_along = primitive.op == "broadcast" and axis >= lead and before[axis - lead] == after[axis]
        return self.of(first, axis - lead) if is_along else None

    def _reshaped(self, value: int, before: tuple[int, ...], after: tuple[int, ...], axis: int) -> Behind | None:
        for old in range(len(before)):
            fill = self.of(value, old)
            if fill is not None and fill[0] is not None:
                extents = before_reshape(after, before, {old: frozenset((fill[0],))}).get(axis, ())
                for extent in whole_groups(extents):
                    return extent, fill[1]
        return None

    def _elementwise(self, primitive: Primitive, axis: int) -> Behind | None:
        """Return the count and number of an elementwise operation's result, from those of its operands."""
        op, fills = primitive.op, [self.of(value, axis) for value in primitive.inputs]
        if op == "where":
            return _chosen(fills)
        known = [fill for fill in fills if fill is not None]
        extents = {extent for extent, _ in known if extent is not None}
        if len(known) < len(fills) or len(extents) != 1:
            return _absorbing(op, fills)
        types = (self._graph.types[value].dtype.numpy for value in primitive.inputs)
        arrays = [np.asarray(number).astype(type_) for (_, number), type_ in zip(known, types, strict=True)]
        with np.errstate(all="ignore"):
            number = float(primitive.row.reference(arrays, primitive.attributes))
        return _absorbing(op, fills) if math.isnan(number) else (extents.pop(), number)


def _chosen(fills: Sequence[Behind | None]) -> Behind | None:
    """Return the count and number of a `where`: of the operand that the condition chooses, or of both if equal."""
    condition, first, second = fills
    if first is not None and second is not None and first[1] == second[1]:
        extents = {extent for extent, _ in (first, second) if extent is not None}
        return (extents.pop(), first[1]) if len(extents) == 1 else None
    if condition is None or condition[0] is None:
        return None
    chosen = first if condition[1] else second
    is_same = chosen is not None and chosen[0] in (None, condition[0])
    return (condition[0], chosen[1]) if chosen is not None and is_same else None


def _absorbing(op: str, fills: Sequence[Behind | None]) -> Behind | None:
    """Return the count and number of an operation's result if one operand alone determines it."""
    number = {"mul": 0.0, "div": 0.0, "add": -math.inf, "sub": -math.inf}.get(op)
    sides = fills[:1] if op in ("div", "sub") else fills
    return next((fill for fill in sides if fill is not None and fill[0] is not None and fill[1] == number), None)
