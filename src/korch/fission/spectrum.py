"""Fission of DFT and STFT into matrix products by constant tables of roots of unity.

A transform of length n is one product by a table of n x n complex numbers or, if n = p q, q products by tables of
p x p and then p transforms of length q (Cooley and Tukey, 1965): with m = q a + b, k = c + p d and w_n = exp(-2πi/n),

    X[c + p d] = Σ_b w_q^(b d) · (Σ_a w_n^(b c) w_p^(a c) · x[q a + b]).

The factors w_n^(b c) are part of the q tables, as are a window and the factor 1/n of an inverse transform. A complex
number is a pair of adjacent elements, so that each table is a matrix of real numbers. Tables are computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueId

MOST_TABLE_ELEMENTS = 1 << 22
"""The largest table. A library's algorithm is better for longer transforms of prime lengths."""

ROWS = 16
"""The number of transforms for which factors are chosen. It is not the model's, so that all sizes of a range have the
same primitives."""

READ, MOVE = 16, 32
"""Costs in operations: of reading an element of a table, and of moving an element between two products."""

MOST_PARTS = 32
"""The most slices of a signal from which its frames are concatenated."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a transform of complex numbers."""

    length: int  # the number of terms
    kept: int  # how many of the results are computed, from the first on
    components: int  # 1 if the input is real, else 2
    parts: int  # 1 if only the real part of the result is computed, else 2
    sign: int  # the sign of the exponent

    def rest(self, radix: int) -> _Form:
        """Return the form of the transforms that follow the products by tables of radix x radix."""
        kept = -(-self.kept // radix)
        return replace(self, length=self.length // radix, kept=kept, components=2)


@lru_cache(maxsize=1024)
def _radix(form: _Form) -> tuple[float, int]:
    """Return the cost of a transform, and the first factor of its length, which is the length itself for one table."""
    n = form.length
    table = n * form.components * form.kept * form.parts
    found = (float(table * (2 * ROWS + READ)) if table <= MOST_TABLE_ELEMENTS else math.inf, n)
    for radix in range(2, n // 2 + 1):
        if n % radix == 0:
            table = n * form.components * 2 * radix
            rest = radix * ROWS * (_radix(form.rest(radix))[0] / ROWS)
            found = min(found, (table * (2 * ROWS + READ) + 2 * n * ROWS * MOVE + rest, radix))
    return found


def _real(table: Array, form: _Form, parts: int) -> Array:
    """Return complex tables [..., m, k] as real ones [..., m * components, k * parts] for pairs of elements."""
    rows = [np.stack([table.real, table.imag], -1)[..., :parts]]
    if form.components == 2:
        rows.append(np.stack([-table.imag, table.real], -1)[..., :parts])
    pairs = np.stack(rows, -3)  # m, component, k, part
    *lead, m, components, k, count = pairs.shape
    whole: Array = pairs.reshape(*lead, m * components, k * count)
    return whole


def _roots(products: Array, form: _Form) -> Array:
    """Return the roots of unity of the transform's length for these products of indices."""
    roots: Array = np.exp(form.sign * 2j * np.pi * (products % form.length) / form.length)
    return roots


def _transformed(c: Context, x: ValueId, form: _Form, weights: Array | float = 1.0) -> ValueId:
    """Transform rows [rows, length, components] to [rows, kept, parts]."""
    n, count, radix = form.length, c.shape(x)[0], _radix(form)[1]
    terms = np.broadcast_to(weights, n)
    dtype = c.dtype(x).numpy
    if radix == n:
        table = _roots(np.outer(np.arange(n), np.arange(form.kept)), form) * terms[:, None]
        matrix = c.constant(_real(table, form, form.parts).astype(dtype))
        product = c.add("matmul", c.reshape(x, (count, n * form.components)), matrix)
        return c.reshape(product, (count, form.kept, form.parts))
    rest = form.rest(radix)
    a, b, k = np.ogrid[:radix, : rest.length, :radix]
    m = rest.length * a + b
    table = (_roots(m * k, form) * terms.reshape(radix, -1, 1)).transpose(1, 0, 2)
    split = c.transpose(c.reshape(x, (count, radix, rest.length, form.components)), (2, 0, 1, 3))
    matrix = c.constant(_real(table, form, 2).astype(dtype))
    first = c.add("matmul", c.reshape(split, (rest.length, count, radix * form.components)), matrix)
    moved = c.transpose(c.reshape(first, (rest.length, count, radix, 2)), (1, 2, 0, 3))
    second = _transformed(c, c.reshape(moved, (count * radix, rest.length, 2)), rest)
    order = c.transpose(c.reshape(second, (count, radix, rest.kept, form.parts)), (0, 2, 1, 3))
    return c.slice_axis(c.reshape(order, (count, rest.kept * radix, form.parts)), 1, 0, form.kept)


def _spectra(c: Context, rows: ValueId, form: _Form, weights: Array | float) -> ValueId:
    """Transform rows as `_transformed` does, elements of 16 bits in float32."""
    if math.isinf(_radix(form)[0]):
        raise NotSplitError(
            f"a transform of length {form.length} takes a table of more than {MOST_TABLE_ELEMENTS} elements"
        )
    dtype = c.dtype(rows)
    wide = c.cast(rows, DType.F32) if dtype in (DType.F16, DType.BF16) else rows
    return c.cast(_transformed(c, wide, form, weights), dtype)


def _fitted(c: Context, x: ValueId, axis: int, size: int) -> ValueId:
    """Return the first `size` elements along an axis, with zeros where there are fewer."""
    given, zeros = c.shape(x)[axis], [0] * c.rank(x)
    if given >= size:
        return c.slice_axis(x, axis, 0, size)
    return c.pad(x, zeros, [size - given if i == axis else 0 for i in range(c.rank(x))])


def _hermitian(c: Context, x: ValueId, length: int) -> ValueId:
    """Return the whole spectrum of a real signal from its first half, [rows, length // 2 + 1, 2]."""
    count = (length - 1) // 2
    if count == 0:
        return x
    signs = c.constant(np.array([[1, -1]]).astype(c.dtype(x).numpy))
    return c.concat([x, c.elementwise("mul", c.slice_axis(x, 1, count, count, -1), signs)], 1)


def _dft(c: Context) -> Result:
    x, rank = c.input(0), c.rank(c.input(0))
    axes = (c.attributes.integer("axis", 1),) if c.version < 20 else c.ints(2) if c.is_given(2) else (-2,)
    if axes is None or (c.is_given(1) and c.array(1) is None):
        raise NotSplitError("the axis or the length is computed at run time")
    axis = axis_of(axes[0], rank)
    is_inverse, is_half = (bool(c.attributes.integer(name, 0)) for name in ("inverse", "onesided"))
    (length,) = c.ints(1) or (2 * (c.shape(x)[axis] - 1) if is_inverse and is_half else c.shape(x)[axis],)
    half = length // 2 + 1
    order = (*(i for i in range(rank - 1) if i != axis), axis, rank - 1)
    moved = c.transpose(_fitted(c, x, axis, half if is_inverse and is_half else length), order)
    *lead, size, components = c.shape(moved)
    rows = c.reshape(moved, (math.prod(lead), size, components))
    if is_inverse and is_half:
        rows = _hermitian(c, rows, length)
    kept, parts = (half if is_half and not is_inverse else length), (1 if is_half and is_inverse else 2)
    form = _Form(length, kept, components, parts, 1 if is_inverse else -1)
    result = _spectra(c, rows, form, 1 / length if is_inverse else 1.0)
    back = tuple(order.index(i) for i in range(rank))
    return c.transpose(c.reshape(result, (*lead, kept, parts)), back)


def _stft(c: Context) -> Result:
    steps, lengths, given = c.ints(1), c.ints(3), c.optional(2)
    x = c.reshape(c.input(0), (*c.shape(c.input(0)), 1)) if c.rank(c.input(0)) == 2 else c.input(0)
    if steps is None or (c.is_given(3) and lengths is None):
        raise NotSplitError("the step or the length of frames is computed at run time")
    (length,) = lengths or (c.shape(x)[1] if given is None else c.shape(given)[0],)
    batch, components, (count, kept) = c.shape(x)[0], c.shape(x)[2], c.output_type().shape[1:3]
    frames = _frames(c, x, steps[0], length, count)
    window = c.array(2)
    if given is not None and window is None:
        frames = c.elementwise("mul", frames, c.reshape(given, (length, 1)))
    rows = c.reshape(frames, (batch * count, length, components))
    weights = 1.0 if window is None else window.astype(np.float64)
    result = _spectra(c, rows, _Form(length, kept, components, 2, -1), weights)
    return c.reshape(result, (batch, count, kept, 2))


def _frames(c: Context, x: ValueId, step: int, length: int, count: int) -> ValueId:
    """Return `count` frames of a signal, [batch, count, length, components], which begin every `step` elements.

    The signal is cut into rows of `step` elements; a frame is a few rows, the last one in part.
    """
    parts = -(-length // step)
    if parts > MOST_PARTS:
        raise NotSplitError(f"a frame overlaps {parts} others, more than {MOST_PARTS}")
    batch, _, components = c.shape(x)
    total = count + parts - 1
    cut = c.reshape(_fitted(c, x, 1, total * step), (batch, total, step, components))
    rows = [c.slice_axis(cut, 1, i, count) for i in range(parts)]
    rows[-1] = c.slice_axis(rows[-1], 2, 0, length - (parts - 1) * step)
    return c.concat(rows, 2)


RULES: tuple[FissionRule, ...] = (FissionRule("DFT", _dft, 17), FissionRule("STFT", _stft, 17))
