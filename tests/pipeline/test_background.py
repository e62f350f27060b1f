"""A search in the background: what is served before, while and after its plan is swapped in."""

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from threadpoolctl import threadpool_info

import korch
from korch.options import Options
from korch.pipeline import Progress, Update, untold
from korch.pipeline.background import BackgroundExecutable, BackgroundSearch, Make, has_background
from korch.runtime.runnable import Runnable
from korch.system.deadline import Deadline
from korch.system.settings import Setting, few_collections, one_blas_thread
from tests.support.models import parsed

OPTIONS = Options(threads=1)


class Adds:
    """Stands for an executable: adds a number, so that a call shows which plan has run."""

    def __init__(self, number: int) -> None:
        self.number, self.threads, self.report = number, 1, f"report {number}"

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return self.compute(arrays)

    def compute(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(array + self.number for array in arrays)


def made(search: Callable[[Progress, Deadline], int]) -> Make[Runnable]:
    """Return what makes plan 1 at first, and then the plan that `search` finds."""

    def make(options: Options, progress: Progress, deadline: Deadline) -> Any:
        return Adds(1 if options.schedule == "joins" else search(progress, deadline))

    return make


def test_calls_get_the_first_plan_until_the_search_has_found_a_better_one() -> None:
    go = threading.Event()

    def search(tell: Progress, deadline: Deadline) -> int:
        assert go.wait(60) and deadline.left_s is not None and deadline.left_s <= 30
        return 2

    served = BackgroundExecutable(made(search), replace(OPTIONS, budget_s=30.0), untold)
    assert served(1) == (2,) and served.report == "report 1" and served.number == 1
    assert not served.wait(0.01)
    go.set()
    assert served.wait()
    assert served(1) == (3,) and served.report == "report 2"
    assert served.background.error is None


def test_a_method_that_is_kept_gets_the_better_plan() -> None:
    go = threading.Event()

    def search(tell: Progress, deadline: Deadline) -> int:
        assert go.wait(60)
        tell(Update("orchestrate"))
        return 2

    served = BackgroundExecutable(made(search), OPTIONS, untold)
    compute, background = served.compute, served.background
    del served
    gc.collect()
    assert compute([1]) == (2,)
    go.set()
    assert background.wait() and compute([1]) == (3,)


def test_a_search_that_fails_leaves_the_first_plan_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def search(tell: Progress, deadline: Deadline) -> int:
        raise ValueError("no\nplan")

    with caplog.at_level(logging.WARNING):
        served = BackgroundExecutable(made(search), OPTIONS, untold)
        assert served.wait() and served(1) == (2,)
    assert caplog.messages == ["the search in the background has failed, so the first plan stays: no plan"]
    assert isinstance(served.background.error, ValueError)


def test_a_search_ends_at_its_next_step_when_it_is_stopped_or_nothing_uses_it() -> None:
    begun, steps = threading.Event(), [0]

    def search(tell: Progress, deadline: Deadline) -> int:
        while True:
            tell(Update("orchestrate"))
            begun.set()
            steps[0] += 1

    served = BackgroundExecutable(made(search), OPTIONS, untold)
    assert begun.wait(60) and not served.wait(0)
    served.background.stop()
    assert served.wait(0) and served(1) == (2,) and served.background.error is None
    begun.clear()
    other = BackgroundExecutable(made(search), OPTIONS, untold)
    running: BackgroundSearch = other.background
    assert begun.wait(60)
    del other
    gc.collect()
    assert running.wait(60)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        (few_collections, gc.get_threshold),
        (one_blas_thread, lambda: [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]),
    ],
)
def test_settings_are_as_before_after_searches_that_overlap(setting: Setting, read: Callable[[], object]) -> None:
    before = read()
    first, second = setting(), setting()
    first.__enter__()
    second.__enter__()
    changed = read()
    first.__exit__(None, None, None)
    assert read() == changed
    second.__exit__(None, None, None)
    assert read() == before and (before != changed or setting is one_blas_thread)  # NumPy may have one thread only


def test_one_search_runs_at_a_time() -> None:
    running, most = [0], [0]

    def search(tell: Progress, deadline: Deadline) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.02)
        running[0] -= 1
        return 2

    several = [BackgroundExecutable(made(search), OPTIONS, untold) for _ in range(3)]
    assert all(one.wait(60) for one in several) and most == [1]


def test_what_has_no_longer_search_has_no_background() -> None:
    assert has_background(OPTIONS) and has_background(replace(OPTIONS, budget_s=30.0))
    for changed in ({"measure": False}, {"budget_s": 1.0}, {"target": "cuda"}, {"replay": Path("a.ledger")}):
        assert not has_background(replace(OPTIONS, **changed))  # type: ignore[arg-type]


def gemm(path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in (("w", (24, 40)), ("b", (40,)))}
    onnx.save(parsed("(float[8,24] x) => (float[8,40] y) { h = Gemm(x, w, b) y = Relu(h) }", 21, **weights), path)
    return path


def test_a_model_is_right_before_and_after_its_plan_is_swapped(tmp_path: Path, cache_folder: Path) -> None:
    path = gemm(tmp_path / "gemm.onnx")
    served = korch.optimize(path, background=True, budget=20, threads=1, cache_folder=cache_folder)
    assert isinstance(served, BackgroundExecutable)
    x = np.random.default_rng(1).standard_normal((8, 24)).astype(np.float32)
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
    wanted = np.maximum(x @ weights["w"] + weights["b"], 0)
    runs = 0
    while not served.wait(0):
        np.testing.assert_allclose(served(x)[0], wanted, atol=1e-4)
        runs += 1
    assert runs > 0 and served.background.error is None
    np.testing.assert_allclose(served.run(["y"], {"x": x})[0], wanted, atol=1e-4)
    served.save(tmp_path / "gemm.korch")
    np.testing.assert_allclose(korch.load(tmp_path / "gemm.korch")(x)[0], wanted, atol=1e-4)


def test_a_search_ends_with_the_interpreter(tmp_path: Path, calibrated: Callable[[Path], Path]) -> None:
    script = (
        "import sys, korch\n"
        "if __name__ == '__main__':\n"
        "    exe = korch.optimize(sys.argv[1], background=True, threads=1, cache_folder=sys.argv[2], progress=False)\n"
        "    print(exe.background.wait(0))\n"
    )
    command = [sys.executable, "-c", script, gemm(tmp_path / "gemm.onnx"), calibrated(tmp_path / "cache")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "False\n" and "Error" not in found.stderr and "failed" not in found.stderr


def test_a_session_is_one_of_the_plan_that_is_served() -> None:
    served = BackgroundExecutable.__new__(BackgroundExecutable)
    served.served = SimpleNamespace(session=lambda capacity: capacity)
    assert served.session(capacity=3) == 3
