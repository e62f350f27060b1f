"""The primitive graph: values, and primitives that compute them.

A value may have several alternatives, which are primitives that each compute it: the graph is an
AND-OR graph (another name for an e-graph). A `GraphBuilder` builds it by two operations only: `add`,
which hash-conses, and `merge`, which declares two values equal. `freeze` restores congruence,
renumbers and returns the immutable `PrimitiveGraph` that all later stages use.

Alternatives can form cycles, so a graph's numbering is not always topological.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np

from korch.errors import InvalidGraphError
from korch.primitive.constant_memo import once_per_array, protect
from korch.primitive.op import Array, Attributes, Category, Op, OutputOfSeveral, TypeMismatchError, require_arity
from korch.primitive.ops import OPS
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.walks import reached

A = TypeVar("A", bound=Attributes)
B = TypeVar("B", bound=Attributes)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor known at build time.

    Equality is by content. A constant whose elements are all equal is `uniform`: it is stored as
    one element and appears in generated code as a literal.
    """

    array: Array
    digest: str

    @staticmethod
    def of(array: Array) -> Constant:
        """Return the constant with the elements of `array`."""
        shape = np.shape(array)
        if array.size > 1 and not any(array.strides):
            array = array.reshape(-1)[:1]  # a broadcast of one element: don't copy it in full
        dense = np.ascontiguousarray(array) if array.flags.c_contiguous else _in_order(array)
        if not dense.size:
            text = f"{dense.dtype}{shape}".encode()
            return Constant(dense.reshape(shape), hashlib.sha256(text).hexdigest()[:16])
        is_uniform, digest = _content(dense, shape)
        return Constant(np.broadcast_to(dense.reshape(-1)[0], shape) if is_uniform else dense.reshape(shape), digest)

    def __reduce__(self) -> tuple[type[Constant] | Callable[..., Constant], tuple[object, ...]]:
        """Pickle one element of a uniform constant: NumPy would write all, and the copy would not be uniform."""
        if self.array.size > 1 and self.is_uniform:
            return _uniform, (np.array(self.array[(0,) * self.array.ndim]), self.array.shape, self.digest)
        return Constant, (self.array, self.digest)

    @property
    def type(self) -> ValueType:
        """The constant's type."""
        return ValueType(tuple(self.array.shape), DType.of(self.array.dtype))

    @property
    def is_uniform(self) -> bool:
        """Whether all elements are equal (and there is at least one)."""
        return self.array.size == 1 or (self.array.size > 1 and not any(self.array.strides))

    @property
    def is_zero(self) -> bool:
        """Whether all elements are 0 (and there is at least one)."""
        return self.is_uniform and not self.scalar

    @property
    def scalar(self) -> Any:
        """The element that a uniform constant stores."""
        return self.array.reshape(-1)[0] if self.array.size else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


ROWS = 32
"""The rows of a transposed matrix that are copied at a time: their elements lie side by side in memory."""


@once_per_array
def _in_order(array: Array) -> Array:
    """Return a read-only copy whose elements lie in order."""
    found = np.empty(array.shape, array.dtype)
    for first in range(0, len(array), ROWS):
        found[first : first + ROWS] = array[first : first + ROWS]
    protect(found)
    return found


@once_per_array
def _content(array: Array, shape: tuple[int, ...]) -> tuple[bool, str]:
    """Return whether all elements of a dense array are equal, and the digest of its elements and type and a shape."""
    rows = array.reshape(-1).view(np.uint8).reshape(array.size, -1)
    is_uniform = bool((rows[0] == rows[-1]).all() and (rows == rows[0]).all())
    digest = hashlib.sha256(f"{array.dtype}{shape}{is_uniform}".encode())
    digest.update(np.ascontiguousarray(rows[0] if is_uniform else rows).data)
    return is_uniform, digest.hexdigest()[:16]


def _uniform(element: Array, shape: tuple[int, ...], digest: str) -> Constant:
    return Constant(np.broadcast_to(element, shape), digest)


@dataclass(frozen=True, slots=True)
class Primitive:
    """One tensor-algebra step. Its origin is stored in the graph and does not affect equality."""

    op: str
    inputs: tuple[int, ...]
    attributes: Attributes
    output: int

    @property
    def row(self) -> Op:
        """The row of its operation in the table of operations."""
        return OPS[self.op]

    @property
    def operator(self) -> tuple[str, tuple[int, ...], Attributes]:
        """What the primitives that compute the outputs of one operator have in common."""
        own = self.attributes
        return self.op, self.inputs, own.without_output if isinstance(own, OutputOfSeveral) else own

    @overload
    def attributes_as(self, kind: type[A]) -> A: ...

    @overload
    def attributes_as(self, kind: type[A], other: type[B]) -> A | B: ...

    def attributes_as(self, kind: type[Attributes], other: type[Attributes] | None = None) -> Attributes:
        """Return the attributes, which must be of one of one or two kinds.

        Raises:
            TypeError: they are not.
        """
        if not isinstance(self.attributes, (kind, other or kind)):
            raise TypeError(f"{self.op} has {type(self.attributes).__name__}; expected {kind.__name__}")
        return self.attributes


