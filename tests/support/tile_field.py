"""Computes tile programs in the finite field of `tests.support.finite_field`.

Nothing is rounded in the field, and sums may be computed in any order. So two programs that compute the
same polynomials have equal results, and two programs that do not have different results for random
inputs, except with a small probability.
"""

from collections.abc import Sequence

import numpy as np

from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops import OPS
from korch.primitive.types import DType
from korch.tile.check.arithmetic import Typed
from korch.tile.ir.program import Buffer, Product
from tests.support.finite_field import PRIME, NotPolynomialError, apply, element


class Field(Typed):
    """Numbers are elements of the field; operations that are not defined in it raise `NotPolynomialError`."""

    def array_type(self, dtype: DType) -> np.dtype:
        """Return int64, the type of arrays of field elements."""
        return np.dtype(np.int64)

    def unknown(self, dtype: DType, count: int) -> Array:
        """Return the initial content of a tile that has not been written: random elements."""
        return np.random.default_rng(count).integers(0, PRIME, count)

    def literal(self, dtype: DType, value: float | int | bool) -> Array:
        """Return the field element of a number."""
        return element(np.asarray(value, np.float64))

    def apply(self, op: str, dtype: DType, arguments: Sequence[Array]) -> Array:
        """Return the result of an elementwise operation."""
        if op == "cast" and dtype.is_float:
            return np.asarray(arguments[0])
        primitive = Primitive(op, tuple(range(len(arguments))), OPS[op].attributes(), len(arguments))
        return apply(primitive, np.broadcast_arrays(*arguments))

    def collect(self, op: str, dtype: DType, values: Array, axes: tuple[int, ...], live: Array) -> Array:
        """Return the sums of the live values along axes, which keep extent 1."""
        if op != "sum":
            raise NotPolynomialError(op)
        return np.asarray(np.where(live, values, 0).sum(axis=axes, keepdims=True) % PRIME)

    def add(self, a: Array, b: Array) -> Array:
        """Return the sum in the field."""
        return np.asarray((a + b) % PRIME)

    def multiply(self, a: Array, b: Array) -> Array:
        """Return the product in the field."""
        return np.asarray(a * b % PRIME)

    def product(self, how: Product, a: Array, b: Array) -> Array:
        """Return the products that a contraction adds up."""
        return self.multiply(a, b)

    def stored(self, buffer: Buffer, value: Array) -> Array:
        """Return the value that is read after a value was written to a buffer: the same, because nothing is rounded."""
        return np.asarray(value)
