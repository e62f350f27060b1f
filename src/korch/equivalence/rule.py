"""The equivalence rule, the view of the graph that it reads, and the writer with which it adds primitives.

A rule is a frozen value. `match` finds the matches of its left side. `rewrite` checks every condition on which the
rule relies, and returns either a refusal or a function that writes the right side. That function reads only what
`rewrite` has found. Rules add alternatives and never remove anything; the solver chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from korch.primitive.graph import Constant, GraphBuilder, Primitive
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.layout import ReshapeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.pattern import Either, Found, OpPattern, find_at
from korch.primitive.types import DType, ValueType
from korch.primitive.verbs import Verbs

_BY = "by "


@dataclass(frozen=True, slots=True)
class RuleRefusal:
    """Why a rule does not apply where it matches.

    Attributes:
        reason: the condition that fails, in a few words; refusals are counted by it.
        value: the value at which the rule matched.
        is_final: whether it depends on constants and types alone, so that no later round changes it.
    """

    reason: str
    value: int
    is_final: bool = False


class View:
    """A builder's graph as it was at the start of a round; rules read the graph only through it.

    Attributes:
        primitives: all primitives.
        read: the values that were asked about; what a rule finds at a root depends on nothing else.
    """

    def __init__(self, builder: GraphBuilder, outputs: Sequence[int]) -> None:
        self.primitives = tuple(primitive for primitive, _ in builder.primitives())
        self.read: set[int] = set()
        self._builder = builder
        self._outputs = frozenset(builder.find(value) for value in outputs)
        self._producers: dict[int, list[Primitive]] = {}
        self._users: dict[int, list[Primitive]] = {}
        self._needed_by: dict[int, tuple[int, ...]] = {}
        self._origins = dict(builder.primitives())
        for primitive in self.primitives:
            self._producers.setdefault(primitive.output, []).append(primitive)
            for value in dict.fromkeys(primitive.inputs):
                self._users.setdefault(value, []).append(primitive)

    def changed_since(self, before: View) -> frozenset[int]:
        """Return the values about which this view may answer otherwise than an earlier one."""
        values = {*self._producers, *self._users, *before._producers, *before._users}
        return frozenset(v for v in values if self._about(v) != before._about(v))

    def _about(self, value: int) -> tuple[object, ...]:
        return self._producers.get(value), self._users.get(value), value in self._outputs

    def type(self, value: int) -> ValueType:
        """Return a value's type, which never changes."""
        return self._builder.type(value)

    def shape(self, value: int) -> tuple[int, ...]:
        """Return a value's shape."""
        return self._builder.type(value).shape

    def constant(self, value: int) -> Constant | None:
        """Return a value's constant, or None if it is not constant."""
        self.read.add(value)
        return self._builder.constant_of(value)

    def is_tied(self, value: int) -> bool:
        """Return whether a value is a constant that has to stay as it is."""
        return value in self._builder.tied

    def producing(self, value: int, *ops: str) -> tuple[Primitive, ...]:
        """Return the alternatives of a value whose operation is in `ops`; all alternatives if `ops` is empty.

        Primitives that read their own output are left out, because they can't compute it.
        """
        self.read.add(value)
        found = self._producers.get(value, ())
        return tuple(p for p in found if (not ops or p.op in ops) and value not in p.inputs)

    def unbroadcast(self, value: int) -> int:
        """Return the value from which a value is broadcast, or the value itself."""
        return next((p.inputs[0] for p in self.producing(value, "broadcast")), value)

    def stored_constant(self, value: int) -> Constant | None:
        """Return a value's constant, or the one from which it is broadcast; None if there is none or it is empty."""
        sources = (value, *(p.inputs[0] for p in self.producing(value, "broadcast")))
        found = (constant for v in sources if (constant := self.constant(v)) is not None)
        constant = next(found, None)
        return None if constant is None or constant.array.size == 0 else constant

    def number(self, value: int) -> float | None:
        """Return the number that all elements of a uniform constant have, broadcast or not; None for other values."""
        constant = self.stored_constant(value)
        return float(constant.scalar) if constant is not None and constant.is_uniform else None

    def users(self, value: int) -> tuple[Primitive, ...]:
        """Return the primitives that read a value."""
        self.read.add(value)
        return tuple(self._users.get(value, ()))

    def needed_by(self, value: int) -> tuple[int, ...]:
        """Return the values that are computed directly from a value and are themselves read or outputs."""
        outputs = [user.output for user in self._users.get(value, ())]
        self.read.update((value, *outputs))
        if value not in self._needed_by:
            self._needed_by[value] = tuple(v for v in dict.fromkeys(outputs) if v in self._users or v in self._outputs)
        return self._needed_by[value]

    def rule_of(self, primitive: Primitive) -> str:
        """Return the name of the rule that wrote a primitive, "" if it comes from the model."""
        return rule_of(self._origins[primitive])

    def becomes_integer(self, value: int) -> bool:
        """Return whether a value is cast to integers, where a small error may become an error of 1."""
        return any(user.op == "cast" and not self.type(user.output).dtype.is_float for user in self.users(value))

    def is_output(self, value: int) -> bool:
        """Return whether a value is an output of the model."""
        self.read.add(value)
        return value in self._outputs


