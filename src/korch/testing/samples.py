"""Random arrays from a seeded generator for tests and checks: ordinary numbers, and special ones."""

from collections.abc import Sequence

import numpy as np

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.types import ValueType

# Values that kernels often handle wrongly: NaN must be propagated, masks use -inf, -0 and denormals are valid.
SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30)


def random_array(rng: np.random.Generator, type_: ValueType, specials: bool = False) -> Array:
    """Return an array of this type.

    Args:
        rng: the source of the elements.
        type_: its type. Floats have a normal distribution; integers are small, and also negative if signed.
        specials: replace about one float in eight by NaN, an infinity, a zero or an extreme value.
    """
    dtype, shape = type_.dtype, type_.shape
    if dtype.value == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if not dtype.is_float:
        low = 0 if dtype.value.startswith("u") else -4
        return rng.integers(low, 6, shape).astype(dtype.numpy)
    array = np.asarray(rng.standard_normal(shape))
    if specials:
        chosen = rng.choice(np.array(SPECIALS), shape)
        array = np.where(rng.random(shape) < 1 / 8, chosen, array)
    with np.errstate(all="ignore"):
        return array.astype(dtype.numpy)


def random_arrays(rng: np.random.Generator, types: Sequence[ValueType], specials: bool = False) -> list[Array]:
    """Return an array for each type."""
    return [random_array(rng, type_, specials) for type_ in types]


def random_inputs(graph: PrimitiveGraph, rng: np.random.Generator, specials: bool = False) -> dict[str, Array]:
    """Return an array for each input of a graph, by name."""
    return {name: random_array(rng, graph.types[v], specials) for name, v in graph.inputs}
