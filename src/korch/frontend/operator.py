"""The operator graph: a model's nodes with all types known, before fission.

All shapes are static (tuples of integers), and values that depend on constants alone have been
computed. Operators are in an order in which they can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import onnx

from korch.frontend.attributes import NodeAttributes
from korch.frontend.names import first_output
from korch.primitive.op import Array
from korch.primitive.types import ValueType

LISTED_ELEMENTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One node of the model."""

    name: str  # its name in the model, or its first output's if it has none
    op_type: str  # the operator's name
    domain: str  # its domain; "" for ONNX's own
    version: int  # the version of the domain (the opset) that gives it its meaning
    inputs: tuple[str, ...]  # names of values; "" where an optional one is left out
    outputs: tuple[str, ...]  # names of values; "" where one is left out or nothing reads it
    attributes: NodeAttributes  # the attributes that the node sets
    node: onnx.NodeProto = field(repr=False)  # the node as ONNX wrote it, for operators that are kept whole
    # one iteration of a loop with a known number of iterations, whose inputs `inputs` then names
    iteration: Iteration | None = field(default=None, repr=False)

    @classmethod
    def of(cls, node: onnx.NodeProto, version: int, outputs: Sequence[str]) -> Self:
        """Return a node as an operator, with only some of its outputs ("" for the others)."""
        name, inputs = node.name or first_output(node), tuple(node.input)
        return cls(name, node.op_type, node.domain, version, inputs, tuple(outputs), NodeAttributes(node), node)

    @property
    def label(self) -> str:
        """The type and name, as they appear in messages and origins."""
        domain = f"{self.domain}::" if self.domain else ""
        return f"{domain}{self.op_type} {' '.join(self.name.split())}".rstrip()


@dataclass(frozen=True, eq=False)
class OperatorGraph:
    """An immutable operator graph."""

    name: str  # where the model came from, for messages
    operators: tuple[Operator, ...]  # in an order in which they can run
    inputs: tuple[str, ...]  # names of the model's inputs
    outputs: tuple[str, ...]  # names of the model's outputs
    types: Mapping[str, ValueType]  # the type of each value that an operator, input or output of the graph uses
    constants: Mapping[str, Array]  # the values known at build time; large ones may be mapped from a file
    # elements of the inputs that need not be given at run time, by name
    defaults: Mapping[str, Array] = field(default_factory=dict)
    sized: frozenset[str] = frozenset()  # the constants that follow from sizes, if the model is read for several sizes

    def __str__(self) -> str:
        return format_operators(self)


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor of which each iteration of a loop reads or writes one slice."""

    axis: int  # the axis along which the slices follow each other
    is_backward: bool  # whether the first iteration has the last slice


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """A loop with a known number of iterations."""

    # one iteration: from the states, the slices and the other values that the loop reads, to the next states and the
    # slices of its results
    graph: OperatorGraph
    trips: int  # the number of iterations
    states: int  # the number of states
    # per input with slices, where they are; an input may have more slices than there are iterations
    reads: tuple[Stream, ...]
    writes: tuple[Stream, ...]  # per result with slices, where they are


def format_operators(graph: OperatorGraph) -> str:
    """Return an operator graph as text, with one operator or constant per line."""
    inputs = ", ".join(f"{name}: {graph.types[name]}" for name in graph.inputs)
    lines = [f"operators({inputs}) -> ({', '.join(graph.outputs)})   # {graph.name}"]
    for name, array in graph.constants.items():
        lines.append(f"{name}: {graph.types[name]} = constant{_elements(array)}")
    for operator in graph.operators:
        outputs = ", ".join(f"{n}: {graph.types[n]}" if n else "_" for n in operator.outputs)
        arguments = ", ".join(name or "_" for name in operator.inputs)
        attributes = ", ".join(f"{name}={_attribute(value)}" for name, value in sorted(operator.attributes.items()))
        head = operator.op_type if not operator.domain else operator.label.split(" ")[0]
        text = f"{outputs} = {head}-{operator.version}({arguments})"
        lines.append(text + (f" {{{attributes}}}" if attributes else "") + f"   # {operator.name}")
    return "\n".join(lines) + "\n"


def _elements(array: Array) -> str:
    if array.size > LISTED_ELEMENTS:
        return ""
    return " " + np.array2string(np.asarray(array), separator=",").replace("\n", "")


def _attribute(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, onnx.GraphProto | onnx.SparseTensorProto):
        return f"<{type(value).__name__}>"
    return repr(value)
