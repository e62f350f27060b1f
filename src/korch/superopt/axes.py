"""Group -> its computation over named axes, in which moves and broadcasts of elements disappear.

Dimensions that must have the same length and are indexed together are one axis. A tensor is then an input with
an axis for each dimension; a matrix product is a sum, along an axis, of products of elements. So a transposition
or a broadcast only gives another list of axes, and equal terms become one term.

A window reads an input at a sum of two axes, and a pad reads it at a shifted axis: then the index of a dimension
is an expression of axes. Outside of the input the value is 0, or another number chosen by a "where".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Attributes, Category
from korch.primitive.ops.layout import PadAttributes, ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.tile.ir.index import ZERO, Expr, Ranges, add, bounds, constant, scale, substitute, var
from korch.tile.ir.program import Inside
from korch.tile.lower.emit import folded

TWIN = "x"
"""The suffix of the name of a second axis for the same dimension, which therefore has the same length."""

REDUCTIONS = ("reduce_sum", "reduce_max")

UNNAMED_SIZE = 7
"""The size, in a graph of small sizes, of an axis that only windows read."""


class NotNamedError(Exception):
    """A primitive is not a function of elements over named axes; the text says which."""


Places = tuple[Expr, ...]
"""Where each dimension of a value is read."""


def axis_of(place: Expr) -> str:
    """Return the axis if a place is exactly one axis; "" if it is another expression."""
    return next(iter(place.variables)) if place == var(next(iter(place.variables), "")) else ""


def axes_of(places: Places) -> tuple[str, ...]:
    """Return the axes that occur in some places, sorted."""
    return tuple(sorted({axis for place in places for axis in place.variables}))


@dataclass(frozen=True, slots=True)
class AxisTerm:
    """One step of the computation."""

    op: str  # "input", "number", "inside", a reduction or an elementwise operation
    arguments: tuple[int, ...] = ()  # numbers of earlier terms
    axes: tuple[str, ...] = ()  # the axes that its elements depend on, sorted
    places: Places = ()  # of an input, where each dimension is read, as an expression of axes
    guards: tuple[Inside, ...] = ()  # conditions: "inside" is true if they hold; an input is 0 if they don't
    position: int = -1  # of an input, its position among the inputs
    value: float = 0.0  # of a number, its value
    axis: str = ""  # of a reduction, the axis that it reduces

    @property
    def is_window(self) -> bool:
        """Whether a dimension of an input is read at an expression other than a single axis."""
        return any(place.variables and not axis_of(place) for place in self.places)


@dataclass(frozen=True)
class Named:
    """A computation over named axes."""

    sizes: dict[str, int]  # how long each axis is
    terms: tuple[AxisTerm, ...]  # all steps; the last one is the result
    result: tuple[str, ...]  # the axis of each dimension of the result, "" for one of size 1

    def is_like(self, other: Named) -> bool:
        """Return whether another computation is the same except for its sizes."""
        steps = ([(t.op, t.arguments, t.axes, t.position, t.axis) for t in c.terms] for c in (self, other))
        return next(steps) == next(steps) and self.result == other.result


def named(body: PrimitiveGraph) -> Named:
    """Return what a graph with one output computes.

    Raises:
        NotNamedError: a primitive moves elements in a way that axes can't express, or has another type.
    """
    return _Namer(body).run()


def resized(body: PrimitiveGraph, wanted: Mapping[str, int]) -> PrimitiveGraph:
    """Return a graph with axes of other sizes.

    `wanted`: sizes of the axes of `named(body)`; sizes that follow from others by windows and pads are ignored.

    Raises:
        NotNamedError: two windows or pads would give an axis different sizes.
    """
    return _Namer(body).resized(wanted)


@dataclass
class _Namer:
    body: PrimitiveGraph
    terms: list[AxisTerm] = field(default_factory=list)

    def __post_init__(self) -> None:
        body = self.body
        if len(body.outputs) != 1:
            raise NotNamedError("there are several outputs")
        if any(type_.dtype is not DType.F32 for type_ in body.types):
            raise NotNamedError("an element is no float32")
        self.parent = {(v, d): (v, d) for v, t in enumerate(body.types) for d in range(t.rank)}
        for primitive in body.primitives:
            for one, other in self._together(primitive):
                self.parent[self._find(one)] = self._find(other)
        self.numbers: dict[tuple[int, int], str] = {}
        self.sizes: dict[str, int] = {}
        self.known: dict[tuple[int, Places], int] = {}
        self.number: dict[AxisTerm, int] = {}

    def run(self) -> Named:
        output = self.body.outputs[0][1]
        places: Places = ()
        for d in range(self.body.types[output].rank):
            places = (*places, self._fresh(output, d, places))
        result = self._term(output, places)
        if result != len(self.terms) - 1:
            raise NotNamedError("nothing is computed")
        return Named(self.sizes, tuple(self.terms), tuple(map(axis_of, places)))

    def resized(self, wanted: Mapping[str, int]) -> PrimitiveGraph:
        self.run()  # this names the axes
        sizes = self._sizes(wanted)

        def moved(value: int) -> ValueType:
            type_ = self.body.types[value]
            shape = tuple(n if n == 1 else sizes[self._find((value, d))] for d, n in enumerate(type_.shape))
            return replace(type_, shape=shape)

        types = tuple(moved(value) for value in range(len(self.body.types)))

        def primitive_of(primitive: Primitive) -> Primitive:
            shape = types[primitive.output].shape
            match primitive.attributes:
                case BroadcastAttributes():
                    return replace(primitive, attributes=BroadcastAttributes(shape))
                case ReshapeAttributes():
                    return replace(primitive, attributes=ReshapeAttributes(shape))
                case ConvAttributes():
                    return replace(primitive, attributes=_regrouped(primitive.attributes, types[primitive.inputs[0]]))
            return primitive

        constants = {
            value: replace(constant, array=_spread(constant.scalar, types[value]))
            for value, constant in self.body.constants.items()
        }
        rows = tuple(primitive_of(primitive) for primitive in self.body.primitives)
        for row in rows:
            if row.row.infer([types[v] for v in row.inputs], row.attributes) != types[row.output]:
                raise NotNamedError(f"sizes that follow from each other differ at {row.op}")
        return replace(self.body, types=types, primitives=rows, constants=constants)

    def _sizes(self, wanted: Mapping[str, int]) -> dict[tuple[int, int], int]:
        """Return the sizes of all axes, by their representative dimension; sizes after windows and pads follow."""
        body, sizes = self.body, dict[tuple[int, int], int]()
        for value, type_ in enumerate(body.types):
            for d, n in enumerate(type_.shape):
                root = self._find((value, d))
                sizes[root] = wanted.get(self.numbers.get(root, ""), min(n, UNNAMED_SIZE))
        for primitive in body.primitives:
            if isinstance(primitive.attributes, PadAttributes | ConvAttributes):
                shapes = [
                    ValueType(tuple(1 if n == 1 else sizes[self._find((v, d))] for d, n in enumerate(shape)), DType.F32)
                    for v, shape in ((v, body.types[v].shape) for v in primitive.inputs)
                ]
                shape = primitive.row.infer(shapes, _regrouped(primitive.attributes, shapes[0])).shape
                sizes |= {self._find((primitive.output, d)): n for d, n in enumerate(shape) if n != 1}
        return sizes

    def _find(self, place: tuple[int, int]) -> tuple[int, int]:
        while self.parent[place] != place:
            place = self.parent[place]
        return place

    def _together(self, primitive: Primitive) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield pairs of dimensions, as (value, dimension), that are one axis."""
        out, inputs, types = primitive.output, primitive.inputs, self.body.types
        rank = types[out].rank
        match primitive.attributes:
            case BroadcastAttributes():
                before = rank - types[inputs[0]].rank
                shape = types[inputs[0]].shape
                yield from (((out, before + d), (inputs[0], d)) for d, n in enumerate(shape) if n != 1)
            case TransposeAttributes(perm):
                yield from (((out, d), (inputs[0], source)) for d, source in enumerate(perm))
            case ReshapeAttributes():
                yield from (((out, d), (inputs[0], e)) for d, e in self._squeezed(primitive))
            case ReduceAttributes(axes) if primitive.op in REDUCTIONS:
                yield from (((out, d), (inputs[0], d)) for d in range(rank) if d not in axes)
            case PadAttributes(before, after):
                yield from (((out, d), (inputs[0], d)) for d in range(rank) if not before[d] and not after[d])
            case ConvAttributes():
                yield from self._together_in_convolution(primitive)
            case _ if primitive.op == "matmul":
                a, b = inputs
                for value in inputs:
                    shape = types[value].shape[:-2]
                    yield from (((out, d), (value, d)) for d, n in enumerate(shape) if n != 1)
                yield (out, rank - 2), (a, rank - 2)
                yield (out, rank - 1), (b, rank - 1)
                yield (a, rank - 1), (b, rank - 2)
            case _ if primitive.row.category is Category.ELEMENTWISE:
                yield from (((out, d), (value, d)) for value in inputs for d in range(rank))
            case _:
                raise NotNamedError(f"{primitive.op} is no function of elements over axes")

    def _together_in_convolution(self, primitive: Primitive) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        out, (x, w) = primitive.output, primitive.inputs
        attributes, shapes = primitive.attributes_as(ConvAttributes), [self.body.types[v].shape for v in (x, w)]
        yield from (((out, 0), (x, 0)), ((out, 1), (w, 0)))
        if attributes.groups > 1:
            if shapes[1][:2] != (attributes.groups, 1):
                raise NotNamedError("a convolution has groups of several channels")
            yield (out, 1), (x, 1)
        elif max(shapes[1][2:]) > 1:
            raise NotNamedError("a convolution has windows of several channels")
        else:
            yield (x, 1), (w, 1)
        for d in range(2, len(shapes[0])):
            if (attributes.strides[d - 2], self._reach(primitive, d)) == (1, 0):
                yield (out, d), (x, d)

    def _reach(self, primitive: Primitive, d: int) -> int:
        """Return by how many elements the window of a convolution, with its pads, extends beyond a single element."""
        attributes, k = primitive.attributes_as(ConvAttributes), self.body.types[primitive.inputs[1]].shape[d]
        return (k - 1) * attributes.dilations[d - 2] + attributes.pads_begin[d - 2] + attributes.pads_end[d - 2]

    def _squeezed(self, primitive: Primitive) -> list[tuple[int, int]]:
        """Return pairs of dimensions of a reshape, which may only add and drop those of size 1."""
        shapes = [self.body.types[value].shape for value in (primitive.output, primitive.inputs[0])]
        places = [[d for d, n in enumerate(shape) if n != 1] for shape in shapes]
        if [shapes[0][d] for d in places[0]] != [shapes[1][d] for d in places[1]]:
            raise NotNamedError("a reshape joins or splits axes")
        return list(zip(*places, strict=True))

    def _name(self, value: int, d: int) -> str:
        """Return the name of an axis, "" for one of size 1."""
        if self.body.types[value].shape[d] == 1:
            return ""
        root = self._find((value, d))
        if root not in self.numbers:
            self.numbers[root] = f"a{len(self.numbers)}"
        return self.numbers[root]

    def _fresh(self, value: int, d: int, taken: Places) -> Expr:
        """Return an axis to reduce along, with another name if its name is in use; 0 if it has size 1."""
        name = self._name(value, d)
        while name and name in axes_of(taken):
            name += TWIN
        if not name:
            return ZERO
        self.sizes[name] = self.body.types[value].shape[d]
        return var(name)

    def _add(self, term: AxisTerm) -> int:
        if term not in self.number:
            self.number[term] = len(self.terms)
            self.terms.append(term)
        return self.number[term]

    def _term(self, value: int, places: Places) -> int:
        """Return the term of a value that is read at some places."""
        key = value, places
        if key not in self.known:
            self.known[key] = self._made(value, places)
        return self.known[key]

    def _made(self, value: int, places: Places) -> int:
        body = self.body
        if value in body.constants:
            return self._add(AxisTerm("number", value=float(body.constants[value].scalar)))
        producers = body.producers[value]
        if not producers:
            return self._input(value, places)
        primitive = body.primitives[producers[0]]
        inputs, types = primitive.inputs, body.types
        match primitive.attributes:
            case BroadcastAttributes():
                shape = types[inputs[0]].shape
                ends = places[len(places) - len(shape) :]
                return self._term(inputs[0], tuple(ZERO if n == 1 else e for n, e in zip(shape, ends, strict=True)))
            case TransposeAttributes(perm):
                source = dict(zip(perm, places, strict=True))
                return self._term(inputs[0], tuple(source[d] for d in range(len(perm))))
            case ReshapeAttributes():
                pairs = {e: places[d] for d, e in self._squeezed(primitive)}
                return self._term(inputs[0], tuple(pairs.get(e, ZERO) for e in range(types[inputs[0]].rank)))
            case ReduceAttributes(summed):
                return self._reduced(primitive, places, summed)
            case PadAttributes():
                return self._padded(primitive, places)
            case ConvAttributes():
                return self._convolved(primitive, places)
            case _ if primitive.op == "matmul":
                return self._product(primitive, places)
        arguments = tuple(self._term(v, places) for v in inputs)
        return self._add(AxisTerm(primitive.op, arguments, self._axes(arguments)))

    def _axes(self, arguments: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(sorted({axis for a in arguments for axis in self.terms[a].axes}))

    @property
    def ranges(self) -> Ranges:
        """The least and the greatest value of each axis."""
        return {axis: (0, size - 1) for axis, size in self.sizes.items()}

    def _outside(self, places: Places, shape: tuple[int, ...]) -> tuple[Inside, ...]:
        """Return the conditions that some places are inside of a shape, without those that always hold."""
        ends = [(place, n, *self._ends(place)) for place, n in zip(places, shape, strict=True)]
        return tuple(Inside(place, 0, n) for place, n, low, high in ends if low < 0 or high >= n)

    def _ends(self, place: Expr) -> tuple[int, int]:
        """Return the least and the greatest value of a place, exactly if it depends on one axis."""
        if place.coefficient(name := next(iter(place.variables), "")) is not None or len(place.variables) > 1:
            return bounds(place, self.ranges)
        values = [substitute(place, {name: constant(i)}, self.ranges).constant for i in range(self.sizes[name])]
        return min(values), max(values)

    def _input(self, value: int, places: Places) -> int:
        position = [v for _, v in self.body.inputs].index(value)
        guards = self._outside(places, self.body.types[value].shape)
        return self._add(AxisTerm("input", axes=axes_of(places), places=places, guards=guards, position=position))

    def _padded(self, primitive: Primitive, places: Places) -> int:
        (source,), attributes = primitive.inputs, primitive.attributes_as(PadAttributes)
        shape, moved = self.body.types[source].shape, list[Expr]()
        for d, (place, n) in enumerate(zip(places, shape, strict=True)):
            pads = attributes.before[d], attributes.after[d]
            if attributes.mode == "constant":
                moved.append(add(place, constant(-pads[0])))
            else:
                moved.append(folded(place, n, pads, attributes.mode, self.ranges))
        inner = self._term(source, tuple(moved))
        guards = self._outside(tuple(moved), shape) if attributes.mode == "constant" else ()
        if not guards or (self.terms[inner].op == "input" and attributes.value == 0):
            return inner
        mask = self._add(AxisTerm("inside", axes=axes_of(tuple(guard.expr for guard in guards)), guards=guards))
        chosen = mask, inner, self._add(AxisTerm("number", value=float(attributes.value)))
        return self._add(AxisTerm("where", chosen, self._axes(chosen)))

    def _convolved(self, primitive: Primitive, places: Places) -> int:
        """Return sums of products over the window of a channel, or over the channels of an element."""
        (x, w), attributes = primitive.inputs, primitive.attributes_as(ConvAttributes)
        rank, summed, is_depthwise = len(places), list[Expr](), attributes.groups > 1
        for d in range(2, rank):
            summed.append(self._fresh(w, d, (*places, *summed)))
        channel = places[1] if is_depthwise else self._fresh(x, 1, (*places, *summed))
        if any(self._reach(primitive, d) for d in range(2, rank)) and self.body.producers[x]:
            raise NotNamedError("a window of what is computed")
        moved = [
            add(scale(place, stride), scale(inner, dilation), constant(-before))
            for place, inner, stride, dilation, before in zip(
                places[2:], summed, attributes.strides, attributes.dilations, attributes.pads_begin, strict=True
            )
        ]
        factors = (
            self._term(x, (places[0], channel, *moved)),
            self._term(w, (places[1], ZERO if is_depthwise else channel, *summed)),
        )
        result = self._add(AxisTerm("mul", tuple(sorted(factors)), self._axes(factors)))
        for axis in reversed(axes_of((*summed, *(() if is_depthwise else (channel,))))):
            result = self._collected("reduce_sum", result, axis)
        return result

    def _reduced(self, primitive: Primitive, places: Places, summed: tuple[int, ...]) -> int:
        source, taken, inner = primitive.inputs[0], [*places], [*places]
        for d in summed:
            inner[d] = self._fresh(source, d, tuple(taken))
            taken.append(inner[d])
        result = self._term(source, tuple(inner))
        for d in summed:
            if inner[d] != ZERO:
                result = self._collected(primitive.op, result, axis_of(inner[d]))
        return result

    def _collected(self, op: str, argument: int, axis: str) -> int:
        if axis not in self.terms[argument].axes:
            raise NotNamedError("elements that are equal are collected")
        axes = tuple(a for a in self.terms[argument].axes if a != axis)
        return self._add(AxisTerm(op, (argument,), axes, axis=axis))

    def _product(self, primitive: Primitive, places: Places) -> int:
        a, b = primitive.inputs
        terms = self._fresh(a, len(places) - 1, places)
        sides = ((a, (places[-2], terms)), (b, (terms, places[-1])))
        arguments = []
        for value, last in sides:
            batch = self.body.types[value].shape[:-2]
            own = tuple(ZERO if n == 1 else e for n, e in zip(batch, places[:-2], strict=True))
            arguments.append(self._term(value, (*own, *last)))
        product = self._add(AxisTerm("mul", tuple(sorted(arguments)), self._axes(tuple(arguments))))
        return self._collected("reduce_sum", product, axis_of(terms)) if terms != ZERO else product


def _regrouped(attributes: Attributes, image: ValueType) -> Attributes:
    """Return the attributes of a convolution with a group for each channel, for an image of other channels."""
    if isinstance(attributes, ConvAttributes) and attributes.groups > 1:
        return replace(attributes, groups=image.shape[1])
    return attributes


def _spread(number: float, type_: ValueType) -> Array:
    return np.broadcast_to(np.asarray(number, type_.dtype.numpy), type_.shape)


def points(sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    """Return how many elements some axes span."""
    return math.prod(sizes[axis] for axis in axes)
