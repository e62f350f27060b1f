"""An ONNX operator as the tables see it, and what their rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from korch.cuda.layout import TORCH_TYPES
from korch.primitive.graph import Constant
from korch.primitive.types import DType, ValueType

WIDE_UNSIGNED = (DType.U16, DType.U32, DType.U64)
"""Calls see these as signed: what depends on their order or value is refused."""


@dataclass(frozen=True)
class Node:
    """An operator as the table sees it.

    Attributes:
        inputs: names of tensors; "" where one is left out.
        types: the type of each input, None where one is left out.
        outputs: the type of each output, None where one is left out.
        attributes: by name.
        constants: the inputs that are known, by position.
        version: of the operator set.
    """

    inputs: tuple[str, ...]
    types: tuple[ValueType | None, ...]
    outputs: tuple[ValueType | None, ...]
    attributes: Mapping[str, Any]
    constants: Mapping[int, Constant]
    version: int

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute; strings as str."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def given(self, i: int) -> str:
        """Return the name of an input, "" if it is left out."""
        return self.inputs[i] if i < len(self.inputs) else ""

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """Return the shape of an input that is there."""
        return self.type(i).shape

    def type(self, i: int = 0) -> ValueType:
        """Return the type of an input that is there."""
        found = self.types[i]
        if found is None:
            raise AssertionError("an input that is left out has no type")
        return found

    def result(self, i: int = 0) -> ValueType:
        """Return the type of an output that is read; of the first that is, if this one is not."""
        return self.outputs[i] or next(t for t in self.outputs if t is not None)

    def numbers(self, i: int) -> list[int] | None:
        """Return the integers of an input, None if they are not known."""
        constant = self.constants.get(i)
        return None if constant is None else [int(n) for n in constant.array.reshape(-1)]

    @property
    def rank(self) -> int:
        """Axes of the first input."""
        return len(self.shape())

    def axis(self, default: int = -1) -> int:
        """Return the attribute `axis`, not negative."""
        return int(self.get("axis", default)) % max(1, self.rank)


Row = Callable[[Node], str | None]
"""The text of a call for a node: statements, and last a tuple of its outputs."""


def dtype_text(type_: ValueType) -> str:
    """Return the text of the type of tensors with such elements."""
    return f"torch.{TORCH_TYPES[type_.dtype.value]}"


def positive(name: str, size: int | str) -> str:
    """Return the text of indices of which negative ones count from the end."""
    return f"torch.where({name} < 0, {name} + {size}, {name}).long()"


def ordered(row: Row) -> Row:
    """Refuse elements that calls see with another order."""

    def text(node: Node) -> str | None:
        return None if node.type().dtype in WIDE_UNSIGNED else row(node)

    return text
