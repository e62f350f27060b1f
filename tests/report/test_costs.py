"""The plot of fitted times."""

import numpy as np

from korch.ranges.cost import fit_all
from korch.report.costs import cost_lines, size_lines
from korch.runtime.report import KernelCost, SizeRecord


def test_a_plot_has_times_fits_and_functions() -> None:
    sizes = (1, 2, 4, 8, 16)
    (cost,) = fit_all([(n,) for n in sizes], np.array([[1000.0 + 500 * n for n in sizes]]))
    lines = list(cost_lines("at most n=16", (KernelCost(3, "gemm", cost), KernelCost(5, "generated", cost))))
    assert lines[0].startswith("time by size, inputs of at most n=16")
    assert lines[1] == "            1        3.0 us        3.0 us  ########|"
    assert lines[5] == "           16       18.0 us       18.0 us  " + 50 * "#" + "|"
    assert lines[-2] == "       3 gemm          0.0%  1000 + 500*n"


def test_without_costs_there_is_none() -> None:
    assert list(cost_lines("n", ())) == []


def test_the_bound_and_the_gap_are_stated_for_each_size() -> None:
    rows = (SizeRecord("n=5", "at most n=16", 0.01, 0.01, 0.008, 0.2), SizeRecord("n=16", "x", 0.02, 0.0195, 0.01, 0.5))
    head, first, second = size_lines(rows)
    assert head.startswith("by size:")
    assert first.split() == ["n=5", "10.0", "us", "10.0", "us", "8.0", "us", "20.0", "%", "(at", "most", "n=16)"]
    assert second.split() == ["n=16", "20.0", "us", "19.5", "us", "10.0", "us", "50.0", "%", "(x)"]
    assert not list(size_lines(()))
