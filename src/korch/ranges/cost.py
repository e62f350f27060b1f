"""Times of a kernel at a few sizes -> its time as a rational function of the sizes, with its error at other sizes.

The functions are quotients of polynomials, as KLARAPTOR fits them to a kernel's performance counters (Brandt et al.,
2019), here to its times. Of a few forms the one counts that predicts each sample best from the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from korch.ranges.form import Sizes

Matrix = npt.NDArray[np.float64]
Exponents = tuple[int, ...]

ROUNDS = 4
"""A quotient is fitted by linear equations, each time weighted with the last denominator."""

RIDGE = 1e-9
"""A smaller singular value, in parts of the largest, counts as 0."""


@dataclass(frozen=True, slots=True)
class Term:
    """A product of powers of the sizes, with a coefficient."""

    exponents: Exponents
    coefficient: float

    def at(self, shares: Sequence[float]) -> float:
        """Return its value."""
        return self.coefficient * _power(self.exponents, shares)


@dataclass(frozen=True, slots=True)
class Sample:
    """A time in nanoseconds, more than 0, for some sizes."""

    sizes: Sizes
    time_ns: float


@dataclass(frozen=True, slots=True)
class Cost:
    """A time in nanoseconds: a quotient of polynomials of the sizes, each divided by its largest.

    Attributes:
        scales: the largest size of each dimension.
        above: the numerator's terms.
        below: those of the denominator, besides the term 1.
        error: the median of the relative errors at each sample, predicted from the others.
        samples: what it was fitted to.
    """

    scales: Sizes
    above: tuple[Term, ...]
    below: tuple[Term, ...] = ()
    error: float = 0.0
    samples: tuple[Sample, ...] = ()

    def at(self, sizes: Sequence[int]) -> float:
        """Return the time for some sizes, not below half of the least sample or above twice the largest."""
        shares = [size / scale for size, scale in zip(sizes, self.scales, strict=True)]
        below = 1.0 + sum(term.at(shares) for term in self.below)
        found = sum(term.at(shares) for term in self.above) / below if below > 0 else math.inf
        times = [sample.time_ns for sample in self.samples]
        return min(max(found, min(times) / 2), 2 * max(times)) if times else found

    def __str__(self) -> str:
        names = [f"n{d}" for d in range(len(self.scales))] if len(self.scales) > 1 else ["n"]
        above = self._polynomial(self.above, names)
        return f"({above}) / (1 + {self._polynomial(self.below, names)})" if self.below else above

    def _polynomial(self, terms: Sequence[Term], names: Sequence[str]) -> str:
        parts = []
        for term in terms:
            scale = _power(term.exponents, self.scales)
            powers = [f"{n}^{e}" if e > 1 else n for n, e in zip(names, term.exponents, strict=True) if e]
            parts.append("*".join([f"{term.coefficient / scale:.4g}", *powers]))
        return " + ".join(parts)


def fit(samples: Sequence[Sample]) -> Cost:
    """Return the function that fits times at some sizes.

    Args:
        samples: at least one, of different sizes.
    """
    scales = tuple(max(1, *(sample.sizes[d] for sample in samples)) for d in range(len(samples[0].sizes)))
    best: Cost | None = None
    for above, below in _forms(len(scales)):
        if len(above) + len(below) >= len(samples) and best is not None:
            continue
        found = _fitted(samples, scales, above, below)
        others = (_fitted(_without(samples, i), scales, above, below) for i in range(len(samples)))
        errors = [abs(other.at(own.sizes) / own.time_ns - 1) for other, own in zip(others, samples, strict=True)]
        found = Cost(scales, found.above, found.below, float(np.median(errors)), tuple(samples))
        if best is None or found.error < best.error:
            best = found
    if best is None:
        raise ValueError("there is no form")
    return best


def _without(samples: Sequence[Sample], i: int) -> Sequence[Sample]:
    return samples if len(samples) == 1 else [*samples[:i], *samples[i + 1 :]]


def _forms(rank: int) -> list[tuple[list[Exponents], list[Exponents]]]:
    """Return the terms of numerators and denominators, the simplest form first."""
    by_degree = [[e for e in itertools.product(range(3), repeat=rank) if sum(e) == degree] for degree in range(3)]
    zero, linear, square = by_degree
    return [(zero, []), (zero + linear, []), (zero + linear + square, []), (zero + linear + square, linear)]


def _fitted(samples: Sequence[Sample], scales: Sizes, above: Sequence[Exponents], below: Sequence[Exponents]) -> Cost:
    """Return the quotient of some terms with the least squares of relative errors."""
    times = np.array([sample.time_ns for sample in samples])
    shares = [[size / scale for size, scale in zip(sample.sizes, scales, strict=True)] for sample in samples]
    over = np.array([[_power(e, row) for e in above] for row in shares])
    under = np.array([[_power(e, row) for e in below] for row in shares]).reshape(len(samples), len(below))
    weights = 1 / times
    coefficients = np.zeros(len(above) + len(below))
    for _ in range(ROUNDS if below else 1):
        rows = np.hstack([over, -under * times[:, None]]) * weights[:, None]
        coefficients = _solved(rows, times * weights)
        denominators = 1 + under @ coefficients[len(above) :]
        if not (denominators > RIDGE).all():
            return _fitted(samples, scales, above, [])
        weights = 1 / (times * denominators)
    pairs = [float(c) for c in coefficients]
    return Cost(
        scales,
        tuple(map(Term, above, pairs[: len(above)])),
        tuple(map(Term, below, pairs[len(above) :])),
        samples=tuple(samples),
    )


def _solved(rows: Matrix, wanted: Matrix) -> Matrix:
    """Return the least squares; of terms that the samples can't tell apart, small coefficients."""
    sizes = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(np.float64).tiny)
    return np.asarray(np.linalg.lstsq(rows / sizes, wanted, rcond=RIDGE)[0] / sizes, np.float64)


def _power(exponents: Exponents, shares: Sequence[float]) -> float:
    return math.prod(share**e for share, e in zip(shares, exponents, strict=True))
