"""Bounds are doubted if they follow from rates of the machine that were, or may have been, measured too low."""

from types import SimpleNamespace
from typing import Any

import pytest

from korch.pipeline.build import _doubt


@pytest.mark.parametrize(
    ("run_ns", "is_brief", "text"),
    [
        (3000, False, ""),
        (3000, True, "the budget left little time to measure this machine"),
        (2999, True, "a run takes less time than the bounds of its kernels together"),
    ],
)
def test_a_bound_is_doubted_for_a_reason(run_ns: int, is_brief: bool, text: str) -> None:
    steps = [SimpleNamespace(bound_ns=1000), SimpleNamespace(bound_ns=2000)]
    won, winner = SimpleNamespace(median_ns=run_ns), SimpleNamespace(plan=SimpleNamespace(steps=steps))
    validation: Any = SimpleNamespace(won=won, winner=winner)
    meter: Any = SimpleNamespace(has_brief_rates=is_brief)
    assert _doubt(validation, meter) == text