@dataclass(frozen=True)
class PrimitiveGraph:
    """An immutable primitive graph.

    Attributes:
        types: the type of each value; a value's id is its position.
        primitives: the primitives; a primitive's id is its position.
        inputs: (name, value) of each model input.
        outputs: (name, value) of each model output.
        constants: the values known at build time.
        origins: per primitive, the model's node or the rule that it came from.
    """

    types: tuple[ValueType, ...]
    primitives: tuple[Primitive, ...]
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    constants: Mapping[int, Constant] = field(default_factory=dict)
    origins: tuple[str, ...] = ()

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each value its alternatives, the primitives that compute it."""
        found: list[list[int]] = [[] for _ in self.types]
        for p, primitive in enumerate(self.primitives):
            found[primitive.output].append(p)
        return tuple(map(tuple, found))

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the primitives that read it."""
        found: list[list[int]] = [[] for _ in self.types]
        for p, primitive in enumerate(self.primitives):
            for value in dict.fromkeys(primitive.inputs):
                found[value].append(p)
        return tuple(map(tuple, found))

    @cached_property
    def given(self) -> frozenset[int]:
        """The values that need no producer: model inputs and constants."""
        return frozenset(self.constants) | {value for _, value in self.inputs}

    def producing(self, value: int, *ops: str) -> tuple[Primitive, ...]:
        """Return the alternatives of a value whose operation is in `ops`; all alternatives if `ops` is empty."""
        found = (self.primitives[p] for p in self.producers[value])
        return tuple(primitive for primitive in found if not ops or primitive.op in ops)

    def reading(self, value: int) -> tuple[Primitive, ...]:
        """Return the primitives that read a value."""
        return tuple(self.primitives[p] for p in self.consumers[value])

    def number(self, value: int) -> float | None:
        """Return the number that all elements of a uniform constant have; None for any other value."""
        constant = self.constants.get(value)
        return float(constant.scalar) if constant is not None and constant.is_uniform else None

    @cached_property
    def linear(self) -> tuple[Primitive, ...]:
        """The linear primitives."""
        return tuple(p for p in self.primitives if p.row.category is Category.LINEAR)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the constants; one with equal elements is stored as one element, and is not counted."""
        return sum(constant.array.nbytes for constant in self.constants.values() if not constant.is_uniform)

    @property
    def alternatives(self) -> int:
        """The number of primitives beyond one per value."""
        return sum(max(0, len(found) - 1) for found in self.producers)

    def input_types(self, primitive: Primitive) -> tuple[ValueType, ...]:
        """Return the types of a primitive's inputs."""
        return tuple(self.types[value] for value in primitive.inputs)

    def with_primitives(self, kept: Sequence[int]) -> PrimitiveGraph:
        """Return the graph with only some of its primitives, renumbered.

        `kept`: the positions of these primitives, in order; they must compute all outputs.
        """
        origins = tuple(self.origins[p] for p in kept) if self.origins else ()
        primitives = tuple(self.primitives[p] for p in kept)
        less = replace(self, primitives=primitives, origins=origins)
        return GraphBuilder.from_graph(less).freeze()

    def is_widening(self, primitive: Primitive, of_bytes: bool = False) -> bool:
        """Return whether a primitive is an exact cast of 16-bit floats, or of bytes if `of_bytes`, to float32."""
        if primitive.op != "cast" or self.types[primitive.output].dtype is not DType.F32:
            return False
        bytes_ = (DType.I8, DType.U8) if of_bytes else ()
        return self.types[primitive.inputs[0]].dtype in (DType.F16, DType.BF16, *bytes_)

    def work_flop(self, primitive: Primitive) -> int:
        """Return the floating-point operations of a primitive."""
        types = self.input_types(primitive)
        return primitive.row.work_flop(types, primitive.attributes, self.types[primitive.output])

    @property
    def total_flop(self) -> int:
        """The floating-point operations of all primitives; an operator with several outputs counts once."""
        distinct = {
            p.operator if isinstance(p.attributes, OutputOfSeveral) else i: p for i, p in enumerate(self.primitives)
        }
        return sum(map(self.work_flop, distinct.values()))


_Key = tuple[str, tuple[int, ...], Attributes]


