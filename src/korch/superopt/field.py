"""Arithmetic in two finite fields at once, for tile programs and graphs with exponentials.

A real number is a pair of its residues modulo p and q, primes with p = 2q + 1. The residues are
independent, as if the number were unknown. Sums, products and quotients are those of both fields.
An element w of order q modulo p gives exp(x) = w^x mod p, with the x of the second field: the law
exp(x + y) = exp(x) exp(y) holds. What exp(x) is modulo q is undefined.

- A square root is x^((p+1)/4), since p and q are 3 modulo 4: it is multiplicative, and its square is
  x or -x, like the absolute value, x^((p+1)/2).
- max, min and comparisons use an order that is given by a hash of the residues. They obey the laws of
  every order, but no law that connects the order with sums or products. So some equal programs are
  refused, but no program that differs in a branch is accepted. With the same inputs, an order and its
  reverse take both sides of each comparison.
- All other functions, and exp of a value that is undefined modulo q, are hashes: equal arguments give
  equal results.

A pair is stored as a complex number. NaN marks an undefined value: a quotient by zero, or an element that
was never written. The real part -inf or inf is the initial value of a maximum or minimum.

Source: Mirage (Wu et al., OSDI 2025), section 5, where p is 227 and q is 113.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.tile.check.arithmetic import Typed
from korch.tile.ir.program import Buffer, Product

Q = 33_553_991
P = 2 * Q + 1
"""The largest pair below 2^26 with q = 3 modulo 4: products are exact in float64."""


LOWEST = -3.4028234663852886e38
"""The least float32. A maximum that begins with it is the same as one that begins with -inf."""


class NotProvableError(Exception):
    """An operation has no meaning in the fields."""


class PairField(Typed):
    """Floats are pairs of residues; integers and truth values are themselves."""

    def __init__(self, seed: int = 0, is_reversed: bool = False) -> None:
        """Choose the base of exponentials, and the hashes; `is_reversed` reverses the order that the seed gives."""
        self.is_reversed = is_reversed
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        root = int(self.rng.integers(2, P - 1))
        self.base = root * root % P  # a square that is not 1 has order q

    def random(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return random elements of an input."""
        if not dtype.is_float:
            return self.rng.integers(0, 2, shape).astype(dtype.numpy)
        return _pair(self.rng.integers(0, P, shape).astype(float), self.rng.integers(0, Q, shape).astype(float))

    def array_type(self, dtype: DType) -> np.dtype:
        """Return the type of arrays that hold elements of a type."""
        return np.dtype(np.complex128) if dtype.is_float else dtype.numpy

    def unknown(self, dtype: DType, count: int) -> Array:
        """Return the content of a tile that nothing has been written to."""
        return np.full(count, complex(np.nan, np.nan)) if dtype.is_float else super().unknown(dtype, count)

    def literal(self, dtype: DType, value: float | int | bool) -> Array:
        """Return the element of a number, which is converted as a fraction."""
        if not dtype.is_float:
            return super().literal(dtype, value)
        if value == LOWEST:
            value = -np.inf
        if not np.isfinite(value):
            return np.asarray(complex(value, np.nan))
        above, below = float(value).as_integer_ratio()
        return np.asarray(complex(*(above * pow(below, -1, prime) % prime for prime in (P, Q))))

    def apply(self, op: str, dtype: DType, arguments: Sequence[Array]) -> Array:
        """Return the result of an elementwise operation."""
        with np.errstate(all="ignore"):
            if op == "where":
                return np.where(*arguments)
            is_pair = [np.iscomplexobj(argument) for argument in arguments]
            if op == "cast":
                return self._cast(dtype, arguments[0])
            if not any(is_pair):
                return super().apply(op, dtype, arguments)
            own = _FUNCTIONS.get(op)
            if own is not None:
                return np.asarray(own(self, *arguments))
            if dtype.is_float:
                return self._hashed(op, *arguments)
            raise NotProvableError(op)

    def collect(self, op: str, dtype: DType, values: Array, axes: tuple[int, ...], live: Array) -> Array:
        """Return values reduced along axes, which remain with extent 1; only live values count."""
        if not dtype.is_float:
            return super().collect(op, dtype, values, axes, live)
        start = {"sum": 0, "prod": 1, "max": complex(-np.inf, np.nan), "min": complex(np.inf, np.nan)}[op]
        values = np.where(live, values, np.asarray(start, np.complex128))
        with np.errstate(all="ignore"):
            if op == "sum":
                return _reduced(np.sum(values, axis=axes, keepdims=True))
            for axis in axes:
                values = self._folded(op, values, axis, start)
        return values

    def add(self, a: Array, b: Array) -> Array:
        """Return a sum."""
        total = _reduced(a + b)
        infinite = np.isinf(a.real) | np.isinf(b.real)
        return np.where(infinite, _pair(a.real + b.real, np.nan), total) if infinite.any() else total

    def multiply(self, a: Array, b: Array) -> Array:
        """Return a product."""
        return _pair(np.fmod(a.real * b.real, P), np.fmod(a.imag * b.imag, Q))

    def product(self, how: Product, a: Array, b: Array) -> Array:
        """Return the products that a contraction adds up."""
        return self.multiply(a, b) if how.types[2].is_float else super().product(how, a, b)

    def stored(self, buffer: Buffer, value: Array) -> Array:
        """Return the value that is read back after a value is written to a buffer."""
        return np.asarray(value)

    def inverse(self, a: Array) -> Array:
        """Return the reciprocal, undefined for 0."""
        found = _pair(_power(a.real, P - 2, P), _power(a.imag, Q - 2, Q))
        return _pair(np.where(a.real == 0, np.nan, found.real), np.where(a.imag == 0, np.nan, found.imag))

    def exp(self, a: Array) -> Array:
        """Return the exponential, undefined modulo q."""
        known = ~np.isnan(a.imag)
        exponent, factor = np.where(known, a.imag, 0).astype(np.int64), self.base
        result = np.ones(np.shape(exponent))
        while exponent.any():
            result = np.where(exponent & 1, np.fmod(result * factor, P), result)
            factor, exponent = factor * factor % P, exponent >> 1
        if not known.all():
            result = np.where(known, result, self._hashed("exp", a).real)
            result = np.where(np.isneginf(a.real), 0.0, result)
        return _pair(result, np.nan)

    def larger(self, a: Array, b: Array, sign: float = 1) -> Array:
        """Return the larger of two elements in the order of hashes."""
        x, y = (sign * self._rank(value) for value in (a, b))
        found = np.where(x >= y, a, b)
        return np.where(np.isnan(x) | np.isnan(y), complex(np.nan, np.nan), found)

    def _rank(self, a: Array) -> Array:
        hashed = self._hashed("order", a).real
        hashed = P - hashed if self.is_reversed else hashed
        return np.where(np.isinf(a.real), a.real, hashed)

    def _folded(self, op: str, values: Array, axis: int, start: complex) -> Array:
        shape = tuple(1 if i == axis else n for i, n in enumerate(values.shape))
        result = np.full(shape, start, np.complex128)
        for i in range(values.shape[axis]):
            each = np.take(values, [i], axis)
            result = (
                self.multiply(result, each) if op == "prod" else self.larger(result, each, 1 if op == "max" else -1)
            )
        return result

    def _cast(self, dtype: DType, x: Array) -> Array:
        if np.iscomplexobj(x):
            if dtype.is_float:
                return x
            raise NotProvableError(f"a cast to {dtype.value}")
        if not dtype.is_float:
            return super().apply("cast", dtype, [x])
        whole = x.astype(np.int64)
        return _pair((whole % P).astype(float), (whole % Q).astype(float))

    def _hashed(self, op: str, *arguments: Array) -> Array:
        """Return pseudorandom numbers that depend only on the residues modulo p."""
        state: Array = np.asarray((zlib.crc32(op.encode()) << 16) + self.seed, np.uint64)
        is_undefined = np.zeros((), bool)
        for x in arguments:
            is_undefined = is_undefined | ~np.isfinite(x.real)
            state = _mixed(
                state * np.uint64(0x9E3779B97F4A7C15) + np.nan_to_num(x.real, posinf=0, neginf=0).astype(np.uint64)
            )
        found = _pair((state % np.uint64(P)).astype(float), (_mixed(state) % np.uint64(Q)).astype(float))
        return np.where(is_undefined, complex(np.nan, np.nan), found)


