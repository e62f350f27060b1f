"""Times of a kernel at a few sizes -> its time as a rational function of the sizes, with its error at other sizes.

The functions are quotients of polynomials. KLARAPTOR (Brandt et al., 2019) fits such functions to a kernel's
performance counters; here they are fitted to its times. Kernels that compute rows in steps take the same time for all
sizes within a step, so the sizes may be rounded up first. Of a few forms, the one is chosen that predicts each
sample best from the other samples.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def fit_all(sizes: Sequence[Sizes], times: Matrix) -> tuple[Cost, ...]:
    """Return the functions that fit the times of some kernels, a row each, at sizes that all of them were timed at."""
    count, scales = len(sizes), tuple(max(1, *column) for column in zip(*sizes, strict=True))
    # The samples of each fit: first all but one, for each of them, and then all.
    kept = np.vstack([1.0 - np.eye(count) if count > 1 else np.ones((1, 1)), np.ones(count)])
    least = np.where(kept[:-1] > 0, times[:, None], math.inf).min(2) / 2
    most = np.where(kept[:-1] > 0, times[:, None], 0.0).max(2) * 2
    best = [Cost(scales, (), error=math.inf)] * len(times)
    for step, (above, below) in itertools.product(STEPS, _forms(len(scales))):
        is_first = step == 1 and not any(above[-1])
        if not is_first and (len(above) + len(below) >= count or (not any(above[-1]) and step > 1)):
            continue
        over, under = (_powers(terms, sizes, scales, step) for terms in (above, below))
        coefficients = _fitted(over, under, times, kept)
        a, b = np.split(coefficients[:, :-1], [len(above)], axis=2)
        denominators = 1.0 + (b * under).sum(2)
        is_finite = denominators > 0
        found = np.where(is_finite, (a * over).sum(2) / np.where(is_finite, denominators, 1.0), math.inf)
        errors = np.median(np.abs(np.clip(found, least, most) / times - 1), axis=1)
        for k, error in enumerate(errors.tolist()):
            if error < best[k].error:
                own = [Term(e, c) for e, c in zip(above + below, coefficients[k, -1].tolist(), strict=True)]
                lower = tuple(own[len(above) :]) if any(term.coefficient for term in own[len(above) :]) else ()
                samples = tuple(map(TimedSizes, sizes, times[k].tolist()))
                best[k] = Cost(scales, tuple(own[: len(above)]), lower, error, samples, step)
    return tuple(best)


def _forms(rank: int) -> list[tuple[tuple[Exponents, ...], tuple[Exponents, ...]]]:
    """Return the terms of (numerator, denominator) of each form, the simplest form first."""
    exponents = list(itertools.product(range(3), repeat=rank))
    zero, linear, square = (tuple(e for e in exponents if sum(e) == degree) for degree in range(3))
    return [(zero, ()), (zero + linear, ()), (zero + linear + square, ()), (zero + linear + square, linear)]


def _fitted(over: Matrix, under: Matrix, times: Matrix, kept: Matrix) -> Matrix:
    """Return the coefficients of quotients with the least sums of squared relative errors, [kernel, fit, term].

    `over`, `under`: the values of the terms of numerator and denominator. `kept`: 1 for the samples of each fit.
    """
    times = times[:, None]
    plain = _solved(over * (kept / times)[..., None], kept)
    found = np.concatenate([plain, np.zeros((*plain.shape[:2], under.shape[1]))], axis=2)
    if not under.size:
        return found
    weights, is_right = kept / times, np.ones(plain.shape[:2], bool)
    quotients = np.concatenate([np.broadcast_to(over, (len(times), 1, *over.shape)), -under * times[..., None]], axis=3)
    for _ in range(ROUNDS):
        coefficients = _solved(quotients * weights[..., None], times * weights)
        denominators = 1 + coefficients[..., over.shape[1] :] @ under.T
        is_positive = denominators > RIDGE
        is_right &= (is_positive | (kept == 0)).all(2)
        weights = kept / (times * np.where(is_positive, denominators, 1.0))
    return np.where(is_right[..., None], coefficients, found)


def _powers(terms: tuple[Exponents, ...], points: Sequence[Sizes], scales: Sizes, step: int) -> Matrix:
    """Return the values of terms (columns) at some sizes (rows)."""
    shares = [_share(column, step, scale) for column, scale in zip(np.array(points).T, scales, strict=True)]
    return np.array([_power(e, shares) * np.ones(len(points)) for e in terms]).reshape(len(terms), len(points)).T


def _share(sizes: Integers | int, step: int, scale: int) -> Values:
    """Return sizes, rounded up, as fractions of the largest one."""
    return -(-sizes // step) * step / scale


def _solved(rows: Matrix, wanted: Matrix) -> Matrix:
    """Return least-squares solutions; terms that the samples can't distinguish get small coefficients."""
    sizes = np.maximum(np.linalg.norm(rows, axis=-2, keepdims=True), np.finfo(np.float64).tiny)
    found = np.linalg.pinv(rows / sizes, rcond=RIDGE) @ np.broadcast_to(wanted, rows.shape[:-1])[..., None]
    return np.asarray(found[..., 0] / sizes[..., 0, :], np.float64)


def _power(exponents: Exponents, shares: Sequence[Values]) -> Values:
    found: Values = 1.0
    for share, exponent in zip(shares, exponents, strict=True):
        found = found * share**exponent
    return found
