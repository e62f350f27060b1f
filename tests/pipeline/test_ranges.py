"""The sizes of a range at which its plans are searched, timed and compared."""

import math
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from korch.candidate.candidate import Offer
from korch.limits import SearchLimits
from korch.options import Options
from korch.pipeline import served
from korch.pipeline.ranges import _checked_sizes, _timed
from korch.pipeline.results import SizedPlan
from korch.pipeline.served import search_sizes
from korch.ranges.form import Dimension
from korch.ranges.plan import AtSizes
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
    best = tuple(
        SimpleNamespace(key=key, offer=offer, group=group, served=None) for key in ("known", "estimated", "estimated")
    )
    measured: list[str] = []

    def measure(batch: list[Any], deadline: Deadline) -> list[None]:
        measured.extend(c.key for c in batch)
        return [None] * len(batch)

    ledger: Any = SimpleNamespace(
        batch=24,
        cost_ns=lambda c: (1, c.key == "known"),
        measure=measure,
        bounds_ns=lambda known: [],
        compile_s=lambda some: 0.0,
        expect_compiling=lambda seconds: None,
        is_over=lambda deadline: deadline.is_over,
        left_s=lambda deadline: deadline.left_s,
    )
    found = SimpleNamespace(rounds=[SimpleNamespace(seconds=math.inf)], certificate=SimpleNamespace(bound_ns=2))
    outcome: Any = SimpleNamespace(plans={PlanName.SEARCHED: best}, found=found)
    run: Any = SimpleNamespace(
        options=Options(), build_deadline=Deadline.after(60.0, time.monotonic()), progress=pytest.fail
    )
    model, masked = SimpleNamespace(tasks=[]), SimpleNamespace(others=[(5,)], plan=SimpleNamespace(timed=(9,)))
    assert search_sizes(run, model, ledger, outcome, masked) == [SizedPlan((9,), best)]  # type: ignore[arg-type]
    assert measured[0] == "estimated"


@dataclass(frozen=True)
class SizesOnly:
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Timed:
    """A kernel with its times by size."""

    times: tuple[int, ...]
    served: Any
    offer: Offer


def test_at_each_size_the_sums_of_all_plans_are_compared_with_the_best_kernels_measured_there() -> None:
    """Also with a kernel that was fastest at one size only, and with one that was not timed at a size."""

    def kernel(*times: int) -> Timed:
        return Timed(times, SizesOnly((0,)), Offer((), ()))

    ledger: Any = SimpleNamespace(
        cost_ns=lambda c: (abs(c.times[c.served.sizes[0]]), c.times[c.served.sizes[0]] > 0),
        measure=lambda batch, deadline: None,
    )
    plans: Any = [((0,), (kernel(3, 9, 5), kernel(2, 2, 2))), ((1,), (kernel(4, 6, 5), kernel(2, 2, -2)))]
    best: Any = (replace(plans[1][1][0], served=SizesOnly((1,))), replace(kernel(5, 1, 1), served=SizesOnly((1,))))
    searched = {(0,): (plans[0][1], 4), (1,): (best, 9), (2,): (best, 1)}
    first, second = served._with_sums(plans, searched, ledger, Deadline())
    assert first.measured == (AtSizes((0,), 5, 5, 4), AtSizes((1,), 11, 7, 7))
    assert second.measured == (AtSizes((0,), 6, 5, 4), AtSizes((1,), 8, 7, 7))
