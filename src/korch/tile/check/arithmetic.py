"""The arithmetic that the interpreter of tile programs uses: the program's own types, or float64.

`superopt/field.py` and `tests/support/tile_field.py` add finite fields.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from korch.primitive.op import Array
from korch.primitive.ops import OPS
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.reduce import identity
from korch.primitive.types import DType
from korch.tile.ir.program import Buffer, Product, Split

COLLECT: Mapping[str, Callable[..., Array]] = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
"""The NumPy reduction of each accumulator."""


class Typed:
    """Arithmetic in which every operation rounds to the type that the program gives it."""

    def array_type(self, dtype: DType) -> np.dtype:
        """Return the type of arrays that hold elements of a type."""
        return dtype.numpy

    def unknown(self, dtype: DType, count: int) -> Array:
        """Return the initial contents of a tile that has not been written: NaN, or the largest number of its type."""
        fill = np.nan if dtype.is_float else identity("min", dtype)
        return np.full(count, fill, self.array_type(dtype))

    def literal(self, dtype: DType, value: float | int | bool) -> Array:
        """Return a number."""
        return np.asarray(value, self.array_type(dtype))

    def apply(self, op: str, dtype: DType, arguments: Sequence[Array]) -> Array:
        """Return the result of an elementwise operation."""
        attributes = OPS[op].attributes
        to = DType.of(self.array_type(dtype)).value
        made = CastAttributes(to) if attributes is CastAttributes else attributes()
        result = OPS[op].reference(np.broadcast_arrays(*arguments), made)
        return np.asarray(result).astype(self.array_type(dtype))

    def collect(self, op: str, dtype: DType, values: Array, axes: tuple[int, ...], live: Array) -> Array:
        """Return values reduced along axes, which remain with extent 1; only elements where `live` holds count."""
        start = np.asarray(identity(op, dtype), self.array_type(dtype))
        result = COLLECT[op](np.where(live, values, start), axis=axes, keepdims=True, initial=start)
        return np.asarray(result).astype(self.array_type(dtype))

    def add(self, a: Array, b: Array) -> Array:
        """Return a sum."""
        return np.asarray(a + b)

    def multiply(self, a: Array, b: Array) -> Array:
        """Return a product of elements of one type."""
        return np.asarray(a * b)

    def product(self, how: Product, a: Array, b: Array) -> Array:
        """Return the products that a contraction adds up, in the type of its accumulator."""
        kind = how.types[2].numpy
        exact = np.asarray(a.astype(kind) * b.astype(kind))
        if how is not Product.SPLIT:
            return exact
        (a0, a1, a2), (b0, b1, b2) = (_components(x, 3, DType.BF16) for x in (a, b))
        split = a2 * b0 + a0 * b2 + a1 * b1 + a1 * b0 + a0 * b1 + a0 * b0
        return np.where(np.isfinite(split), split, exact)  # numbers that can't be split are multiplied directly

    def stored(self, buffer: Buffer, value: Array) -> Array:
        """Return a value as it is read back after it was written to a buffer."""
        for layout in buffer.layout:
            if isinstance(layout, Split):
                total = np.sum(_components(value, layout.components, layout.dtype), axis=0).astype(value.dtype)
                value = np.where(np.isfinite(total), total, value)
        return value.astype(self.array_type(buffer.dtype))


class Float64(Typed):
    """Arithmetic in which all floats have 64 bits, whatever types the program uses."""

    def array_type(self, dtype: DType) -> np.dtype:
        """Return the type of arrays that hold elements of a type."""
        return np.dtype(np.float64) if dtype.is_float else dtype.numpy

    def product(self, how: Product, a: Array, b: Array) -> Array:
        """Return the products that a contraction adds up."""
        kind = self.array_type(how.types[2])
        return np.asarray(a.astype(kind) * b.astype(kind))

    def stored(self, buffer: Buffer, value: Array) -> Array:
        """Return a value as it is read back after it was written to a buffer."""
        return value.astype(self.array_type(buffer.dtype))


def _components(x: Array, count: int, dtype: DType) -> list[Array]:
    """Return `count` numbers that `dtype` represents exactly, in the type of x, whose sum approximates x."""
    found: list[Array] = []
    for _ in range(count):
        found.append(x.astype(dtype.numpy).astype(x.dtype))
        x = x - found[-1]
    return found