class GraphBuilder:
    """A primitive graph under construction. The value ids that it returns stay valid until `freeze`.

    Attributes:
        keep: maps a new constant, which may be large, to an equal one to store in its place.
        sized: the constants that follow from sizes; broadcasts and casts to floats of these are not folded.
        tied: the constants into which no rule folds others (`korch.primitive.tied`).
    """

    def __init__(self, *, folds: bool = True) -> None:
        """Begin a graph.

        `folds`: compute primitives of constants when they are added, in the types of the graph.
        """
        self._is_folding = folds
        self.sized: set[int] = set()
        self.tied: frozenset[int] = frozenset()
        self.keep: Callable[[Constant], Constant] = lambda constant: constant
        self._types: list[ValueType] = []
        self._parent: list[int] = []
        self._primitives: dict[_Key, tuple[ValueId, str]] = {}
        self._constants: dict[int, Constant] = {}
        self._constant_ids: dict[Constant, int] = {}
        self._inputs: dict[str, int] = {}
        self._outputs: dict[str, int] = {}

    @staticmethod
    def from_graph(graph: PrimitiveGraph) -> GraphBuilder:
        """Return a builder that holds `graph` with the same value ids; the results of equal primitives are merged."""
        builder = GraphBuilder()
        for type_ in graph.types:
            builder._new_value(type_)
        for value, constant in graph.constants.items():
            builder._constants[value] = constant
            builder._constant_ids.setdefault(constant, value)
        builder._inputs = dict(graph.inputs)
        builder._outputs = dict(graph.outputs)
        for p, primitive in enumerate(graph.primitives):
            key = (primitive.op, primitive.inputs, primitive.attributes)
            origin = graph.origins[p] if graph.origins else ""
            value, _ = builder._primitives.setdefault(key, (ValueId(primitive.output), origin))
            builder.merge(value, primitive.output)
        return builder

    def input(self, name: str, type_: ValueType) -> ValueId:
        """Declare a model input and return its value."""
        value = self._inputs[name] = self._new_value(type_)
        return value

    def constant(self, array: Array) -> ValueId:
        """Return the value of a constant; equal constants are one value."""
        constant = Constant.of(np.asarray(array))
        if constant not in self._constant_ids:
            constant = self.keep(constant)
            self._constant_ids[constant] = self._new_value(constant.type)
            self._constants[self._constant_ids[constant]] = constant
        return ValueId(self._constant_ids[constant])

    def output(self, name: str, value: int) -> None:
        """Declare a value to be a model output."""
        self._outputs[name] = value

    def add(self, op: str, inputs: Sequence[int], attributes: Attributes | None = None, *, origin: str = "") -> ValueId:
        """Add a primitive and return its value; if there is an equal primitive, return its value.

        A primitive of constants is computed immediately, unless it is opaque, or a broadcast that
        would store the same elements many times, or a cast of a matrix that would store more bytes.

        Raises:
            InvalidGraphError: the operation can't be applied to these inputs.
        """
        row = OPS[op]
        attributes = attributes if attributes is not None else row.attributes()
        found = tuple(self.find(value) for value in inputs)
        key = (op, found, attributes)
        if key in self._primitives:
            return self.find(self._primitives[key][0])
        try:
            require_arity(op, row.arity, len(found))
            type_ = row.infer([self._types[value] for value in found], attributes)
        except TypeMismatchError as error:
            raise InvalidGraphError(str(error), where=origin or f"primitive {op}") from error
        is_known = self._is_folding and all(value in self._constants for value in found)
        if is_known and self._folds(op, found, type_):
            value = self.constant(self._fold(row, found, attributes, type_))
            if not self.sized.isdisjoint(found):
                self.sized.add(value)
            return value
        value = self._new_value(type_)
        self._primitives[key] = (value, origin)
        return value

    def merge(self, a: int, b: int) -> int:
        """Declare two values equal; return the one that represents both.

        Raises:
            InvalidGraphError: their types differ.
        """
        a, b = self.find(a), self.find(b)
        if a == b:
            return a
        if self._types[a] != self._types[b]:
            raise InvalidGraphError(f"values %{a}: {self._types[a]} and %{b}: {self._types[b]} can't be equal")
        keep, drop = (b, a) if self._is_given(b) and not self._is_given(a) else sorted((a, b))
        self._parent[drop] = keep
        return keep

    def find(self, value: int) -> ValueId:
        """Return the value that represents `value` after merges."""
        while self._parent[value] != value:
            self._parent[value] = self._parent[self._parent[value]]
            value = self._parent[value]
        return ValueId(value)

    def type(self, value: int) -> ValueType:
        """Return a value's type."""
        return self._types[self.find(value)]

    def constant_of(self, value: int) -> Constant | None:
        """Return a value's constant, or None if it is not constant."""
        return self._constants.get(self.find(value))

    def maker_of(self, value: int) -> Primitive | None:
        """Return the most recently added primitive that computes a value; None if there is none."""
        value = self.find(value)
        for (op, inputs, attributes), (output, _) in reversed(self._primitives.items()):
            if self.find(output) == value:
                return Primitive(op, tuple(self.find(v) for v in inputs), attributes, value)
        return None

    def rebuild(self) -> None:
        """Restore congruence: primitives whose inputs became equal have equal outputs."""
        while True:
            rebuilt: dict[_Key, tuple[ValueId, str]] = {}
            pairs: list[tuple[int, int]] = []
            for (op, inputs, attributes), (output, origin) in self._primitives.items():
                key = (op, tuple(self.find(value) for value in inputs), attributes)
                if key in rebuilt:
                    pairs.append((rebuilt[key][0], output))
                else:
                    rebuilt[key] = (self.find(output), origin)
            self._primitives = rebuilt
            if all(self.find(a) == self.find(b) for a, b in pairs):
                return
            for a, b in pairs:
                self.merge(a, b)

    def primitives(self) -> Iterator[tuple[Primitive, str]]:
        """Yield each primitive so far with its origin."""
        for (op, inputs, attributes), (output, origin) in list(self._primitives.items()):
            found = tuple(self.find(value) for value in inputs)
            yield Primitive(op, found, attributes, self.find(output)), origin

    def freeze(self) -> PrimitiveGraph:
        """Return the graph with congruence restored, dead code removed and a deterministic numbering."""
        self.rebuild()
        produced: dict[int, list[tuple[Primitive, str]]] = {}
        for primitive, origin in self.primitives():
            if not self._is_given(primitive.output) and primitive.output not in primitive.inputs:
                produced.setdefault(primitive.output, []).append((primitive, origin))
        live = self._live(produced)
        order = [v for v in range(len(self._types)) if v in live]
        number = {value: i for i, value in enumerate(order)}
        kept = [
            (Primitive(p.op, tuple(number[v] for v in p.inputs), p.attributes, number[p.output]), origin)
            for value in order
            for p, origin in produced.get(value, ())
        ]
        return PrimitiveGraph(
            types=tuple(self._types[value] for value in order),
            primitives=tuple(p for p, _ in kept),
            inputs=tuple((name, number[self.find(v)]) for name, v in self._inputs.items()),
            outputs=tuple((name, number[self.find(v)]) for name, v in self._outputs.items()),
            constants={number[v]: c for v, c in self._constants.items() if v in number},
            origins=tuple(origin for _, origin in kept),
        )

    def _live(self, produced: Mapping[int, list[tuple[Primitive, str]]]) -> set[int]:
        def operands(value: int) -> Iterator[int]:
            return (v for p, _ in produced.get(value, ()) for v in p.inputs)

        inputs: set[int] = {self.find(value) for value in self._inputs.values()}
        outputs: list[int] = [self.find(value) for value in self._outputs.values()]
        return inputs.union(reached(outputs, operands))

    def _is_given(self, value: int) -> bool:
        return value in self._constants or any(self.find(v) == value for v in self._inputs.values())

    def _new_value(self, type_: ValueType) -> ValueId:
        self._types.append(type_)
        self._parent.append(len(self._parent))
        return ValueId(len(self._types) - 1)

    def _folds(self, op: str, inputs: Sequence[int], type_: ValueType) -> bool:
        if op == "broadcast":
            constant = self._constants[inputs[0]]
            return inputs[0] not in self.sized and (constant.is_uniform or constant.array.size >= type_.size)
        if op == "cast" and type_.dtype.is_float and inputs[0] in self.sized:
            return False
        if op == "cast" and type_.rank > 1:
            constant = self._constants[inputs[0]]
            return constant.is_uniform or constant.type.size_bytes >= type_.size_bytes
        return op not in ("opaque", "loop")

    def _fold(self, row: Op, inputs: Sequence[int], attributes: Attributes, type_: ValueType) -> Array:
        arrays = [self._constants[value].array for value in inputs]
        if all(self._constants[value].is_uniform for value in inputs):
            if row.category is Category.BROADCAST:
                return np.broadcast_to(arrays[0].reshape(-1)[0], type_.shape)
            if row.category is Category.ELEMENTWISE:
                arrays = [array.reshape(-1)[0] for array in arrays]
        if row.category not in (Category.LAYOUT, Category.BROADCAST):  # these only move elements
            arrays = [a.astype(np.float64) if DType.of(a.dtype).is_float else a for a in arrays]
        with np.errstate(all="ignore"):
            result = row.reference(arrays, attributes).astype(type_.dtype.numpy, copy=False)
        return np.broadcast_to(result, type_.shape)
