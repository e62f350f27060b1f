"""Times of a kernel at a few sizes -> its time as a rational function of the sizes, with its error at other sizes.

The functions are quotients of polynomials. KLARAPTOR (Brandt et al., 2019) fits such functions to a kernel's
performance counters; here they are fitted to its times. Kernels that compute rows in steps take the same time for all
sizes within a step, so the sizes may be rounded up first. Of a few forms, the one is chosen that predicts each
sample best from the other samples.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from korch.ranges.form import Sizes

Matrix = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Values = Matrix | float
Exponents = tuple[int, ...]

ROUNDS = 4
"""The number of iterations for fitting a quotient: each solves linear equations, weighted with the last denominator."""

STEPS = (1, 16, 32)
"""Sizes are rounded up to multiples of one of these, for vector lanes, and for the rows of a matrix unit's tile."""

RIDGE = 1e-9
"""A singular value below this fraction of the largest one counts as 0."""


@dataclass(frozen=True, slots=True)
class Term:
    """A product of powers of the sizes, with a coefficient."""

    exponents: Exponents
    coefficient: float

    def at(self, shares: Sequence[Values]) -> Values:
        """Return the term's value at a point, or at each of some points."""
        return self.coefficient * _power(self.exponents, shares)


@dataclass(frozen=True, slots=True)
class TimedSizes:
    """A time in nanoseconds, more than 0, for some sizes."""

    sizes: Sizes
    time_ns: float


@dataclass(frozen=True, slots=True)
class Cost:
    """A time in nanoseconds: a quotient of polynomials of the sizes, where each size is divided by the largest one."""

    scales: Sizes  # the largest size of each dimension
    above: tuple[Term, ...]  # the numerator's terms
    below: tuple[Term, ...] = ()  # the denominator's terms, besides the term 1
    error: float = 0.0  # the median of the relative errors of the samples, each predicted from the other samples
    samples: tuple[TimedSizes, ...] = ()  # the samples to which it was fitted
    step: int = 1  # sizes are rounded up to a multiple of it

    def at(self, sizes: Sequence[int]) -> float:
        """Return the time for some sizes, limited to between half of the least sample and twice the largest."""
        shares = [_share(size, self.step, scale) for size, scale in zip(sizes, self.scales, strict=True)]
        above, below = (sum(float(term.at(shares)) for term in terms) for terms in (self.above, self.below))
        found = above / (1.0 + below) if 1.0 + below > 0 else math.inf
        times = [sample.time_ns for sample in self.samples]
        return min(max(found, min(times) / 2), 2 * max(times)) if times else found

    def at_all(self, sizes: Sequence[Integers]) -> Matrix:
        """Return the times for many sizes; `sizes` has one array per dimension."""
        shares = [_share(size, self.step, scale) for size, scale in zip(sizes, self.scales, strict=True)]
        zero = np.zeros(np.shape(sizes[0]))
        below = sum((term.at(shares) for term in self.below), zero + 1.0)
        above = sum((term.at(shares) for term in self.above), zero)
        found = np.where(below > 0, above / np.where(below > 0, below, 1.0), math.inf)
        times = [sample.time_ns for sample in self.samples]
        return np.clip(found, min(times) / 2, 2 * max(times)) if times else found

    def __str__(self) -> str:
        names = [f"n{d}" for d in range(len(self.scales))] if len(self.scales) > 1 else ["n"]
        names = names if self.step == 1 else [f"ceil{self.step}({name})" for name in names]
        above = self._polynomial(self.above, names)
        return f"({above}) / (1 + {self._polynomial(self.below, names)})" if self.below else above

    def _polynomial(self, terms: Sequence[Term], names: Sequence[str]) -> str:
        parts = []
        for term in terms:
            scale = math.prod(scale**e for scale, e in zip(self.scales, term.exponents, strict=True))
            powers = [f"{n}^{e}" if e > 1 else n for n, e in zip(names, term.exponents, strict=True) if e]
            parts.append("*".join([f"{term.coefficient / scale:.4g}", *powers]))
        return " + ".join(parts)


