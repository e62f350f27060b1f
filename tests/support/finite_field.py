"""Computes graphs in the field of integers modulo the prime 2^31 - 1.

A rule on polynomials is an identity of polynomials in the elements of the inputs. In this field nothing
is rounded, so random elements show with high probability whether the two sides differ. By Schwartz
and Zippel (JACM 1980) different polynomials of degree d agree at a random point with a probability of at
most d / (2^31 - 1) per element; a graph of n linear primitives has d <= n + 1.
Functions that are not polynomials (exp, sigmoid) are replaced by uninterpreted functions: equal
arguments give equal results, and no other property is assumed. Primitives that compare elements (max)
are not computed.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops import OPS
from korch.primitive.ops.winograd import TRANSFORMS, tile_counts

PRIME = 2**31 - 1

FRACTION_BITS = 10
"""The number of fraction bits of the binary fractions that are converted to elements of the field."""

ROUNDING = 1e-6
"""Constants this close to an integer are rounded to it, because rules compute constants in float64."""


class NotPolynomialError(Exception):
    """A primitive or constant is not defined in the field."""


def random_elements(graph: PrimitiveGraph, rng: np.random.Generator) -> dict[str, Array]:
    """Return a random element of the field for each element of each input: int64 arrays."""
    return {name: rng.integers(0, PRIME, graph.types[v].shape) for name, v in graph.inputs}


def alternatives_agree(graph: PrimitiveGraph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Compute all primitives; return the outputs.

    Raises:
        AssertionError: two alternatives of a value differ.
        NotPolynomialError: a primitive is not defined in the field.
    """
    values: dict[int, Array] = {v: inputs[name] % PRIME for name, v in graph.inputs}
    values |= {v: element(c.array) for v, c in graph.constants.items()}
    waiting = list(graph.primitives)
    while waiting:
        ready = [p for p in waiting if all(v in values for v in p.inputs)]
        assert ready, "primitives that nothing can compute"
        for primitive in ready:
            result = apply(primitive, [values[v] for v in primitive.inputs])
            known = values.setdefault(primitive.output, result)
            assert np.array_equal(known, result), f"an alternative differs: {primitive}"
        waiting = [p for p in waiting if p not in ready]
    return {name: values[v] for name, v in graph.outputs}


def apply(primitive: Primitive, inputs: Sequence[Array]) -> Array:
    """Compute one primitive.

    Args:
        primitive: the primitive.
        inputs: int64 arrays of elements in 0..PRIME-1.

    Raises:
        NotPolynomialError: the primitive is not defined in the field.
    """
    attributes: Any = primitive.attributes
    own = _OPS.get(primitive.op)
    if own is not None:
        return np.asarray(own(inputs, attributes) % PRIME)
    category = primitive.row.category
    if category in (Category.LAYOUT, Category.BROADCAST) or primitive.op in _ON_INTEGERS:
        return np.asarray(primitive.row.reference(inputs, attributes)).astype(np.int64) % PRIME
    if category is Category.ELEMENTWISE and len(inputs) == 1 and primitive.op != "cast":
        return _unknown(primitive.op, inputs[0])
    raise NotPolynomialError(primitive.op)


def element(array: Array) -> Array:
    """Return the field elements of numbers, which must be integers or binary fractions.

    Raises:
        NotPolynomialError: a number is neither.
    """
    scaled = np.ldexp(array.astype(np.float64), FRACTION_BITS)
    if np.isfinite(scaled).all() and np.array_equal(scaled, np.rint(scaled)):
        factor = _inverse(np.array(1 << FRACTION_BITS))
        return np.asarray(np.rint(scaled) % PRIME).astype(np.int64) * factor % PRIME
    rounded = np.rint(array)
    if not np.isfinite(rounded).all() or (np.abs(array - rounded) > ROUNDING).any():
        raise NotPolynomialError("a constant is no whole number or binary fraction")
    return np.asarray(rounded.astype(np.int64) % PRIME)


def _unknown(name: str, x: Array) -> Array:
    """Return a pseudorandom function of the elements, which depends on its name."""
    state = x.astype(np.uint64) + np.uint64(zlib.crc32(name.encode()) << 31)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return ((state ^ (state >> np.uint64(31))) % np.uint64(PRIME)).astype(np.int64)


def _product(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """Return a result that is linear in both operands: products of 31 by 16 bits, of which 2^15 fit in a sum."""
    high, low = (multiply(part, b) % PRIME for part in (a >> 16, a & 0xFFFF))
    return np.asarray(high * (1 << 16) + low)


def _inverse(x: Array) -> Array:
    if (x == 0).any():
        raise NotPolynomialError("a division by zero")
    result, power, exponent = np.ones_like(x), x, PRIME - 2
    while exponent:
        if exponent & 1:
            result = result * power % PRIME
        power, exponent = power * power % PRIME, exponent >> 1
    return result


def _winograd(inputs: Sequence[Array], a: Any) -> Array:
    x, u = inputs
    m, (top, left), (bottom, right) = a.tile, a.pads_begin, a.pads_end
    height, width = x.shape[2] + top + bottom - 2, x.shape[3] + left + right - 2
    down, across = tile_counts((0, 0, height, width), m)
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom + down * m - height), (left, right + across * m - width)))
    data, output = (t.astype(np.int64) for t in (TRANSFORMS[m].data, TRANSFORMS[m].output))
    image = np.zeros((x.shape[0], u.shape[3], down * m, across * m), np.int64)
    for i, j in itertools.product(range(down), range(across)):
        tile = padded[:, :, i * m : i * m + m + 2, j * m : j * m + m + 2]
        # The entries of the transforms are small, so sums of six products stay below 2^40.
        v = (data @ tile % PRIME @ data.T) % PRIME
        parts = _product(np.matmul, u.transpose(0, 1, 3, 2), v.transpose(2, 3, 1, 0)) % PRIME
        y = (output @ parts.transpose(3, 2, 0, 1) % PRIME @ output.T) % PRIME
        image[:, :, i * m : (i + 1) * m, j * m : (j + 1) * m] = y
    return image[:, :, :height, :width]


_ON_INTEGERS = ("add", "sub", "mul", "neg", "pool_sum", "reduce_sum")
"""Operations that do not overflow on the elements as integers of 64 bits."""

_OPS: Mapping[str, Callable[[Sequence[Array], Any], Array]] = {
    "div": lambda v, a: v[0] * _inverse(v[1]),
    "matmul": lambda v, a: _product(np.matmul, *v),
    "conv": lambda v, a: _product(lambda x, w: OPS["conv"].reference([x, w], a), *v),
    "winograd": _winograd,
}
