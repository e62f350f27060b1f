"""Random inputs of a model, and the exact results for them."""

from __future__ import annotations

from collections.abc import Mapping

from korch.errors import UnprovidedError
from korch.numerics import Standard
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.report.peers.inputs import random_arrays


def standard_of(
    model: PrimitiveGraph, planned: PrimitiveGraph, options: Options, given: Mapping[str, Array] | None = None
) -> Standard:
    """Return the exact results for random inputs; a model whose reference fails on them is refused.

    Args:
        model: the model as given.
        planned: the graph that plans are for, with the same inputs and outputs.
        options: tolerance and seed; without a tolerance, the error budget (if any) is the tolerance.
        given: inputs that are not random, by name.

    Raises:
        UnprovidedError: the reference of an opaque operator fails on the inputs.
    """
    inputs = {**random_inputs(model, options.search.seed), **(given or {})}
    tolerance = options.tolerance if options.tolerance is not None else options.error or None
    try:
        return Standard(model, inputs, planned, tolerance, options.search.seed, precision=options.precision)
    except Exception as error:
        if not has_opaque(model):
            raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnprovidedError(f"the reference of an opaque operator fails on random inputs: {text[:200]}") from error


def has_opaque(graph: PrimitiveGraph) -> bool:
    """Return whether a graph has an opaque operator."""
    return any(p.row.category is Category.OPAQUE for p in graph.primitives)


def random_inputs(graph: PrimitiveGraph, seed: int) -> dict[str, Array]:
    """Return seeded random inputs: floats with a standard normal distribution, and integers 0 and 1."""
    types = {name: graph.types[value] for name, value in graph.inputs}
    return random_arrays({name: (type_.shape, type_.dtype.numpy) for name, type_ in types.items()}, seed)
