"""One ONNX node for the translation to PyTorch: its attributes, and its inputs that are known in advance.

A translator is a function `OperatorNode -> Callable[tensors] -> tensor(s)`. It reads shapes, axes
and paddings here as Python values, so that the callable that it returns need not compute them: eager mode runs
without overhead, and Inductor traces plain code. Inputs that are read through `constant` are not passed to
the callable; the other inputs are passed in order.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from korch.errors import UnsupportedError
from korch.frontend.operator import Operator
from korch.report.peers.peer import Array

T = TypeVar("T")
TensorFunction = Callable[..., Any]
Translator = Callable[["OperatorNode"], TensorFunction]


class OperatorNode:
    """A node with its constant inputs.

    Attributes:
        op_type: the ONNX operator.
        opset: version of the default domain.
        output_count: number of outputs.
        attributes: the attributes that the node has.
    """

    def __init__(self, operator: Operator, constants: Mapping[str, Array]) -> None:
        self.op_type, self.opset, self.output_count = operator.op_type, operator.version, len(operator.outputs)
        self._name, self._inputs, self.attributes = operator.name, operator.inputs, operator.attributes
        self._constants = constants
        self._static: set[int] = set()

    @property
    def tensor_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the callable takes."""
        return tuple(name for i, name in enumerate(self._inputs) if name and i not in self._static)

    def has_input(self, index: int) -> bool:
        """Return whether an optional input is given."""
        return index < len(self._inputs) and bool(self._inputs[index])

    def expect(self, name: str, allowed: tuple[T, ...], default: T) -> T:
        """Return an attribute that must have one of the values that the translator knows."""
        value = self.attributes.get(name, default)
        if value not in allowed:
            raise self.unsupported(f"{name}={value!r}")
        return allowed[allowed.index(value)]

    def constant(self, index: int) -> Array | None:
        """Return an input that must be known in advance; None if it isn't given."""
        if not self.has_input(index):
            return None
        if self._inputs[index] not in self._constants:
            raise self.unsupported(f"a computed input {self._inputs[index]!r}")
        self._static.add(index)
        return self._constants[self._inputs[index]]

    def integers(self, index: int, attribute: str = "") -> list[int] | None:
        """Return integers given as an input (newer opsets) or as an attribute (older ones)."""
        array = self.constant(index)
        if array is not None:
            return [int(value) for value in array.reshape(-1)]
        return list(self.attributes.integers(attribute)) if attribute in self.attributes else None

    def number(self, index: int, attribute: str = "", default: float | None = None) -> float | None:
        """Return a scalar given as an input (newer opsets) or as an attribute (older ones)."""
        array = self.constant(index)
        if array is not None:
            scalar: float = np.asarray(array).reshape(-1)[0].item()
            return scalar
        return self.attributes.number(attribute) if attribute in self.attributes else default

    def window_rank(self) -> int:
        """Return the number of spatial axes of a convolution or pooling."""
        if kernel := self.attributes.integers("kernel_shape", ()):
            return len(kernel)
        if self._inputs[1] in self._constants:
            return self._constants[self._inputs[1]].ndim - 2
        raise self.unsupported("a computed weight and no kernel_shape")

    def unsupported(self, reason: str) -> UnsupportedError:
        """Return the error for a node that the translation to PyTorch doesn't cover."""
        return UnsupportedError(
            f"the PyTorch peers don't run {self.op_type} with {reason}",
            where=self._name,
            hint="Compare with the other peers",
        )
