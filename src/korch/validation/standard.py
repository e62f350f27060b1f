"""Inputs on which plans are compared with the model, and the exact results for them."""

from collections.abc import Mapping

import numpy as np

from korch.errors import UnprovidedError, excerpt
from korch.inputs import Tensors, given_arrays, random_arrays
from korch.numerics import Standard
from korch.options import Options
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.system.memory import available_bytes

GIVE_INPUTS = "Give inputs that the model is made for with --inputs FILE.npz (inputs= in Python)"

SMALLEST = -20
"""The power of two to which random inputs are scaled down at most."""


def standard_of(
    model: PrimitiveGraph, planned: PrimitiveGraph, options: Options, given: Mapping[str, Array] | None = None
) -> Standard:
    """Return the exact results for the user's inputs or random ones; a model whose reference fails on them is refused.

    Random inputs are scaled down if that makes more elements of the model's own outputs finite.

    Args:
        model: the model as given.
        planned: the graph that plans are for, with the same inputs and outputs.
        options: inputs, tolerance and seed; without a tolerance, the error budget (if any) is the tolerance.
        given: inputs that are not random, by name, unless the user gives some.

    Raises:
        OptionError: the user's inputs do not fit the model.
        MemoryError: the outputs do not fit into the memory that is left.
        UnprovidedError: the reference of an opaque operator fails on the inputs.
    """
    check_memory(model)
    seed = options.search.seed
    if options.inputs is not None:
        inputs = given_arrays(options.inputs, _tensors(model))
    else:
        inputs = {**random_inputs(model, seed), **(given or {})}
    try:
        standard = Standard(model, inputs, planned, options.allowed_error, seed, precision=options.precision)
        if options.inputs is None and not given and standard.overflows:
            inputs = _scaled(inputs, _scale(model, inputs))
            standard = Standard(model, inputs, planned, options.allowed_error, seed, precision=options.precision)
        return standard
    except Exception as error:
        if isinstance(error, MemoryError) or not has_opaque(model):
            raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kind, hint = ("the given", "") if options.inputs is not None else ("random", GIVE_INPUTS)
        raise UnprovidedError(
            f"the reference of an opaque operator fails on {kind} inputs: {excerpt(text)}", hint=hint
        ) from error


def check_memory(model: PrimitiveGraph) -> None:
    """Refuse outputs that do not fit into memory: the system would end the process, or swap for minutes.

    Raises:
        MemoryError: in float64, in the model's own types, as a mask, and as a difference, they need more than is left.
    """
    types = [model.types[value] for _, value in model.outputs]
    needed = sum((8 + type_.dtype.size_bytes + 1) * type_.size for type_ in types)
    needed += 8 * max((type_.size for type_ in types), default=0)
    left = available_bytes()
    if left is not None and needed > left:
        raise MemoryError(f"outputs need {needed / 1e9:.1f} GB in several types, and {left / 1e9:.1f} GB are left")


def _scale(model: PrimitiveGraph, inputs: Mapping[str, Array]) -> float:
    """Return a power of two that makes as many elements of the outputs finite as the smallest one does.

    It is a quarter of the largest such power, so that plans do not overflow if they compute in another order.
    """

    def infinite(power: int) -> int:
        found = reference.run(model, _scaled(inputs, 2.0**power), exact=False)
        return sum(int((~np.isfinite(array)).sum()) for array in found.values() if array.dtype.kind not in "iub")

    least = infinite(SMALLEST)
    low, high = SMALLEST, 0  # the outputs have more infinite elements at `high`, unless no scale helps
    if infinite(high) <= least:
        return 1.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if infinite(middle) <= least else (low, middle)
    return 2.0 ** max(low - 2, SMALLEST)


def _scaled(inputs: Mapping[str, Array], scale: float) -> dict[str, Array]:
    """Return inputs with scaled floats; integers are indices."""
    return {
        name: array if array.dtype.kind in "iub" else (array * scale).astype(array.dtype)
        for name, array in inputs.items()
    }


def has_opaque(graph: PrimitiveGraph) -> bool:
    """Return whether a graph has an opaque operator."""
    return any(p.row.category is Category.OPAQUE for p in graph.primitives)


def random_inputs(graph: PrimitiveGraph, seed: int) -> dict[str, Array]:
    """Return seeded random inputs: floats with a standard normal distribution, and integers 0 and 1."""
    return random_arrays(_tensors(graph), seed)


def _tensors(graph: PrimitiveGraph) -> Tensors:
    types = {name: graph.types[value] for name, value in graph.inputs}
    return {name: (type_.shape, type_.dtype.numpy) for name, type_ in types.items()}
