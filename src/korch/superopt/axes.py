"""Group -> its computation over named axes, in which moves and broadcasts of elements disappear.

Dimensions that must have the same length and are indexed together are one axis. A tensor is then an input with
an axis for each dimension; a matrix product is a sum, along an axis, of products of elements. So a transposition
or a broadcast only gives another list of axes, and equal terms become one term.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType

TWIN = "x"
"""The suffix of the name of a second axis for the same dimension, which therefore has the same length."""

REDUCTIONS = ("reduce_sum", "reduce_max")


class NotNamedError(Exception):
    """A primitive is not a function of elements over named axes; the text says which."""


Places = tuple[str, ...]
"""The axis by which each dimension of a value is indexed; "" for a dimension of size 1."""


def axes_of(places: Places) -> tuple[str, ...]:
    """Return the axes that occur in some places, sorted."""
    return tuple(sorted({axis for axis in places if axis}))


@dataclass(frozen=True, slots=True)
class AxisTerm:
    """One step of the computation."""

    op: str  # "input", "number", a reduction or an elementwise operation
    arguments: tuple[int, ...] = ()  # numbers of earlier terms
    axes: tuple[str, ...] = ()  # the axes that its elements depend on, sorted
    places: Places = ()  # of an input, the axis of each dimension
    position: int = -1  # of an input, its position among the inputs
    value: float = 0.0  # of a number, its value
    axis: str = ""  # of a reduction, the axis that it reduces


@dataclass(frozen=True)
class Named:
    """A computation over named axes."""

    sizes: dict[str, int]  # how long each axis is
    terms: tuple[AxisTerm, ...]  # all steps; the last one is the result
    result: tuple[str, ...]  # the axis of each dimension of the result, "" for one of size 1

    @property
    def order(self) -> list[str]:
        """All axes, those of the result first: in this order, a contraction's last axis is that of its columns."""
        order = [axis for axis in self.result if axis]
        return order + sorted(set(self.sizes) - set(order))

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

    `wanted`: sizes of the axes of `named(body)`.
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
        return Named(self.sizes, tuple(self.terms), places)

    def resized(self, wanted: Mapping[str, int]) -> PrimitiveGraph:
        self.run()  # this names the axes

        def moved(value: int) -> ValueType:
            type_ = self.body.types[value]
            shape = tuple(wanted.get(self._name(value, d), n) for d, n in enumerate(type_.shape))
            return replace(type_, shape=shape)

        types = tuple(moved(value) for value in range(len(self.body.types)))

        def primitive_of(primitive: Primitive) -> Primitive:
            shape = types[primitive.output].shape
            match primitive.attributes:
                case BroadcastAttributes():
                    return replace(primitive, attributes=BroadcastAttributes(shape))
                case ReshapeAttributes():
                    return replace(primitive, attributes=ReshapeAttributes(shape))
            return primitive

        constants = {
            value: replace(constant, array=_spread(constant.scalar, types[value]))
            for value, constant in self.body.constants.items()
        }
        rows = tuple(primitive_of(primitive) for primitive in self.body.primitives)
        return replace(self.body, types=types, primitives=rows, constants=constants)

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

    def _fresh(self, value: int, d: int, taken: Places) -> str:
        """Return an axis to reduce along, with another name if its name is in use; "" if it has size 1."""
        name = self._name(value, d)
        while name and name in taken:
            name += TWIN
        if name:
            self.sizes[name] = self.body.types[value].shape[d]
        return name

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
                return self._term(inputs[0], tuple("" if n == 1 else e for n, e in zip(shape, ends, strict=True)))
            case TransposeAttributes(perm):
                source = dict(zip(perm, places, strict=True))
                return self._term(inputs[0], tuple(source[d] for d in range(len(perm))))
            case ReshapeAttributes():
                pairs = {e: places[d] for d, e in self._squeezed(primitive)}
                return self._term(inputs[0], tuple(pairs.get(e, "") for e in range(types[inputs[0]].rank)))
            case ReduceAttributes(summed):
                return self._reduced(primitive, places, summed)
            case _ if primitive.op == "matmul":
                return self._product(primitive, places)
        arguments = tuple(self._term(v, places) for v in inputs)
        return self._add(AxisTerm(primitive.op, arguments, self._axes(arguments)))

    def _axes(self, arguments: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(sorted({axis for a in arguments for axis in self.terms[a].axes}))

    def _input(self, value: int, places: Places) -> int:
        position = [v for _, v in self.body.inputs].index(value)
        return self._add(AxisTerm("input", axes=axes_of(places), places=places, position=position))

    def _reduced(self, primitive: Primitive, places: Places, summed: tuple[int, ...]) -> int:
        source, taken, inner = primitive.inputs[0], [*places], [*places]
        for d in summed:
            inner[d] = self._fresh(source, d, tuple(taken))
            taken.append(inner[d])
        result = self._term(source, tuple(inner))
        for d in summed:
            if inner[d]:
                result = self._collected(primitive.op, result, inner[d])
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
            own = tuple("" if n == 1 else e for n, e in zip(batch, places[:-2], strict=True))
            arguments.append(self._term(value, (*own, *last)))
        product = self._add(AxisTerm("mul", tuple(sorted(arguments)), self._axes(tuple(arguments))))
        return self._collected("reduce_sum", product, terms) if terms else product


def _spread(number: float, type_: ValueType) -> Array:
    return np.broadcast_to(np.asarray(number, type_.dtype.numpy), type_.shape)


def points(sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    """Return how many elements some axes span."""
    return math.prod(sizes[axis] for axis in axes)
