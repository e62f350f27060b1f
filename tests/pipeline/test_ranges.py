"""The sizes of a range at which its plans are searched, timed and compared."""

from __future__ import annotations

import pytest

from korch.pipeline.ranges import _timed
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
