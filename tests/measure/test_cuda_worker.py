"""The process that measures on CUDA devices, without a device."""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from korch.cuda import driver
from korch.cuda.kernel import CudaKernel, Network, TorchCall
from korch.cuda.measure import meter as meter_module
from korch.cuda.measure import worker
from korch.measure.record import Failed, Measured
from korch.measure.session import MeasuringProcess, run_jobs

L2 = 50 << 20


def job(weights, others):
    return {"buffers": [{"kind": "constant", "bytes": weights}, {"kind": "output", "bytes": others}]}


def test_copies_of_weights_are_twice_the_cache_together():
    turns, copies = worker._turns(job(1 << 20, 1 << 20), L2)
    assert turns * (1 << 20) >= 2 * L2 and copies == 1
    assert worker._turns(job(200 << 20, 1 << 20), L2) == (1, 1)
    assert worker._turns(job(1 << 10, 1 << 10), L2)[0] == worker.MOST_RUNS
    network = {**job(1 << 10, 1 << 10), "network": {"known": [0]}}
    assert worker._turns(network, L2)[0] == worker.MOST_ENGINES


def test_what_does_not_fit_into_the_cache_takes_turns_too():
    assert worker._turns(job(0, 40 << 20), L2) == (3, 3)
    turns, copies = worker._turns(job(4 << 30, 1 << 30), L2)
    assert copies == 3 and turns * (4 << 30) + copies * (1 << 30) <= worker.MOST_BYTES + (4 << 30)


SERVE = """
import json, os, sys

def serve():
    task = json.loads(sys.stdin.readline())
    for number, job in enumerate(task["jobs"]):
        print(json.dumps({"at": number}), flush=True)
        if job == "bad":
            print(json.dumps({"failed": [number, "failed", "an illegal address"]}), flush=True)
            os._exit(1)
        print(json.dumps({"sample": [number, 7]}), flush=True)
    print(json.dumps({"done": True}), flush=True)
"""


def test_a_process_that_gives_up_after_a_failure_keeps_its_reason(tmp_path, monkeypatch):
    (tmp_path / "serving.py").write_text(SERVE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with MeasuringProcess("serving") as process:
        found = run_jobs(["good", "bad", "good"], {}, process, 20.0)
    assert found[1] == Failed("failed", "an illegal address")
    assert all(isinstance(found[i], Measured) and found[i].time_ns == 7 for i in (0, 2))


SERVE_ON = """
import json, os, sys

def serve():
    for line in iter(sys.stdin.readline, ""):
        for number, job in enumerate(json.loads(line)["jobs"]):
            print(json.dumps({"at": number}), flush=True)
            if job == "bad":
                os._exit(1)
            print(json.dumps({"sample": [number, os.getpid()]}), flush=True)
        print(json.dumps({"done": True}), flush=True)
"""


def test_a_kept_process_takes_tasks_until_it_ends(tmp_path, monkeypatch):
    (tmp_path / "serving_on.py").write_text(SERVE_ON)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    process = MeasuringProcess("serving_on")
    tasks = (["good"], ["good"], ["bad"], ["good"])
    first, second, bad, last = (run_jobs(jobs, {}, process, 20.0)[0] for jobs in tasks)
    assert first.time_ns == second.time_ns != last.time_ns
    assert bad == Failed("crashed", "the process ended by exit code 1")
    assert process.close() == (-9, "")
    assert process.close() == (0, "")


def test_cubins_are_unloaded_after_a_measurement(tmp_path, monkeypatch):
    called = []

    class Driver:
        def __getattr__(self, name):
            return lambda *_: called.append(name) or 0

    monkeypatch.setattr(driver, "_driver", Driver)
    (tmp_path / "k.cubin").write_bytes(b"")
    step = {"path": str(tmp_path / "k.cubin"), "symbol": "k", "shared_bytes": 0, "warps": 1}
    with pytest.raises(ZeroDivisionError), ExitStack() as loaded:
        worker._launch_maker({"launches": [step, step]}, loaded)
        assert called.count("cuModuleLoadData") == 2 and "cuModuleUnload" not in called
        raise ZeroDivisionError
    assert called.count("cuModuleUnload") == 2


def test_only_engines_may_take_a_minute(tmp_path, monkeypatch):
    waited = []

    def run_jobs(jobs, task, process, seconds):
        waited.append((len(jobs), seconds))
        return [None] * len(jobs)

    group = SimpleNamespace(inputs=(), constant_inputs=())
    batch = [SimpleNamespace(key=key, group=group, stored=()) for key in "abc"]
    call, network = CudaKernel((TorchCall("c", ""),)), CudaKernel((Network("n", "", b"", ()),))
    monkeypatch.setattr(meter_module, "run_jobs", run_jobs)
    owner = object.__new__(meter_module.CudaMeter)
    owner.compiler, owner._worker = SimpleNamespace(compile=lambda launches: {}, folder=tmp_path), None
    owner.target, owner._has_device = SimpleNamespace(allow_tf32=False, l2_bytes=0), True
    owner.measure_batch(batch, {"a": call, "b": network, "c": call}, None)
    owner.measure_batch(batch[:1], {"a": call}, None)
    assert waited == [(2, meter_module.HANG_SECONDS), (1, meter_module.ENGINE_SECONDS), (1, meter_module.HANG_SECONDS)]
