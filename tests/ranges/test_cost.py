"""Rational functions of sizes, fitted to times."""

import numpy as np
import pytest

from korch.ranges.cost import Cost, TimedSizes, fit_all

SIZES = (1, 5, 9, 17, 33, 65, 97, 128)


def fit(samples: list[TimedSizes]) -> Cost:
    (found,) = fit_all([s.sizes for s in samples], np.array([[s.time_ns for s in samples]]))
    return found


def worst_error(found: Cost, time_ns) -> float:
    return max(abs(found.at((n,)) / time_ns(n) - 1) for n in range(1, 129))


@pytest.mark.parametrize(
    "time_ns",
    [lambda n: 500.0, lambda n: 300 + 20.0 * n, lambda n: 200 + 3.0 * n + 0.5 * n * n],
    ids=["constant", "linear", "square"],
)
def test_polynomials_are_found(time_ns) -> None:
    found = fit([TimedSizes((n,), time_ns(n)) for n in SIZES])
    assert worst_error(found, time_ns) < 1e-4 and found.error < 1e-4


def test_a_quotient_is_found() -> None:
    """The throughput of a kernel grows with its size, up to a limit."""

    def time_ns(n: float) -> float:
        return (100 + 50 * n + 2 * n * n) / (1 + 0.1 * n)

    found = fit([TimedSizes((n,), time_ns(n)) for n in SIZES])
    assert found.below and worst_error(found, time_ns) < 0.02


def test_steps_are_found() -> None:
    """Matrix units compute 32 rows together."""

    def time_ns(n: float) -> float:
        return 1000 + 500.0 * -(-n // 32)

    found = fit([TimedSizes((n,), time_ns(n)) for n in SIZES])
    assert found.step == 32 and worst_error(found, time_ns) < 1e-4
    assert "ceil32(n)" in str(found)


def test_the_error_is_that_of_sizes_that_were_not_seen() -> None:
    rng = np.random.default_rng(0)
    noisy = fit([TimedSizes((n,), float(1000 * rng.uniform(0.5, 2))) for n in SIZES])
    assert noisy.error > 0.1


def test_two_dimensions() -> None:
    def time_ns(b: int, n: int) -> float:
        return 1000 + 7.0 * b * n + 0.1 * n * n

    samples = [TimedSizes((b, n), time_ns(b, n)) for b in (1, 3, 8) for n in (4, 16, 64, 128)]
    found = fit(samples)
    assert max(abs(found.at((b, n)) / time_ns(b, n) - 1) for b in range(1, 9) for n in range(4, 129, 7)) < 1e-3
    assert "n0*n1" in str(found)


def test_few_samples_give_simple_functions() -> None:
    assert fit([TimedSizes((7,), 100.0)]).at((3,)) == pytest.approx(100.0)
    two = fit([TimedSizes((1,), 100.0), TimedSizes((9,), 300.0)])
    assert 50 <= two.at((100,)) <= 600  # not far outside of what was seen
