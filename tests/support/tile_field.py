"""Tile programs computed in the finite field of `tests.support.finite_field`.

Nothing is rounded there, and sums may be taken in any order: two programs that compute the same
polynomials have equal results, and two that do not have different ones for random inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops import OPS
from korch.primitive.types import DType
from korch.tile.arithmetic import Typed
from korch.tile.program import Buffer, Product
from tests.support.finite_field import PRIME, NotPolynomialError, apply, element


class Field(Typed):
    """Every number is an element of the field; what is no polynomial raises `NotPolynomialError`."""

    def array_type(self, dtype: DType) -> np.dtype:
        """Return the type of arrays that hold elements of a type."""
        return np.dtype(np.int64)

    def unknown(self, dtype: DType, count: int) -> Array:
        """Return what stands in a tile that nothing has been written to: random elements."""
        return np.random.default_rng(count).integers(0, PRIME, count)

    def literal(self, dtype: DType, value: float | int | bool) -> Array:
        """Return the element of a number."""
        return element(np.asarray(value, np.float64))

    def apply(self, op: str, dtype: DType, arguments: Sequence[Array]) -> Array:
        """Return the result of an elementwise operation."""
        if op == "cast" and dtype.is_float:
            return np.asarray(arguments[0])
        primitive = Primitive(op, tuple(range(len(arguments))), OPS[op].attributes(), len(arguments))
        return apply(primitive, np.broadcast_arrays(*arguments))

    def collect(self, op: str, dtype: DType, values: Array, axes: tuple[int, ...], live: Array) -> Array:
        """Return values added up along axes that remain with extent 1; only those alive count."""
        if op != "sum":
            raise NotPolynomialError(op)
        return np.asarray(np.where(live, values, 0).sum(axis=axes, keepdims=True) % PRIME)

    def add(self, a: Array, b: Array) -> Array:
        """Return a sum."""
        return np.asarray((a + b) % PRIME)

    def multiply(self, a: Array, b: Array) -> Array:
        """Return a product."""
        return np.asarray(a * b % PRIME)

    def product(self, how: Product, a: Array, b: Array) -> Array:
        """Return the products that a contraction adds up."""
        return self.multiply(a, b)

    def stored(self, buffer: Buffer, value: Array) -> Array:
        """Return what is read again of a value that is written to a buffer."""
        return np.asarray(value)
