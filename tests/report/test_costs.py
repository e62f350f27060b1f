"""The plot of fitted times."""

from __future__ import annotations

from korch.ranges.cost import TimedSizes, fit
from korch.report.costs import cost_lines
from korch.runtime.report import KernelCost


def test_a_plot_has_times_fits_and_functions() -> None:
    cost = fit([TimedSizes((n,), 1000.0 + 500 * n) for n in (1, 2, 4, 8, 16)])
    lines = list(cost_lines("at most n=16", (KernelCost(3, "gemm", cost), KernelCost(5, "generated", cost))))
    assert lines[0].startswith("time by size, inputs of at most n=16")
    assert lines[1] == "            1        3.0 us        3.0 us  ########|"
    assert lines[5] == "           16       18.0 us       18.0 us  " + 50 * "#" + "|"
    assert lines[-2] == "       3 gemm          0.0%  1000 + 500*n"


def test_without_costs_there_is_none() -> None:
    assert list(cost_lines("n", ())) == []
