"""The attributes of one ONNX node, each read as the type that its operator declares."""

from collections.abc import Iterable

import onnx

from korch.errors import ModelError

ROUNDED_BLOCK = "rounded_block"
"""The entry of a node's metadata for what a product may round; MatMul has no such attribute."""


class NodeAttributes(dict[str, object]):
    """Attributes by name: int, float, str, tuples of these, arrays, graphs.

    The methods return a value of one type. They take the default from the caller, because a node need not
    have an attribute that has its default.

    Raises:
        ModelError: the attribute has another type, or is missing without a default.
    """

    def __init__(self, node: onnx.NodeProto) -> None:
        """Read the attributes of a node."""
        super().__init__((attribute.name, _python(attribute)) for attribute in node.attribute)
        # the model allows that blocks of as many terms of a product's data are rounded to bytes; 0: it does not
        self.rounded_block = next((int(p.value) for p in node.metadata_props if p.key == ROUNDED_BLOCK), 0)
        self.where = f"{node.op_type} {node.name}".rstrip()

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an attribute that is an integer, or a float with an integral value."""
        value = self._value(name, default)
        if isinstance(value, int | float) and float(value).is_integer():  # early opsets write some integers as floats
            return int(value)
        raise self._wrong(name, value, "an integer")

    def number(self, name: str, default: float | None = None) -> float:
        """Return an attribute that is a number."""
        value = self._value(name, default)
        if isinstance(value, int | float):
            return float(value)
        raise self._wrong(name, value, "a number")

    def text(self, name: str, default: str | None = None) -> str:
        """Return an attribute that is a text."""
        value = self._value(name, default)
        if isinstance(value, str):
            return value
        raise self._wrong(name, value, "a text")

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return an attribute that is a list of integers."""
        value = self._value(name, default)
        if isinstance(value, tuple) and all(isinstance(n, int) for n in value):
            return value
        raise self._wrong(name, value, "integers")

    def numbers(self, name: str, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        """Return an attribute that is a list of numbers."""
        value = self._value(name, default)
        if isinstance(value, tuple) and all(isinstance(n, int | float) for n in value):
            return tuple(float(n) for n in value)
        raise self._wrong(name, value, "numbers")

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return an attribute that is a list of texts."""
        value = self._value(name, default)
        if isinstance(value, tuple) and all(isinstance(text, str) for text in value):
            return value
        raise self._wrong(name, value, "texts")

    def _value(self, name: str, default: object) -> object:
        if name not in self and default is None:
            raise ModelError(f"the attribute {name!r} is missing", where=self.where)
        return self.get(name, default)

    def _wrong(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(f"the attribute {name!r} is {value!r}", where=self.where, expected=expected)


def _python(attribute: onnx.AttributeProto) -> object:
    value: object = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in value)
    return value
