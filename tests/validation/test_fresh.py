"""Runs in a process of their own: their times, and that a search goes on without them."""

import sys
from pathlib import Path

import numpy as np
import pytest

import korch
from korch.report.explain import describe
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.report import ShapedReport
from korch.validation import fresh
from tests.runtime import runtime_plans as plans
from tests.support.models import parsed


@pytest.fixture(scope="module")
def executable(builder) -> Executable:
    plan = plans.blocked_constant()
    return Executable(build(plan.graph, plan.steps, plans.TARGET, builder))


@pytest.fixture
def arrays(executable: Executable) -> list[np.ndarray]:
    return [np.ones(info.shape, info.dtype) for info in executable.get_inputs()]


def test_the_times_are_those_of_another_process(executable: Executable, arrays: list[np.ndarray]) -> None:
    found = fresh.time_fresh(executable, arrays, 1000.0, None)
    assert found is not None
    assert 0 < found.p10_ms <= found.median_ms <= found.p90_ms


def test_there_are_none_without_the_time_for_them(
    executable: Executable, arrays: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, "child_command", lambda module: pytest.fail("a process was started"))
    assert fresh.time_fresh(executable, arrays, 1000.0, 0.5) is None
    assert fresh.time_fresh(executable, arrays, 10e9, 60.0) is None  # a run takes 10 s


@pytest.mark.parametrize("rows", [2, range(1, 3)])
def test_a_search_reports_them(rows: int | range, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("korch.pipeline.build.time_fresh", fresh.time_fresh)
    model = parsed("(float[n,8] x) => (float[n,8] y) { y = Relu(x) }")
    report = korch.optimize(model, threads=1, cache_folder=tmp_path, shapes={"n": rows}).report
    report = next(iter(report.plans.values())) if isinstance(report, ShapedReport) else report
    assert report.fresh is not None and report.times == report.fresh
    assert "in a process of its own" in describe("m.korch", report)


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "print('no JSON')", "import time; time.sleep(60)"])
def test_there_are_none_if_the_process_fails(
    code: str, executable: Executable, arrays: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, "child_command", lambda module: [sys.executable, "-c", code])
    assert fresh.time_fresh(executable, arrays, 1000.0, 1.5) is None
