"""A node of a domain beside the ONNX standard, defined by nodes of the standard with the same meaning."""

from collections.abc import Collection, Mapping, MutableMapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from korch.errors import ModelError, UnsupportedError
from korch.frontend.attributes import NodeAttributes
from korch.frontend.names import first_output, node_label
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType


class Definition:
    """One node of another domain, and the standard nodes written so far to define it.

    Attributes:
        node: the node; its input names may be changed.
        opsets: the versions of the standard, "", and of the other domains.
        nodes: the standard nodes, in order; their constants are added to those of the graph.
    """

    def __init__(
        self,
        node: onnx.NodeProto,
        opsets: Mapping[str, int],
        types: MutableMapping[str, ValueType],
        constants: MutableMapping[str, Array],
        model: str,
    ) -> None:
        self.node, self.opsets, self.types, self.constants = node, opsets, types, constants
        self.nodes: list[onnx.NodeProto] = []
        self._model, self._steps = model, 0

    @cached_property
    def attributes(self) -> NodeAttributes:
        """The attributes of the node."""
        return NodeAttributes(self.node)

    @cached_property
    def where(self) -> str:
        """The model and the node, for messages."""
        return f"{self._model}: {node_label(self.node)}"

    @property
    def opset(self) -> int:
        """The version of the standard; 0 if the model uses other domains only."""
        return self.opsets.get("", 0)

    def optional(self, position: int) -> str:
        """Return the name of an input, "" if it is left out."""
        return self.node.input[position] if position < len(self.node.input) else ""

    def needed(self, position: int, what: str) -> str:
        """Return the name of an input.

        Raises:
            ModelError: it is left out.
        """
        name = self.optional(position)
        if not name:
            raise ModelError(f"its input {position}, {what}, is missing", where=self.where)
        return str(name)

    def known(self, position: int, what: str) -> Array:
        """Return the elements of an input.

        Raises:
            UnsupportedError: they are not known.
        """
        name = self.needed(position, what)
        if name not in self.constants:
            raise UnsupportedError(
                f"its input {position}, {what}, is no constant", self.where, hint="Make it an initializer of the model"
            )
        return self.constants[name]

    def count(self, name: str, default: int = 0) -> int:
        """Return an attribute that is a positive number.

        Raises:
            ModelError: it is missing without a default, or not positive.
        """
        value = self.attributes.integer(name, default)
        if value < 1:
            raise ModelError(f"its attribute {name} is {value}", where=self.where, expected="a positive number")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an input."""
        return tuple(self.constants[name].shape) if name in self.constants else self.types[name].shape

    def op(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node and return its output."""
        step, first = self._step(op_type), first_output(self.node)
        name = output or f"{first}/{step}"
        label = f"{self.node.name or first}/{step}"
        self.nodes.append(onnx.helper.make_node(op_type, inputs, [name], name=label, **attributes))
        return name

    def rest(self, op_type: str, *inputs: str, without: Collection[str] = ()) -> str:
        """Add a node that has the attributes of this one, except some, and return its output."""
        name = self.op(op_type, *inputs)
        self.nodes[-1].attribute.extend(a for a in self.node.attribute if a.name not in without)
        return name

    def number(self, value: float) -> str:
        """Add a constant of float32 and return its name."""
        return self.constant(np.array(value, np.float32))

    def constant(self, array: Array) -> str:
        """Add a constant and return its name."""
        name = f"{first_output(self.node)}/{self._step('Constant')}"
        set_constant(self.types, self.constants, name, np.asarray(array))
        return name

    def _step(self, op_type: str) -> str:
        self._steps += 1
        return f"{op_type}_{self._steps - 1}"

    def widened(self, x: str) -> str:
        """Convert a value of the type of the node's first input to float32."""
        is_wide = self.dtype(self.node.input[0]) == np.float32
        return x if is_wide else self.op("Cast", x, to=onnx.TensorProto.FLOAT)

    def narrowed(self, y: str) -> str:
        """Convert a value of float32 to the type of the node's first input."""
        dtype = self.dtype(self.node.input[0])
        is_wide = dtype == np.float32
        return y if is_wide else self.op("Cast", y, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def real(self, at: int, what: str = "an operand") -> str:
        """Dequantize three inputs from position `at` on (integers, scale, zero point) and return the real numbers."""
        scale, zero = self.needed(at + 1, f"the scale of {what}"), self.optional(at + 2)
        return self.op("DequantizeLinear", self.needed(at, what), scale, *[zero] * bool(zero))

    def finish(self, x: str, at: int, like: str) -> None:
        """Quantize `x` to the node's output; the inputs from position `at` on are the scale and the zero point."""
        scale, zero = self.needed(at, "the scale of the result"), self.optional(at + 1)
        zero = zero or self.constant(np.zeros((), self.dtype(like)))
        self.op("QuantizeLinear", x, scale, zero, output=self.node.output[0])

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type of an input's elements."""
        return self.constants[name].dtype if name in self.constants else self.types[name].dtype.numpy

    def sums(self, a: int, b: str, zeros: tuple[str, str]) -> str:
        """Return the exact matrix product of integers minus their zero points, as integers."""
        arguments = [self.needed(a, "the data"), b, *zeros]
        while not arguments[-1]:
            arguments.pop()
        return self.op("MatMulInteger", *arguments)

    def scaled(self, sums: str, *factors: str) -> str:
        """Return integers, converted to float32, times the product of scales."""
        factor = factors[0]
        for other in factors[1:]:
            factor = self.op("Mul", factor, other)
        return self.op("Mul", self.op("Cast", sums, to=onnx.TensorProto.FLOAT), factor)

    def end(self, x: str, bias: str = "") -> None:
        """Make `x`, plus a bias if there is one, the node's output."""
        inputs = (x, bias) if bias else (x,)
        self.op("Add" if bias else "Identity", *inputs, output=self.node.output[0])


def set_constant(
    types: MutableMapping[str, ValueType], constants: MutableMapping[str, Array], name: str, array: Array
) -> None:
    """Record the elements of a value, and its type if the elements are numbers or booleans."""
    constants[name] = array
    try:
        types[name] = ValueType(tuple(array.shape), DType.of(array.dtype))
    except KeyError:
        types.pop(name, None)
