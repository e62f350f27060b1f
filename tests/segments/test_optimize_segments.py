"""Models in segments from optimization to execution: built, run and checked."""

from pathlib import Path

import numpy as np
import onnx.reference
import pytest

import korch
from benchmarks.models.mlp import build_mlp

LIMITS = korch.SearchLimits(gap=0.5, partition=12, max_primitives=6, solver_seconds=5.0)
QUICK = {"threads": 1, "search": LIMITS, "budget": 2.0}


def test_layers_in_segments_compute_what_the_model_does(cache_folder: Path) -> None:
    model = build_mlp(widths=(16,) * 11)
    executable = korch.optimize(model, cache_folder=cache_folder, **QUICK)
    x = np.random.default_rng(1).standard_normal((1, 16)).astype(np.float32)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"input": x})
    np.testing.assert_allclose(executable(x)[0], expected, rtol=1e-3, atol=1e-4)
    report = executable.report
    assert report.partition.segments > report.partition.different
    assert report.lower_bound_ms <= report.predicted_ms
    assert report.plan in {row.plan for row in report.plans}
    symbols = [step.symbol for step in executable.plan.steps]
    assert len(set(symbols)) < len(symbols)  # layers share kernels, not weights
    rounds = report.rounds
    assert len(rounds) > 2 and rounds[0].incumbent_ns is None
    seconds = [entry.seconds for entry in rounds]
    assert seconds == sorted(seconds)
    last = rounds[-1]
    assert last.bound_ns == pytest.approx(report.lower_bound_ms * 1e6)
    assert last.incumbent_ns == pytest.approx(report.predicted_ms * 1e6)
    blocks = report.partition.blocks
    assert all(search.rounds for block in blocks for search in block.searches)