class Writer:
    """The interface with which a rule adds primitives; it records the rule's name as their origin."""

    def __init__(self, builder: GraphBuilder, rule_name: str) -> None:
        self._builder = builder
        self._origin = origin_of(rule_name)

    @property
    def verbs(self) -> Verbs:
        """The `Verbs` that fission uses, too, for functions that both share."""
        return Verbs(self._builder, self._origin)

    def type(self, value: int) -> ValueType:
        """Return a value's type."""
        return self._builder.type(value)

    def add(self, op: str, inputs: Sequence[int], attributes: Attributes | None = None) -> int:
        """Add a primitive and return its value; a primitive of constants is computed immediately."""
        return self._builder.add(op, inputs, attributes, origin=self._origin)

    def constant(self, array: Array, dtype: DType) -> int:
        """Return the value of a constant with the elements of `array`, rounded to `dtype`."""
        dense = np.asarray(array)
        one = dense.reshape(-1)[:1] if dense.size > 1 and not any(dense.strides) else dense  # if uniform, one element
        with np.errstate(all="ignore"):
            return self._builder.constant(np.broadcast_to(one.astype(dtype.numpy), dense.shape))

    def reshape(self, value: int, shape: tuple[int, ...]) -> int:
        """Return the value in another shape; the value itself if it has that shape."""
        if self.type(value).shape == shape:
            return value
        return self.add("reshape", (value,), ReshapeAttributes(shape))

    def along(self, vector: Array, axis: int, type_: ValueType) -> int:
        """Return a constant of a type whose elements depend only on their position along one axis.

        `vector`: float64[type_.shape[axis]], or one element for all.
        """
        shape = [1] * type_.rank
        if np.ndim(vector):
            shape[axis] = type_.shape[axis]
        small = self.constant(np.reshape(vector, shape), type_.dtype)
        if tuple(shape) == type_.shape:
            return small
        return self.add("broadcast", (small,), BroadcastAttributes(type_.shape))


def rule_of(origin: str) -> str:
    """Return the name of the rule that a primitive's origin names, "" if it names none."""
    return origin.removeprefix(_BY) if origin.startswith(_BY) else ""


def origin_of(rule_name: str) -> str:
    """Return the origin for primitives that a rule writes."""
    return _BY + rule_name


def is_finite_in(array: Array, dtype: DType) -> bool:
    """Return whether all elements are finite after rounding to `dtype`."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.astype(dtype.numpy, copy=False)).all())


def is_normal(array: Array, dtype: DType) -> Array:
    """Return which elements are at least as large as the smallest normal number of `dtype`."""
    least = {DType.F64: 2.0**-1022, DType.F16: 2.0**-14}.get(dtype, 2.0**-126)  # bfloat16 has that of float32
    return np.asarray(np.abs(array) >= least)


def underflows(a: Array, b: Array, dtype: DType) -> bool:
    """Return whether an element of a * b is too small to be normal, and smaller than both factors."""
    with np.errstate(all="ignore"):
        product = a * b
        return bool(np.any(~is_normal(product, dtype) & (np.abs(product) < np.minimum(np.abs(a), np.abs(b)))))


Write = Callable[[Writer], int]
"""Writes the right side of a rule, and returns the value that equals the root's."""

M = TypeVar("M")


@dataclass(frozen=True)
class Rule(Generic[M]):
    """An equivalence: the root's value equals what `rewrite` returns a function for.

    Attributes:
        name: a law in kebab-case, `conv1x1-is-matmul`.
        law: the law as one line of mathematics.
        source: where it comes from.
        roots: the operations for which `match` is called.
        match: the view and a root -> each match of the left side; matches are hashable.
        rewrite: the view and a match -> what writes the right side, or why the rule does not apply.
        reorders: whether it re-associates floating-point operations; `strict` switches it off.
        is_last: whether it is tried in one round only, when the other rules have nothing more to add: it
            combines their results, and its own results would be further ones to combine.
        is_local: whether it replaces one primitive by one that reads and writes the same values. If a
            model is cut into segments, such alternatives are added in each segment.
        needs_float32: whether it is disabled where products have 16-bit operands: it multiplies sums that are
            not scaled yet, or values that were not operands of a product, which could overflow or lose precision.
    """

    name: str
    law: str
    source: str
    roots: tuple[str, ...]
    match: Callable[[View, Primitive], Iterator[M]]
    rewrite: Callable[[View, M], Write | RuleRefusal]
    reorders: bool = False
    is_last: bool = False
    is_local: bool = False
    needs_float32: bool = False

    def __repr__(self) -> str:
        return f"Rule({self.name})"


@dataclass(frozen=True, slots=True)
class Pair:
    """A primitive and another one whose output it reads."""

    root: Primitive
    inner: Primitive


def reads(*ops: str) -> Callable[[View, Primitive], Iterator[Pair]]:
    """Return a `match` that yields each primitive with an operation in `ops` that computes the root's first input."""

    def match(view: View, root: Primitive) -> Iterator[Pair]:
        for inner in view.producing(root.inputs[0], *ops):
            yield Pair(root, inner)

    return match


def stands(
    pattern: OpPattern | Either, accept: Callable[[View, Found], bool] = lambda *_: True
) -> Callable[[View, Primitive], Iterator[Found]]:
    """Return a `match` that yields each match of a pattern at a root.

    `accept`: whether to yield a match.
    """

    def match(view: View, root: Primitive) -> Iterator[Found]:
        return (found for found in find_at(view, pattern, root) if accept(view, found))

    return match


AnyRule = Rule[Any]
