"""What an equivalence rule is, what it sees and how it writes.

A rule is a frozen value. `match` finds where its left side stands, `refuse` checks every condition
that it relies on and returns either why not or a typed witness, and `build` writes the right side
from the witness. All three are pure: whatever `refuse` computes travels in the witness. Rules add
alternatives and never remove anything; the solver chooses.
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
        is_final: whether it rests on constants and types alone, so that no later round changes it.
    """

    reason: str
    value: int
    is_final: bool = False


class View:
    """A builder's graph as it stood at the start of a round; all that rules see of it."""

    def __init__(self, builder: GraphBuilder, outputs: Sequence[int]) -> None:
        self.primitives = tuple(primitive for primitive, _ in builder.primitives())
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

    def type(self, value: int) -> ValueType:
        """Return a value's type."""
        return self._builder.type(value)

    def shape(self, value: int) -> tuple[int, ...]:
        """Return a value's shape."""
        return self._builder.type(value).shape

    def constant(self, value: int) -> Constant | None:
        """Return the constant that a value is, or None."""
        return self._builder.constant_of(value)

    def producing(self, value: int, *ops: str) -> tuple[Primitive, ...]:
        """Return the alternatives of a value that are one of `ops`; all of them if none is named.

        Primitives that read their own output are left out: they compute nothing.
        """
        found = self._producers.get(value, ())
        return tuple(p for p in found if (not ops or p.op in ops) and value not in p.inputs)

    def unbroadcast(self, value: int) -> int:
        """Return what a value is broadcast from, or the value itself."""
        return next((p.inputs[0] for p in self.producing(value, "broadcast")), value)

    def stored_constant(self, value: int) -> Constant | None:
        """Return the constant that a value is or is broadcast from; None if none is, or an empty one."""
        sources = (value, *(p.inputs[0] for p in self.producing(value, "broadcast")))
        found = (constant for v in sources if (constant := self.constant(v)) is not None)
        constant = next(found, None)
        return None if constant is None or constant.array.size == 0 else constant

    def number(self, value: int) -> float | None:
        """Return the number that all elements of a constant are, broadcast or not, or None."""
        constant = self.stored_constant(value)
        return float(constant.scalar) if constant is not None and constant.is_uniform else None

    def users(self, value: int) -> tuple[Primitive, ...]:
        """Return the primitives that read a value."""
        return tuple(self._users.get(value, ()))

    def reached(self, value: int, *ops: str) -> Iterator[Primitive]:
        """Yield the last primitive of each path of `ops` of which the first reads a value."""
        for user in self.users(value):
            if user.op == ops[0]:
                yield from self.reached(user.output, *ops[1:]) if ops[1:] else (user,)

    def needed_by(self, value: int) -> tuple[int, ...]:
        """Return the values that are computed from a value and are read or are outputs."""
        if value not in self._needed_by:
            outputs = (user.output for user in self._users.get(value, ()))
            self._needed_by[value] = tuple(v for v in dict.fromkeys(outputs) if v in self._users or v in self._outputs)
        return self._needed_by[value]

    def rule_of(self, primitive: Primitive) -> str:
        """Return the name of the rule that wrote a primitive, "" if the model has it."""
        return rule_of(self._origins[primitive])

    def becomes_integer(self, value: int) -> bool:
        """Whether a value's elements are cut off to integers, where a small error may become one of 1."""
        return any(user.op == "cast" and not self.type(user.output).dtype.is_float for user in self.users(value))

    def is_output(self, value: int) -> bool:
        """Whether the value is an output of the model."""
        return value in self._outputs


