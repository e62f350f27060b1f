"""The sizes of a range at which its plans are searched, timed and compared."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from korch.limits import SearchLimits
from korch.options import Options
from korch.pipeline.ranges import _checked_sizes, _timed
from korch.pipeline.served import search_variants
from korch.ranges.form import Dimension
from korch.search.result import PlanName
from korch.system.deadline import Deadline


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


def test_a_plan_of_estimates_is_measured_before_plans_for_other_sizes_which_need_the_time_of_a_first_plan() -> None:
    offer, group = SimpleNamespace(is_in_place=False), SimpleNamespace(key="g")
    best = tuple(SimpleNamespace(key=key, offer=offer, group=group) for key in ("known", "estimated", "estimated"))
    measured: list[str] = []

    def measure(batch: list[Any], deadline: Deadline) -> list[None]:
        measured.extend(c.key for c in batch)
        return [None] * len(batch)

    ledger: Any = SimpleNamespace(
        limits=SimpleNamespace(batch=24),
        cost_ns=lambda c: (1, c.key == "known"),
        measure=measure,
        bounds_ns=lambda known: [],
        compile_s=lambda some: 0.0,
        expect_compiling=lambda seconds: None,
        is_over=lambda deadline: deadline.is_over,
        left_s=lambda deadline: deadline.left_s,
    )
    found = SimpleNamespace(rounds=[SimpleNamespace(seconds=math.inf)])
    outcome: Any = SimpleNamespace(plans={PlanName.SEARCHED: best}, found=found)
    run: Any = SimpleNamespace(
        options=Options(), build_deadline=Deadline.after(60.0, time.monotonic()), progress=pytest.fail
    )
    model, masked = SimpleNamespace(tasks=[]), SimpleNamespace(others=[(5,)])
    assert search_variants(run, model, ledger, outcome, masked) == []  # type: ignore[arg-type]
    assert measured == ["estimated"]
