"""The allowed error of a computed tensor against its reference: one table, with its derivation.

With u the unit roundoff of the element type, a correctly rounded operation has an error of up to u times its
result, a library function (exp, erf, tanh, ...) of a few u, and a chain of k such steps of about k·u.
A sum of n terms, in any order, has an error of at most (n-1)·u·Σ|x|. Rounding errors behave as if they
were independent, so errors above about √n·u·Σ|x| do not occur in practice (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019). If terms of mean size Σ|x|/n cancel, the sum is of
size scale = Σ|x|/√n: relative to the *result*, the error is √n·u·√n in the worst case and √n·u on
average. 4·√n·u·scale covers only the average, so that a wrong term is still detected.

So a value may differ by `steps·u·|expected| + 4·√n·steps·u·scale`, where steps depends on the family.
"""

import math
from typing import Literal

import numpy as np

from korch.primitive.op import Array
from korch.primitive.types import UNIT_ROUNDOFF, DType

Family = Literal["move", "elementwise", "composite"]

# Roundings between input and output. "composite" is a whole operator or model: softmax,
# normalizations and activations are chains of five to ten steps, each worth a few u.
STEPS: dict[Family, int] = {"move": 0, "elementwise": 4, "composite": 32}


def tolerance(dtype: DType, family: Family, terms: int = 1) -> tuple[float, float]:
    """Return the error allowed relative to the value, and relative to the scale of the terms.

    Args:
        dtype: the element type of the computation.
        family: the kind of computation.
        terms: the number of terms that are added up for one element.
    """
    if not dtype.is_float:
        return 0.0, 0.0
    step = STEPS[family] * UNIT_ROUNDOFF[dtype]
    return step, 4 * math.sqrt(terms) * step if terms > 1 or family == "composite" else 0.0


def assert_same(
    actual: Array,
    expected: Array,
    *,
    family: Family = "composite",
    terms: int = 1,
    scale: float | None = None,
    dtype: DType | None = None,
    name: str = "",
) -> None:
    """Check a tensor against its reference: shape, type, NaN, infinities, then values.

    Args:
        actual: the computed tensor.
        expected: the reference; it may be float64 if `actual` is another float type.
        family: the kind of computation.
        terms: the number of terms that are added up for one element.
        scale: the size of the terms that are added (default: the largest finite element).
        dtype: the narrowest float type of the computation, if `actual` is wider.
        name: the name of the tensor in the message.

    Raises:
        AssertionError: they differ; the message says where.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    prefix = f"{name}: " if name else ""
    if actual.shape != expected.shape:
        raise AssertionError(f"{prefix}shape {actual.shape}, expected {expected.shape}")
    computed = dtype or DType.of(actual.dtype)
    reference = DType.of(expected.dtype)
    is_wider = reference is DType.F64 and DType.of(actual.dtype).is_float
    if DType.of(actual.dtype) is not reference and not is_wider:
        raise AssertionError(f"{prefix}elements {actual.dtype}, expected {expected.dtype}")
    if not reference.is_float:
        _refuse(actual != expected, actual, expected, prefix, "differs")
        return
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    if computed is not DType.F64:
        with np.errstate(over="ignore"):  # values out of the type's range become infinite
            e = e.astype(computed.numpy).astype(np.float64)
    _refuse(np.isnan(a) != np.isnan(e), a, e, prefix, "NaN on one side")
    infinite = np.isinf(e) | np.isinf(a)
    _refuse(infinite & (a != e) & ~np.isnan(e), a, e, prefix, "infinite on one side")
    finite = np.isfinite(e) & np.isfinite(a)
    size = scale if scale is not None else float(np.abs(e[finite]).max(initial=0.0))
    relative, absolute = tolerance(computed, family, terms)
    allowed = relative * np.abs(np.where(finite, e, 0.0)) + absolute * size
    error = np.abs(np.where(finite, a, 0.0) - np.where(finite, e, 0.0))
    _refuse(error > allowed, a, e, prefix, f"more than {relative:.1e} relative away")


def _refuse(wrong: Array, actual: Array, expected: Array, prefix: str, what: str) -> None:
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{prefix}{what} at {index}: {actual[index]!r}, expected {expected[index]!r} "
            f"({int(wrong.sum())} of {wrong.size} elements)"
        )
