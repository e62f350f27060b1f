"""The form of an ONNX operator that the rows of the table take, and helpers that the rows share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

TORCH_TYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "int8",
    "u64": "int64",
    "u32": "int32",
    "u16": "int16",
}
"""PyTorch's types with elements of the same size; which type it is matters only to PyTorch calls."""

WIDE_UNSIGNED = (DType.U16, DType.U32, DType.U64)
"""PyTorch calls get these types as signed integers: operators that depend on their order or value are refused."""


@dataclass(frozen=True)
class Node:
    """An ONNX operator in the form that the rows of the table take."""

    inputs: tuple[str, ...]  # the names of the input tensors; "" for an omitted input
    types: tuple[ValueType | None, ...]  # the type of each input; None for an omitted input
    outputs: tuple[ValueType | None, ...]  # the type of each output; None for an omitted output
    attributes: Mapping[str, Any]  # the operator's attributes, by name
    constants: Mapping[int, Array]  # the inputs whose values are known, by position
    version: int  # the version of the operator set

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or `default` if it is missing; bytes are decoded to str."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def given(self, i: int) -> str:
        """Return the name of an input, "" if it is omitted."""
        return self.inputs[i] if i < len(self.inputs) else ""

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """Return the shape of an input that is not omitted."""
        return self.type(i).shape

    def type(self, i: int = 0) -> ValueType:
        """Return the type of an input that is not omitted."""
        found = self.types[i]
        if found is None:
            raise AssertionError("an input that is left out has no type")
        return found

    def result(self, i: int = 0) -> ValueType:
        """Return the type of output `i`; if it is omitted, the type of the first output that is not."""
        return self.outputs[i] or next(t for t in self.outputs if t is not None)

    def numbers(self, i: int) -> list[int] | None:
        """Return the integers of a constant input; None if the input is not constant."""
        array = self.constants.get(i)
        return None if array is None else [int(n) for n in array.reshape(-1)]

    @property
    def rank(self) -> int:
        """The number of axes of the first input."""
        return len(self.shape())

    def axis(self, default: int = -1) -> int:
        """Return the attribute `axis`, converted to a non-negative number."""
        return int(self.get("axis", default)) % max(1, self.rank)


Row = Callable[[Node], str | None]
"""Returns the text of a call for a node: statements, and last a tuple of its outputs; None if there is none."""


def dtype_text(type_: ValueType) -> str:
    """Return the text of the PyTorch dtype of tensors of this type."""
    return f"torch.{TORCH_TYPES[type_.dtype.value]}"


def positive(name: str, size: int | str) -> str:
    """Return text that converts indices, of which negative ones count from the end, to non-negative int64 ones."""
    return f"torch.where({name} < 0, {name} + {size}, {name}).long()"


def ordered(row: Row) -> Row:
    """Return the row, changed to refuse the types of `WIDE_UNSIGNED`, whose order differs in PyTorch calls."""

    def text(node: Node) -> str | None:
        return None if node.type().dtype in WIDE_UNSIGNED else row(node)

    return text
