"""The sizes of a range at which its plans are searched, timed and compared."""

from __future__ import annotations

import pytest

from korch.limits import SearchLimits
from korch.pipeline.ranges import _checked_sizes, _timed
from korch.ranges.form import Dimension


@pytest.mark.parametrize(
    ("ranges", "upper", "expected"),
    [
        ([(1, 128)], (128,), [(65,), (1,), (17,), (5,)]),
        ([(1, 8)], (8,), [(5,), (1,)]),
        ([(160, 640)], (640,), [(401,), (161,)]),
        ([(1, 32), (16, 512)], (32, 512), [(5, 91), (1, 17)]),
    ],
)
def test_sizes_at_which_kernels_are_timed_are_apart(
    ranges: list[tuple[int, int]], upper: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    dimensions = [Dimension(f"d{i}", None, low, high) for i, (low, high) in enumerate(ranges)]
    assert _timed(dimensions, [(n,) for n in upper], upper) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(1.0, [(32, 512), (1, 16), (31, 511)]), (0.002, [(2, 16), (1, 32), (1, 16)]), (1e-6, [(1, 16)])],
)
def test_sizes_at_which_plans_are_compared_have_at_most_a_share_of_the_work(
    share: float, expected: list[tuple[int, int]]
) -> None:
    dimensions = [Dimension("batch", None, 1, 32), Dimension("length", None, 16, 512)]
    found = _checked_sizes(dimensions, [[32], [512]], (32, 512), share, SearchLimits())
    assert found[:3] == expected
    assert all(n * m <= max(share * 32 * 512, 16) for n, m in found)
