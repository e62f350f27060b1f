"""How engines are timed on a device: as they are called, or as graphs on the device alone."""

import tempfile
from types import SimpleNamespace

import pytest

from benchmarks.peers import captured
from korch.cuda.measure import lock
from tests.support.fake_clock import FakeTorch


@pytest.fixture(autouse=True)
def _own_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_wrappers_are_timed_with_the_host_and_graphs_without():
    torch, order = FakeTorch(), []

    def run(name, host_ms):
        order.append(name)
        assert lock._held
        torch.work(host_ms, 0.5)

    graph = captured.Replay(SimpleNamespace(replay=lambda: run("graph", 0.1)))
    found = captured.interleaved(torch, {"graph": graph, "called": lambda: run("called", 2.0)})
    assert {len(times) for times in found.values()} == {captured.ROUNDS}
    assert found["graph"] == pytest.approx([0.5] * captured.ROUNDS)
    assert min(found["called"]) >= 2.0
    rounds = 1 + captured.RUNS
    assert order[-2 * rounds :] == ["graph"] * rounds + ["called"] * rounds


class Recorder:
    """Records what is called of `torch.cuda`."""

    def __init__(self):
        self.calls = []
        self.cuda = self

    def __getattr__(self, name):
        def call(*_, **__):
            self.calls.append(name)
            return self

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append("end")


def test_a_run_is_captured_after_it_has_run_on_the_stream():
    torch = Recorder()
    replay = captured.locked_capture(torch, lambda: torch.calls.append("run" if lock._held else "unlocked"))
    issued = [c for c in torch.calls if c in ("run", "unlocked", "stream", "synchronize", "graph", "end")]
    assert issued == ["stream", *["run"] * captured.WARM_UP, "end", "synchronize", "graph", "run", "end"]
    replay()
    assert torch.calls[-1] == "replay"


def test_inductor_times_kernels_alone_and_compiles_beside_others():
    pytest.importorskip("torch")
    from torch._inductor.runtime import benchmarking

    timer, seen = benchmarking.benchmarker, []
    before = type(timer).benchmark_gpu
    type(timer).benchmark_gpu = lambda *_: seen.append(bool(lock._held))
    try:
        with captured.alone_while_timing():
            assert not lock._held
            timer.benchmark_gpu(None)
        timer.benchmark_gpu(None)
    finally:
        type(timer).benchmark_gpu = before
    assert seen == [True, False]