def _pair(p: Array | float, q: Array | float) -> Array:
    result = np.empty(np.broadcast_shapes(np.shape(p), np.shape(q)), np.complex128)
    result.real, result.imag = p, q
    return result


def _reduced(a: Array) -> Array:
    return _pair(np.fmod(a.real, P), np.fmod(a.imag, Q))


def _mixed(state: Array) -> Array:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(state ^ (state >> np.uint64(31)))


def _power(x: Array, exponent: int, prime: int) -> Array:
    result, power = np.ones_like(x), x
    while exponent:
        if exponent & 1:
            result = np.fmod(result * power, prime)
        power, exponent = np.fmod(power * power, prime), exponent >> 1
    return np.where(np.isnan(x), np.nan, result)


def _powers(a: Array, of_p: int, of_q: int) -> Array:
    return _pair(_power(a.real, of_p, P), _power(a.imag, of_q, Q))


def _negative(field: PairField, a: Array) -> Array:
    return np.where(np.isinf(a.real), -a, _reduced(complex(P, Q) - a))


def _subtract(field: PairField, a: Array, b: Array) -> Array:
    return field.add(a, _negative(field, b))


def _sigmoid(field: PairField, a: Array) -> Array:
    return field.inverse(field.add(np.asarray(1 + 1j), field.exp(_negative(field, a))))


def _tanh(field: PairField, a: Array) -> Array:
    one, power = np.asarray(1 + 1j), field.exp(field.add(a, a))
    return field.multiply(_subtract(field, power, one), field.inverse(field.add(power, one)))


def _pow(field: PairField, a: Array, b: Array) -> Array:
    first = complex(b.reshape(-1)[0]) if b.size else 0j
    if first.real == first.imag and first.real <= 8 and (b == first).all():
        return _powers(a, int(first.real), int(first.real))
    return field._hashed("pow", a, b)


_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "add": PairField.add,
    "sub": _subtract,
    "mul": PairField.multiply,
    "div": lambda field, a, b: field.multiply(a, field.inverse(b)),
    "neg": _negative,
    "reciprocal": PairField.inverse,
    "exp": PairField.exp,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "sqrt": lambda field, a: _powers(a, (P + 1) // 4, (Q + 1) // 4),
    "abs": lambda field, a: _powers(a, (P + 1) // 2, (Q + 1) // 2),
    "sign": lambda field, a: _powers(a, (P - 1) // 2, (Q - 1) // 2),
    "pow": _pow,
    "max": PairField.larger,
    "min": lambda field, a, b: field.larger(a, b, -1),
    "equal": lambda field, a, b: a.real == b.real,
    "less": lambda field, a, b: field._rank(a) < field._rank(b),
    "less_equal": lambda field, a, b: field._rank(a) <= field._rank(b),
    "isnan": lambda field, a: np.isnan(a.real),
    "isinf": lambda field, a: np.isinf(a.real),
}
