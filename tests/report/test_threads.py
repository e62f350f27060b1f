"""The activity of threads in kernels: the arithmetic, computed by hand, and a real run."""

import json
import platform
from pathlib import Path

import pytest

import korch
from benchmarks.models import build
from korch.cli import main
from korch.errors import MeasureError
from korch.limits import SearchLimits
from korch.report.threads import ThreadLoad, Threads, ThreadSpan, WatchedRun, read_run, watch_threads

needs_gcc = pytest.mark.skipif(
    platform.system() != "Linux", reason="libraries are preloaded on Linux, and regions are those of GCC's OpenMP"
)


def test_a_region_belongs_to_the_kernel_in_which_it_begins() -> None:
    run = read_run(
        {
            "begun_ns": 1000,
            "kernel_ns": [100, 50, 70],
            "spans": [[7, 1, 1105, 1149, 4], [7, 0, 1099, 1149, 0], [8, 0, 1160, 1190, 10]],
        }
    )
    assert run.spans == (ThreadSpan(0, 0, 99, 149, 0), ThreadSpan(0, 1, 105, 149, 4), ThreadSpan(2, 0, 160, 190, 10))
    assert [span.busy_ns for span in run.spans] == [50, 40, 20]


def test_loads_are_medians_over_runs() -> None:
    def run(longest: int) -> WatchedRun:
        spans = (ThreadSpan(0, 0, 0, longest, 0), ThreadSpan(0, 1, 0, 60, 20), ThreadSpan(0, 0, 90, 90 + longest, 0))
        return WatchedRun((200 + longest, 10), spans)

    threads = Threads(2, (run(80), run(20), run(50)))
    assert threads.typical == run(50)
    # A fast run with an interruption has the median length, but it is no typical run.
    runs = [WatchedRun(times, ()) for times in ((10, 11), (11, 12), (12, 14), (13, 15), (3, 21))]
    assert Threads(1, tuple(runs)).typical == WatchedRun((12, 14), ())
    assert threads.loads() == (ThreadLoad(100 / 70, 1 - 70 / 250), None)
    even = Threads(2, (WatchedRun((100,), (ThreadSpan(0, 0, 0, 100, 0), ThreadSpan(0, 1, 0, 100, 0))),))
    assert even.loads() == (ThreadLoad(1.0, 0.0),)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, cache_folder) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    model = build("conv_bn_relu", size=64, channels=(16, 16))
    found = korch.optimize(
        model, threads=2, budget=1, cache_folder=cache_folder, search=SearchLimits(gap=0.5, max_primitives=4)
    )
    found.save(folder / "m.korch")
    return folder / "m.korch"


@needs_gcc
def test_a_trace_has_a_row_for_each_thread(artifact: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "trace.json"
    assert main(["profile", str(artifact), "--rounds", "5", "--trace", str(out)]) == 0
    assert "longest" in capsys.readouterr().out
    found = json.loads(out.read_text("utf-8"))
    rows = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {0: "kernels", 1: "thread 0", 2: "thread 1"}
    spans = [e for e in found["traceEvents"] if e["ph"] == "X"]
    kernels = {e["args"]["kernel"]: e for e in spans if e["tid"] == 0}
    inner = [e for e in spans if e["tid"] > 0]
    assert {e["tid"] for e in inner} == {1, 2}
    for event in inner:  # within its kernel; clocks are read a moment apart
        outer = kernels[event["args"]["kernel"]]
        assert event["cat"] == outer["cat"]
        assert event["ts"] >= outer["ts"]
        assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1.0


@needs_gcc
def test_a_run_that_fails_is_told_and_the_trace_has_kernels_only(
    artifact: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    with pytest.raises(MeasureError, match=r"the process that records threads fails: .*no\.korch"):
        watch_threads(tmp_path / "no.korch", 2, 1)
    monkeypatch.setattr("korch.report.threads.SECONDS", 0.0)
    out = tmp_path / "trace.json"
    assert main(["profile", str(artifact), "--rounds", "2", "--trace", str(out)]) == 0
    assert "threads are not shown" in capsys.readouterr().err
    found = json.loads(out.read_text("utf-8"))
    assert found["otherData"]["threads"].startswith("Threads are not shown: ")
    assert {e["tid"] for e in found["traceEvents"] if e["ph"] == "X"} == {0}
