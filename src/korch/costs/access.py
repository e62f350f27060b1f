"""Candidate -> the distances in memory between the elements that neighbouring iterations of its kernel read.

Two neighbouring elements of a value are traced back through the group to the inputs. Where their distance is one
element, loads are of whole vectors; where it is zero, an element is broadcast; otherwise each lane is loaded alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
    pad_source,
)
from korch.primitive.ops.reduce import PoolAttributes, ReduceAttributes
from korch.primitive.walks import reached

Point = tuple[int, ...]

Needed = tuple[int, Point, Point]
"""A value with two of its elements."""


@dataclass(eq=False)
class Traces:
    """What elements of a group's values are computed from. All offers of the group ask for much the same."""

    body: PrimitiveGraph
    known: dict[Needed, list[Needed]] = field(default_factory=dict)

    def sources(self, value: int, first: Point, second: Point) -> list[Needed]:
        """Return the inputs that two elements of a value are computed from, with the elements that they need."""
        asked = value, first, second
        if asked not in self.known:
            inputs = {number for _, number in self.body.inputs}

            def operands(entry: Needed) -> Iterator[Needed]:
                value, *points = entry
                for primitive in () if value in inputs else self.body.producing(value):
                    for source in primitive.inputs:
                        one, other = (_needed(self.body, primitive, source, point) for point in points)
                        if one is not None and other is not None:
                            yield source, one, other

            self.known[asked] = [entry for entry in reached([asked], operands) if entry[0] in inputs]
        return self.known[asked]


def strides(candidate: Candidate, traces: Traces) -> dict[int, int]:
    """Return, by input, the distance in elements between what two neighbouring elements of the largest output need.

    Neighbours are next to each other in the output's layout. An input that several primitives read has its largest
    distance, and one that cannot be traced has none.
    """
    group, offer = candidate.group, candidate.offer
    body = group.body
    if not body.outputs:
        return {}
    sizes = [body.types[value].size for _, value in body.outputs]
    largest = sizes.index(max(sizes))
    value, layout = body.outputs[largest][1], offer.outputs[largest]
    ends = _neighbours(body.types[value].shape, layout)
    if ends is None:
        return {}
    found: dict[int, int] = {}
    for source, first, second in traces.sources(value, *ends):
        position = group.position[source]
        shape, stored = body.types[source].shape, offer.inputs[position]
        distance = abs(_offset(second, shape, stored) - _offset(first, shape, stored))
        found[position] = max(distance, found.get(position, 0))
    return found


def reduced_strides(candidate: Candidate, traces: Traces) -> list[int]:
    """Return, for each reduction and input that it reads, the distance in memory of two terms of one sum."""
    group, body = candidate.group, candidate.group.body
    found = []
    for p in body.primitives:
        if not isinstance(p.attributes, ReduceAttributes) or p.row.category is not Category.REDUCE:
            continue
        shape = body.types[p.inputs[0]].shape
        axis = next((a for a in reversed(range(len(shape))) if a in p.attributes.axes and shape[a] > 1), None)
        if axis is None:
            continue
        first = tuple(max(0, n // 2 - 1) for n in shape)
        second = (*first[:axis], first[axis] + 1, *first[axis + 1 :])
        for source, one, other in traces.sources(p.inputs[0], first, second):
            position = group.position[source]
            size, stored = body.types[source].shape, candidate.offer.inputs[position]
            found.append(abs(_offset(other, size, stored) - _offset(one, size, stored)))
    return found


def _neighbours(shape: Sequence[int], layout: Layout) -> tuple[Point, Point] | None:
    """Return two elements that are next to each other in a layout; None if there is only one element."""
    axes = [layout.blocks[-1][0]] if layout.blocks else []
    axis = next((a for a in (*axes, *reversed(layout.order)) if shape[a] > 1), None)
    if axis is None or 0 in shape:
        return None
    first = [n // 2 for n in shape]
    first[axis] = min(first[axis] - first[axis] % 2, shape[axis] - 2)  # both in one block
    second = list(first)
    second[axis] += 1
    return tuple(first), tuple(second)


def _offset(point: Point, shape: Sequence[int], layout: Layout) -> int:
    """Return the place of an element in memory."""
    if not layout.blocks:
        return _ravel([point[axis] for axis in layout.order], [shape[axis] for axis in layout.order])
    found, rest = 0, list(point)
    for axis in layout.order:
        block = layout.block(axis)
        found = found * -(-shape[axis] // block) + rest[axis] // block
        rest[axis] %= block
    for axis, size in layout.blocks:
        found = found * size + rest[axis] % size
    return found


def _needed(body: PrimitiveGraph, p: Primitive, source: int, point: Point) -> Point | None:
    """Return an element of an input that an element of a primitive's output needs; None if that is not known."""
    shape, a = body.types[source].shape, p.attributes
    if math.prod(shape) == 0:
        return None
    match a:
        case TransposeAttributes():
            found = [0] * len(shape)
            for axis, index in zip(a.perm, point, strict=True):
                found[axis] = index
            return tuple(found)
        case ReshapeAttributes():
            return _unravel(_ravel(point, body.types[p.output].shape), shape)
        case SliceAttributes():
            return tuple(b + s * i for b, s, i in zip(a.start, a.step, point, strict=True))
        case PadAttributes():
            sources = (pad_source(i, n, b, a.mode) for i, n, b in zip(point, shape, a.before, strict=True))
            return tuple(max(0, i) for i in sources)
        case TakeAttributes():
            return (*point[: a.axis], a.indices[point[a.axis]], *point[a.axis + 1 :])
        case ConcatAttributes():
            return tuple(min(i, n - 1) for i, n in zip(point, shape, strict=True))
        case ReduceAttributes():
            return tuple(n // 2 if axis in a.axes else i for axis, (i, n) in enumerate(zip(point, shape, strict=True)))
        case PoolAttributes():
            lead = len(shape) - len(a.kernel)
            tail = (min(n - 1, i * s) for i, s, n in zip(point[lead:], a.strides, shape[lead:], strict=True))
            return (*point[:lead], *tail)
    if p.row.category is Category.LINEAR or p.row.category is Category.OPAQUE:
        return None
    tail_of = point[len(point) - len(shape) :]
    return tuple(min(i, n - 1) for i, n in zip(tail_of, shape, strict=True))


def _ravel(point: Sequence[int], shape: Sequence[int]) -> int:
    found = 0
    for index, size in zip(point, shape, strict=True):
        found = found * size + index
    return found


def _unravel(place: int, shape: Sequence[int]) -> Point:
    found = []
    for size in reversed(shape):
        found.append(place % size)
        place //= size
    return tuple(reversed(found))
