"""The row type of the table of primitive operations.

A row contains everything that each operation must have: a missing part fails at import, and the
generic tests are parametrized over the table (`korch.primitive.ops.OPS`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self, TypeVar

import numpy as np

from korch.primitive.types import ValueType

Array = np.ndarray[Any, np.dtype[Any]]


class Category(Enum):
    """How an operation's output elements depend on its input elements (Korch, section 3)."""

    ELEMENTWISE = "elementwise"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    LAYOUT = "layout"
    LINEAR = "linear"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of an operation without attributes; the base class of all others."""


NONE = Attributes()


class OutputOfSeveral:
    """Attributes of a primitive that computes one output of several; the others are computed by primitives like it."""

    __slots__ = ()
    output: int  # the position of the output

    @property
    def without_output(self) -> Self:
        """These attributes with `output` normalized, so that they are equal for all outputs."""
        return replace(self, output=0)  # type: ignore[type-var]


class TypeMismatchError(ValueError):
    """An operation can't be applied to the given types; the message names the offending argument."""


A = TypeVar("A", bound=Attributes)

Infer = Callable[[Sequence[ValueType], A], ValueType]
Reference = Callable[[Sequence[Array], A], Array]
Work = Callable[[Sequence[ValueType], A, ValueType], int]


def flop_per_output(inputs: Sequence[ValueType], attributes: Attributes, output: ValueType) -> int:
    """One operation per output element."""
    return output.size


def flop_per_input(inputs: Sequence[ValueType], attributes: Attributes, output: ValueType) -> int:
    """One operation per element of the first input."""
    return inputs[0].size


def no_flop(inputs: Sequence[ValueType], attributes: Attributes, output: ValueType) -> int:
    """No operation: nothing is computed."""
    return 0


class Op:
    """A primitive operation.

    Its functions take one class of attributes and raise TypeMismatchError for any other.

    Attributes:
        name: its name in the text form.
        category: how output elements depend on input elements.
        arity: number of inputs; None for one or more.
        attributes: the frozen dataclass of its attributes.
        infer: input types and attributes -> output type; raises TypeMismatchError.
        reference: its meaning: input arrays and attributes -> output array. It computes in the
            type of its inputs, so the same function serves float32 and float64.
        work_flop: input types, attributes and output type -> floating-point operations.
        source: where its meaning is defined.
    """

    __slots__ = ("arity", "attributes", "category", "infer", "name", "reference", "source", "work_flop")

    def __init__(
        self,
        *,
        name: str,
        category: Category,
        arity: int | None,
        attributes: type[A],
        infer: Infer[A],
        reference: Reference[A],
        work_flop: Work[A],
        source: str,
    ) -> None:
        def own(given: Attributes) -> A:
            if not isinstance(given, attributes):
                raise TypeMismatchError(f"{name} takes {attributes.__name__}, not {given}")
            return given

        self.name, self.category, self.arity, self.source = name, category, arity, source
        self.attributes: type[Attributes] = attributes
        self.infer: Infer[Attributes] = lambda inputs, given: infer(inputs, own(given))
        self.reference: Reference[Attributes] = lambda inputs, given: reference(inputs, own(given))
        self.work_flop: Work[Attributes] = lambda inputs, given, output: work_flop(inputs, own(given), output)

    def __repr__(self) -> str:
        return f"Op({self.name})"


def require(condition: bool, text: str) -> None:
    """Raise TypeMismatchError with `text` unless `condition`."""
    if not condition:
        raise TypeMismatchError(text)


def require_arity(op_name: str, arity: int | None, count: int) -> None:
    """Raise TypeMismatchError unless an operation of this arity takes `count` inputs."""
    if arity is None:
        require(count >= 1, f"{op_name} takes one or more inputs, not {count}")
    else:
        require(count == arity, f"{op_name} takes {arity} inputs, not {count}")
