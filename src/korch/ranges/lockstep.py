"""The primitives of one model at several sizes -> their common structure.

The graphs are traversed in parallel. Each primitive must have a counterpart in each of the other graphs, with the same
operation and the same operands. Only shapes, constants and attributes may differ; the rules of `free.py` handle these
differences. A mean is a product with 1/n if n is a power of 2, and a quotient otherwise; both become quotients.

Samples do not prove what a model computes at the sizes between them. So the executable is also compared with the model
at other sizes when it is built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import UnsupportedError
from korch.primitive.graph import Constant, Primitive, PrimitiveGraph
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.layout import SliceAttributes, TakeAttributes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.ranges.form import Dimension, Sizes

HINT = "Give the sizes that you need, separated by commas: --shape length=128,256"


@dataclass(frozen=True)
class LockOperand:
    """An operand of a primitive: a value of the largest graph and, if it is a constant, the constant in each graph."""

    value: int
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True)
class LockStep:
    """A primitive with its counterparts."""

    op: str  # the operation
    operands: tuple[LockOperand, ...]  # the operands
    attributes: tuple[Attributes, ...]  # the attributes in each graph
    output: int  # the number of its result in the largest graph
    origin: str  # the model's node from which it comes


@dataclass(frozen=True)
class Samples:
    """One model at several sizes."""

    dimensions: tuple[Dimension, ...]  # the dimensions that are free
    sizes: tuple[Sizes, ...]  # for each graph, the size of each dimension; the first sizes are the largest
    graphs: tuple[PrimitiveGraph, ...]  # the model's primitives for these sizes

    @property
    def largest(self) -> PrimitiveGraph:
        """The graph of the largest sizes."""
        return self.graphs[0]

    def text(self) -> str:
        """Return the dimensions as text for messages."""
        return ", ".join(f"{d}={d.range_text}" for d in self.dimensions)


@dataclass(frozen=True)
class Lockstep:
    """The common structure of all samples."""

    samples: Samples  # the graphs
    steps: tuple[LockStep, ...]  # the primitives, in an order in which they can run
    shapes: dict[int, tuple[Sizes, ...]]  # for each value of the largest graph, per axis the size in each sample
    outputs: tuple[tuple[str, LockOperand], ...]  # the outputs of the model, by name


class AmbiguousError(UnsupportedError):
    """The samples do not determine what the model does at other sizes; more samples may."""


def refusal(samples: Samples, origin: str, what: str) -> UnsupportedError:
    """Return the error that says why a node can't run for a range of sizes."""
    return UnsupportedError(what, where=f"{origin or 'the model'}, option --shape {samples.text()}", hint=HINT)


def align(samples: Samples) -> Lockstep:
    """Return the common structure of several graphs.

    Raises:
        UnsupportedError: the model's structure differs at one of the sizes.
    """
    largest = samples.largest
    maps: list[dict[int, int]] = [{} for _ in samples.graphs]
    for graph, found in zip(samples.graphs, maps, strict=True):
        found.update(zip((v for _, v in largest.inputs), (v for _, v in graph.inputs), strict=True))
    shapes = {v: _vectors(samples, [found[v] for found in maps]) for _, v in largest.inputs}
    steps = []
    for i, primitive in enumerate(largest.primitives):
        others = [graph.primitives[i] if i < len(graph.primitives) else None for graph in samples.graphs]
        step = _step(samples, maps, i, primitive, others)
        for found, other in zip(maps, others, strict=True):
            if other is not None:
                found[primitive.output] = other.output
        shapes[primitive.output] = _vectors(samples, [found[primitive.output] for found in maps], step.origin)
        steps.append(step)
    if any(len(graph.primitives) != len(steps) for graph in samples.graphs):
        raise refusal(samples, steps[-1].origin if steps else "", "the model has more steps at some of the sizes")
    outputs = tuple(
        (name, _operand(samples, maps, [graph.outputs[i][1] for graph in samples.graphs], f"output {name!r}"))
        for i, (name, _) in enumerate(largest.outputs)
    )
    return Lockstep(samples, tuple(steps), shapes, outputs)


def _vectors(samples: Samples, values: Sequence[int], origin: str = "") -> tuple[Sizes, ...]:
    shapes = [graph.types[v].shape for graph, v in zip(samples.graphs, values, strict=True)]
    if len({len(shape) for shape in shapes}) > 1:
        raise refusal(samples, origin, "a value's number of axes depends on the size")
    return tuple(zip(*shapes, strict=True))


def _step(
    samples: Samples, maps: Sequence[dict[int, int]], i: int, primitive: Primitive, others: Sequence[Primitive | None]
) -> LockStep:
    graph = samples.largest
    origin = graph.origins[i] if graph.origins else ""
    found = [other for other in others if other is not None and len(other.inputs) == len(primitive.inputs)]
    if len(found) < len(others):
        raise refusal(samples, origin, "the model has other steps at some of the sizes")
    operands = [
        _operand(samples, maps, [other.inputs[k] for other in found], origin) for k in range(len(primitive.inputs))
    ]
    op = primitive.op
    ops = {other.op for other in found}
    if ops == {"mul", "div"}:
        op = "div"
        operands[1] = _as_divisor(operands[1], [other.op == "mul" for other in found])
    elif ops == {"slice", "take"}:  # a take of evenly spaced elements is a slice
        op = "take"
    elif len(ops) > 1:
        raise refusal(samples, origin, f"it computes {' or '.join(sorted(ops))}, depending on the size")
    attributes = _takes([other.attributes for other in found])
    nodes = {(a.op_type, a.node, a.output) for a in attributes if isinstance(a, OpaqueAttributes)}
    if len(nodes) > 1:
        raise refusal(samples, origin, "its attributes depend on the size")
    return LockStep(op, tuple(operands), attributes, primitive.output, origin)


def _takes(attributes: Sequence[Attributes]) -> tuple[Attributes, ...]:
    """Return slices as takes if other samples have takes, along the same axis."""
    axis = next((a.axis for a in attributes if isinstance(a, TakeAttributes)), None)
    return tuple(
        TakeAttributes(axis, tuple(a.start[axis] + a.step[axis] * i for i in range(a.size[axis])))
        if isinstance(a, SliceAttributes) and axis is not None
        else a
        for a in attributes
    )


def _operand(samples: Samples, maps: Sequence[dict[int, int]], values: Sequence[int], origin: str) -> LockOperand:
    constants = [graph.constants.get(v) for graph, v in zip(samples.graphs, values, strict=True)]
    known = tuple(constant for constant in constants if constant is not None)
    if len(known) == len(constants):
        return LockOperand(values[0], known)
    if known or any(found.get(values[0]) != v for found, v in zip(maps, values, strict=True)):
        raise refusal(samples, origin, "it reads other values at some of the sizes")
    return LockOperand(values[0])


def _as_divisor(operand: LockOperand, is_factor: Sequence[bool]) -> LockOperand:
    """Return an operand as a divisor; in graphs in which it is a factor (a power of 2), its reciprocal is used."""
    if not all(constant.is_uniform for constant in operand.constants):
        return operand  # the constants are not uniform, which is refused later
    constants = [
        Constant.of(_reciprocal(constant.array)) if turns else constant
        for constant, turns in zip(operand.constants, is_factor, strict=True)
    ]
    return LockOperand(operand.value, tuple(constants))


def _reciprocal(array: Array) -> Array:
    one = np.asarray(1 / array.reshape(-1)[0]).astype(array.dtype)
    return np.broadcast_to(one, array.shape)
