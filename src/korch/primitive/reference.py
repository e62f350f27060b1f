"""The meaning of a primitive graph: an interpreter in NumPy.

It runs any graph, alternatives included: of each value it computes the first alternative whose
inputs can be computed, or all of them to compare. In float64 it stands for exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from korch.errors import InputError, InvalidGraphError
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.types import DType


def run(
    graph: PrimitiveGraph, inputs: Mapping[str, Array], *, exact: bool = True
) -> dict[str, Array]:
    """Compute the model's outputs.

    Args:
        graph: the graph.
        inputs: an array for each of its inputs, of the input's shape and type.
        exact: compute floats in float64, not in their own types.

    Returns:
        An array for each output; floats are float64 if `exact`.

    Raises:
        InputError: an input is missing, or has another shape.
        InvalidGraphError: an output can't be computed.
    """
    order = first_alternatives(graph)
    outputs = {value for _, value in graph.outputs}
    last = {value: i for i, primitive in enumerate(order) for value in primitive.inputs}
    values = _given(graph, inputs, exact, outputs)
    for i, primitive in enumerate(order):
        for value in primitive.inputs:
            if value not in values:  # a constant is widened when it is read
                values[value] = _constant(graph, value, exact)
        values[primitive.output] = apply(graph, primitive, values, exact=exact)
        for value in primitive.inputs:  # a large model's values don't fit in memory together
            if last[value] == i and value not in outputs:
                values.pop(value, None)
    return {name: values[value] for name, value in graph.outputs}


def compute_values(
    graph: PrimitiveGraph, inputs: Mapping[str, Array], *, exact: bool = True
) -> dict[int, Array]:
    """Compute every value that the outputs need, by the first alternative that can be."""
    values = _given(graph, inputs, exact, graph.constants)
    for primitive in first_alternatives(graph):
        values[primitive.output] = apply(graph, primitive, values, exact=exact)
    return values


def apply(
    graph: PrimitiveGraph, primitive: Primitive, values: Mapping[int, Array], *, exact: bool
) -> Array:
    """Compute one primitive from the values of its inputs."""
    result = primitive.row.reference([values[v] for v in primitive.inputs], primitive.attributes)
    type_ = graph.types[primitive.output]
    if result.shape != type_.shape:
        raise InvalidGraphError(f"{primitive.op} gave shape {result.shape}, not {type_}")
    if exact and type_.dtype.is_float:
        return result
    with np.errstate(all="ignore"):
        return result.astype(type_.dtype.numpy)


def first_alternatives(graph: PrimitiveGraph) -> list[Primitive]:
    """Return one primitive per value that the outputs need, in an order that can be run.

    Raises:
        InvalidGraphError: an output has no producer, or only cyclic ones.
    """
    rank: dict[int, Primitive] = {}
    known = set(graph.given)
    waiting = list(graph.primitives)
    order: list[Primitive] = []
    while waiting:
        rest = []
        for primitive in waiting:
            if primitive.output in known:
                continue
            if known.issuperset(primitive.inputs):
                known.add(primitive.output)
                rank[primitive.output] = primitive
                order.append(primitive)
            else:
                rest.append(primitive)
        if len(rest) == len(waiting):
            break
        waiting = rest
    for name, value in graph.outputs:
        if value not in known:
            raise InvalidGraphError(f"output {name!r} (%{value}) can't be computed")
    needed = {value for _, value in graph.outputs}
    for primitive in reversed(order):
        if primitive.output in needed:
            needed.update(primitive.inputs)
    return [primitive for primitive in order if primitive.output in needed]


def _given(
    graph: PrimitiveGraph, inputs: Mapping[str, Array], exact: bool, wanted: Iterable[int]
) -> dict[int, Array]:
    """Return the inputs, and those of the wanted values that are constants."""
    values: dict[int, Array] = {}
    for name, value in graph.inputs:
        if name not in inputs:
            raise InputError(f"input {name!r} is missing")
        if tuple(inputs[name].shape) != graph.types[value].shape:
            raise InputError(
                f"input {name!r} has shape {tuple(inputs[name].shape)}",
                expected=str(graph.types[value]),
            )
        values[value] = _widen(inputs[name], graph.types[value].dtype, exact)
    for value in wanted:
        if value in graph.constants:
            values[value] = _constant(graph, value, exact)
    return values


def _constant(graph: PrimitiveGraph, value: int, exact: bool) -> Array:
    return _widen(graph.constants[value].array, graph.types[value].dtype, exact)


def _widen(array: Array, dtype: DType, exact: bool) -> Array:
    return array.astype(np.float64 if exact and dtype.is_float else dtype.numpy)
