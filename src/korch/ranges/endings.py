"""A group with reductions that may end early for a size -> the input axes along which they run, if all of them end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import ConcatAttributes, SliceAttributes, TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.ranges.form import Extent, Sizes
from korch.ranges.needed import Ends, in_order


@dataclass(frozen=True, slots=True)
class Ending:
    """How the reductions of a kernel end early.

    Attributes:
        extent: the number of elements that they reduce.
        length: the number of elements at the largest size.
        axes: positions of inputs, each with the axis that has these elements.
        reductions: the numbers of the reductions' primitives, each with the axis along which it ends.
    """

    extent: Extent
    length: int
    axes: tuple[tuple[int, int], ...]
    reductions: frozenset[tuple[int, int]]

    def __str__(self) -> str:
        axes = " ".join(f"i{position}:{axis}" for position, axis in self.axes)
        return f"{self.extent} of {axes}"

    def share(self, sizes: Sizes) -> float:
        """Return the fraction of the largest size's elements that some sizes have."""
        return min(1.0, self.extent.at(sizes) / max(1, self.length))


def endings_of(
    graph: PrimitiveGraph, primitives: Sequence[int], inputs: Sequence[int], found: Mapping[int, Ends]
) -> tuple[Ending, ...]:
    """Return how the reductions of a group can end.

    Args:
        graph: the plan's graph.
        primitives: the primitives of the group.
        inputs: the values that it reads.
        found: where reductions may end, by the primitive's number.
    """
    own = {p: found[p] for p in primitives if p in found}
    if not own or not _is_plain(graph, primitives):
        return ()
    extents = dict.fromkeys(extent for some in own.values() for extent in some.values())
    endings = []
    for extent in extents:
        some = frozenset((p, axis) for p, of in own.items() for axis, e in of.items() if e == extent)
        along = _along(graph, primitives, some)
        axes = tuple((i, along[value]) for i, value in enumerate(inputs) if value in along)
        lengths = {graph.types[inputs[i]].shape[axis] for i, axis in axes}
        if len(lengths) == 1:
            endings.append(Ending(extent, lengths.pop(), axes, some))
    return tuple(endings)


def ended_in(body: PrimitiveGraph, ending: Ending, step: int) -> dict[int, Ends]:
    """Return how many elements the reductions of a group read, by primitive, if they end at multiples of `step`.

    Args:
        body: the group's graph.
        ending: how its reductions end.
        step: the multiple.
    """
    given = {body.inputs[position][1]: axis for position, axis in ending.axes}
    numbers, found = range(len(body.primitives)), dict[int, dict[int, Extent]]()
    for reduction in (own for number in numbers for own in _reductions(body, number)):
        along = sources(body, numbers, _operands(body, reduction)) or {}
        if any(given.get(value) == axis for value, axis in along.items()):
            found.setdefault(reduction[0], {})[reduction[1]] = ending.extent.rounded(step)
    return dict(found)


def read(found: Mapping[int, Ends], reductions: Iterable[tuple[int, int]], step: int) -> dict[int, Ends]:
    """Return how many elements some reductions read if they end at a multiple of `step`."""
    ends: dict[int, dict[int, Extent]] = {}
    for p, axis in reductions:
        ends.setdefault(p, {})[axis] = found[p][axis].rounded(step)
    return dict(ends)


def _along(graph: PrimitiveGraph, primitives: Sequence[int], own: frozenset[tuple[int, int]]) -> dict[int, int]:
    """Return the input axes along which some reductions run; nothing if other reductions run along them, too."""
    along = sources(graph, primitives, [place for some in own for place in _operands(graph, some)])
    for other in {reduction for p in primitives for reduction in _reductions(graph, p)} - own:
        others = sources(graph, primitives, _operands(graph, other))
        if along is None or others is None or any(along.get(value) == axis for value, axis in others.items()):
            return {}
    return along or {}


def _is_plain(graph: PrimitiveGraph, primitives: Sequence[int]) -> bool:
    """Return whether all primitives are elementwise, broadcast, layout, reductions, or matrix products."""
    plain = (Category.ELEMENTWISE, Category.BROADCAST, Category.LAYOUT)
    rows = [graph.primitives[p] for p in primitives]
    return all(p.row.category in plain or isinstance(p.attributes, ReduceAttributes) or p.op == "matmul" for p in rows)


def _operands(graph: PrimitiveGraph, reduction: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the operands of a reduction, each with the axis that is reduced."""
    number, axis = reduction
    primitive = graph.primitives[number]
    if primitive.op != "matmul":
        return [(primitive.inputs[0], axis)]
    return [(value, axis - k) for k, value in enumerate(primitive.inputs)]


def _reductions(graph: PrimitiveGraph, number: int) -> list[tuple[int, int]]:
    """Return (the primitive's number, axis) for each axis that a primitive reduces."""
    primitive = graph.primitives[number]
    if isinstance(primitive.attributes, ReduceAttributes):
        return [(number, axis) for axis in primitive.attributes.axes]
    rank = len(graph.types[primitive.inputs[0]].shape)
    return [(number, rank - 1)] if primitive.op == "matmul" else []


def sources(graph: PrimitiveGraph, primitives: Sequence[int], axes: Sequence[tuple[int, int]]) -> dict[int, int] | None:
    """Return the axes of a group's inputs from which some axes of its values come, by input.

    Args:
        graph: the plan's graph.
        primitives: the primitives of the group.
        axes: values, each with an axis.

    Returns:
        None if the axes can't be traced back to the inputs, or come from two axes of the same input.
    """
    found: dict[int, set[int]] = {}
    for value, axis in axes:
        found.setdefault(value, set()).add(axis)
    own = in_order(graph, primitives)
    for number in reversed(own):
        primitive = graph.primitives[number]
        for axis in found.get(primitive.output, ()):
            for k, value in enumerate(primitive.inputs):
                before = _before(graph, primitive, k, axis)
                if before is None:
                    return None
                found.setdefault(value, set()).update(before)
    made = {graph.primitives[number].output for number in own}
    given = {value: places for value, places in found.items() if places and value not in made}
    return None if any(len(p) > 1 for p in given.values()) else {value: p.pop() for value, p in given.items()}


def _before(graph: PrimitiveGraph, primitive: Primitive, k: int, axis: int) -> set[int] | None:
    """Return the axes of an operand that become an axis of the result; None if only a part of an axis does."""
    before, after = graph.types[primitive.inputs[k]].shape, graph.types[primitive.output].shape
    match primitive.attributes:
        case _ if primitive.row.category is Category.ELEMENTWISE:
            return {axis}
        case TransposeAttributes(perm):
            return {perm[axis]}
        case ReduceAttributes():
            return {axis}
        case SliceAttributes():
            return {axis} if before[axis] == after[axis] else None
        case ConcatAttributes(joined):
            return {axis} if axis != joined else None
    match primitive.op:
        case "reshape":
            inner = math.prod(after[axis + 1 :])
            same = {a for a, n in enumerate(before) if n == after[axis] and math.prod(before[a + 1 :]) == inner}
            return same or None
        case "broadcast":
            old = axis - (len(after) - len(before))
            return {old} if old >= 0 and before[old] == after[axis] else set()
        case "matmul":
            is_own = axis < len(after) - 2 or axis == len(after) - 2 + k
            return {axis} if is_own and before[axis] == after[axis] else set()
    return None