def fit(samples: Sequence[TimedSizes]) -> Cost:
    """Return the function that fits times at some sizes.

    `samples`: at least one; their sizes must differ.
    """
    scales = _scales(samples)
    best: Cost | None = None
    for step, (above, below) in itertools.product(STEPS, _forms(len(scales))):
        if best is not None and (len(above) + len(below) >= len(samples) or (not any(above[-1]) and step > 1)):
            continue
        form = _Form(step, above, below)
        others = (_fitted(_without(samples, i), scales, form) for i in range(len(samples)))
        errors = [abs(other.at(own.sizes) / own.time_ns - 1) for other, own in zip(others, samples, strict=True)]
        found = replace(_fitted(samples, scales, form), error=float(np.median(errors)))
        if best is None or found.error < best.error:
            best = found
    if best is None:
        raise ValueError("there is no form")
    return best


def _scales(samples: Sequence[TimedSizes]) -> Sizes:
    return tuple(max(1, *(sample.sizes[d] for sample in samples)) for d in range(len(samples[0].sizes)))


def _without(samples: Sequence[TimedSizes], i: int) -> Sequence[TimedSizes]:
    return samples if len(samples) == 1 else [*samples[:i], *samples[i + 1 :]]


def _forms(rank: int) -> list[tuple[tuple[Exponents, ...], tuple[Exponents, ...]]]:
    """Return the terms of (numerator, denominator) of each form, the simplest form first."""
    exponents = list(itertools.product(range(3), repeat=rank))
    zero, linear, square = (tuple(e for e in exponents if sum(e) == degree) for degree in range(3))
    return [(zero, ()), (zero + linear, ()), (zero + linear + square, ()), (zero + linear + square, linear)]


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a quotient: the step to which sizes are rounded up, and the terms."""

    step: int
    above: tuple[Exponents, ...]
    below: tuple[Exponents, ...]


def _fitted(samples: Sequence[TimedSizes], scales: Sizes, form: _Form) -> Cost:
    """Return the quotient of a given form with the least sum of squared relative errors."""
    times = np.array([sample.time_ns for sample in samples])
    over, under = (
        _powers(terms, tuple(s.sizes for s in samples), scales, form.step) for terms in (form.above, form.below)
    )
    weights = 1 / times
    coefficients = np.zeros(len(form.above) + len(form.below))
    for _ in range(ROUNDS if form.below else 1):
        rows = np.hstack([over, -under * times[:, None]]) * weights[:, None]
        coefficients = _solved(rows, times * weights)
        denominators = 1 + under @ coefficients[len(form.above) :]
        if not (denominators > RIDGE).all():
            return _fitted(samples, scales, replace(form, below=()))
        weights = 1 / (times * denominators)
    pairs = [float(c) for c in coefficients]
    above = tuple(map(Term, form.above, pairs[: len(form.above)]))
    below = tuple(map(Term, form.below, pairs[len(form.above) :]))
    return Cost(scales, above, below, samples=tuple(samples), step=form.step)


@lru_cache(1024)
def _powers(terms: tuple[Exponents, ...], points: tuple[Sizes, ...], scales: Sizes, step: int) -> Matrix:
    """Return the values of terms (columns) at some sizes (rows), which all kernels of a plan are timed at."""
    shares = [_share(column, step, scale) for column, scale in zip(np.array(points).T, scales, strict=True)]
    return np.array([_power(e, shares) * np.ones(len(points)) for e in terms]).reshape(len(terms), len(points)).T


def _share(sizes: Integers | int, step: int, scale: int) -> Values:
    """Return sizes, rounded up, as fractions of the largest one."""
    return -(-sizes // step) * step / scale


def _solved(rows: Matrix, wanted: Matrix) -> Matrix:
    """Return the least-squares solution; terms that the samples can't distinguish get small coefficients."""
    sizes = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(np.float64).tiny)
    return np.asarray(np.linalg.lstsq(rows / sizes, wanted, rcond=RIDGE)[0] / sizes, np.float64)


def _power(exponents: Exponents, shares: Sequence[Values]) -> Values:
    found: Values = 1.0
    for share, exponent in zip(shares, exponents, strict=True):
        found = found * share**exponent
    return found