class Writer:
    """What `build` writes with: a builder that signs each primitive with the rule's name."""

    def __init__(self, builder: GraphBuilder, rule_name: str) -> None:
        self._builder = builder
        self._origin = origin_of(rule_name)

    @property
    def verbs(self) -> Verbs:
        """The verbs of fission, for primitives that both write."""
        return Verbs(self._builder, self._origin)

    def type(self, value: int) -> ValueType:
        """Return a value's type."""
        return self._builder.type(value)

    def add(self, op: str, inputs: Sequence[int], attributes: Attributes | None = None) -> int:
        """Add a primitive and return its value; a primitive of constants is computed at once."""
        return self._builder.add(op, inputs, attributes, origin=self._origin)

    def constant(self, array: Array, dtype: DType) -> int:
        """Return the value of a constant with the elements of `array`, rounded to `dtype`."""
        dense = np.asarray(array)
        one = dense.reshape(-1)[:1] if dense.size > 1 and not any(dense.strides) else dense  # of a large constant, too
        with np.errstate(all="ignore"):
            return self._builder.constant(np.broadcast_to(one.astype(dtype.numpy), dense.shape))

    def reshape(self, value: int, shape: tuple[int, ...]) -> int:
        """Return the value in another shape; the value itself if it has that shape."""
        if self.type(value).shape == shape:
            return value
        return self.add("reshape", (value,), ReshapeAttributes(shape))

    def along(self, vector: Array, axis: int, type_: ValueType) -> int:
        """Return a constant of a type whose elements depend on their place along one axis only.

        Args:
            vector: float64[type_.shape[axis]], or one element for all.
            axis: the axis.
            type_: the type of the result.
        """
        shape = [1] * type_.rank
        if np.ndim(vector):
            shape[axis] = type_.shape[axis]
        small = self.constant(np.reshape(vector, shape), type_.dtype)
        if tuple(shape) == type_.shape:
            return small
        return self.add("broadcast", (small,), BroadcastAttributes(type_.shape))


def rule_of(origin: str) -> str:
    """Return the name of the rule that a primitive's origin tells of, "" if it tells of none."""
    return origin.removeprefix(_BY) if origin.startswith(_BY) else ""


def origin_of(rule_name: str) -> str:
    """Return the origin of primitives that a rule writes."""
    return _BY + rule_name


def is_finite_in(array: Array, dtype: DType) -> bool:
    """Whether all elements are finite when they are rounded to `dtype`."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.astype(dtype.numpy, copy=False)).all())


M = TypeVar("M")
W = TypeVar("W")


@dataclass(frozen=True)
class Rule(Generic[M, W]):
    """An equivalence: the root's value equals what `build` writes.

    Attributes:
        name: a law in kebab-case, `conv1x1-is-matmul`.
        law: the law as one line of mathematics.
        source: where it comes from.
        roots: the operations at which `match` is asked.
        match: the view and a root -> each place where the left side stands; hashable.
        refuse: the view and a match -> the witness, or why the rule does not apply.
        build: a writer and a witness -> the value that equals the root's.
        reorders: whether it re-associates floating-point operations; `strict` switches it off.
        is_last: whether it is tried in one round only, when the others have nothing to add: it
            combines what they found, and each of its combinations would be one more to combine.
        is_local: whether it replaces one primitive by one that reads and writes the same values. A
            model that is cut into segments gets such alternatives in each segment.
        needs_float32: whether it is left out where products have 16 bits: it multiplies sums that are not
            scaled yet, or what was no factor of a product, which would overflow or lose digits.
    """

    name: str
    law: str
    source: str
    roots: tuple[str, ...]
    match: Callable[[View, Primitive], Iterator[M]]
    refuse: Callable[[View, M], W | RuleRefusal]
    build: Callable[[Writer, W], int]
    reorders: bool = False
    is_last: bool = False
    is_local: bool = False
    needs_float32: bool = False

    def __repr__(self) -> str:
        return f"Rule({self.name})"


@dataclass(frozen=True, slots=True)
class Pair:
    """A primitive and one whose output it reads."""

    root: Primitive
    inner: Primitive


def reads(*ops: str) -> Callable[[View, Primitive], Iterator[Pair]]:
    """Return the `match` of each primitive that is one of `ops` and computes the first input."""

    def match(view: View, root: Primitive) -> Iterator[Pair]:
        for inner in view.producing(root.inputs[0], *ops):
            yield Pair(root, inner)

    return match


def stands(
    pattern: OpPattern | Either, accept: Callable[[View, Found], bool] = lambda *_: True
) -> Callable[[View, Primitive], Iterator[Found]]:
    """Return the `match` of each way in which a root is what a pattern says.

    Args:
        pattern: the left side of the rule.
        accept: whether a way counts.
    """

    def match(view: View, root: Primitive) -> Iterator[Found]:
        return (found for found in find_at(view, pattern, root) if accept(view, found))

    return match


AnyRule = Rule[Any, Any]
