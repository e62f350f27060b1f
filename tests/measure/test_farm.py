"""A farm of processes: what its machines measure, and what happens if one is lost, differs, or answers nonsense."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import korch
from korch.errors import OptionError
from korch.measure import farm as farm_module
from korch.measure.batch import SourcedJob
from korch.measure.compiler import Builder, target_of
from korch.measure.farm import Batch, Farm
from korch.measure.record import Failed, Measured, to_text
from korch.measure.timer import BufferSpec, Job, Setup
from korch.options import Options
from korch.system.deadline import Deadline
from tests.support.c_code import llvm_of
from tests.support.models import parsed

pytest.importorskip("distributed")

pytestmark = pytest.mark.filterwarnings("ignore")  # Dask's own

PRELOADS = {
    "garbage": "from korch.measure import farm_worker\nfarm_worker.time_batch = lambda *a: 'nonsense'\n",
    "differs": (
        "from dataclasses import replace\nfrom korch.measure import compiler, farm_worker\n"
        "farm_worker.target_of = lambda options: replace(compiler.target_of(options), cpu='another')\n"
    ),
    "limited": (
        "from korch.errors import OptionError\nfrom korch.measure import farm_worker\n"
        "def target_of(options):\n    raise OptionError('too many', 'option threads')\n"
        "farm_worker.target_of = target_of\n"
    ),
}

TEXT = "int k{0}_run(void *state, void *const *b) {{ ((float *)b[1])[0] = {0} * ((float *)b[0])[0]; return 0; }}\n"
BUFFERS = (BufferSpec(64, "f32"), BufferSpec(64, "f32"), BufferSpec(64, "u8"))


class Cluster:
    """A scheduler, and a process for each worker, by the name of its machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.workers = folder, folder / "scheduler.json", dict[str, subprocess.Popen[bytes]]()
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(self.file)]
        self.scheduler = self._started("dask_scheduler", options, {})
        while not self.file.exists():
            time.sleep(0.05)
        self.address = json.loads(self.file.read_text("utf-8"))["address"]

    def _started(self, module: str, options: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *options]
        return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)

    def add(self, machine: str) -> None:
        options = [self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        if machine in PRELOADS:
            path = self.folder / f"{machine}.py"
            path.write_text(PRELOADS[machine])
            options += ["--preload", str(path)]
        own = {"KORCH_MACHINE": machine, "KORCH_CACHE": str(self.folder / machine), "TMPDIR": str(self.folder)}
        self.workers[machine] = self._started("dask_worker", options, own)

    def kill(self, machine: str) -> None:
        self.workers[machine].kill()
        self.workers[machine].wait()

    def close(self) -> None:
        for process in (*self.workers.values(), self.scheduler):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def batches(numbers: Sequence[int]) -> list[Batch]:
    jobs = [SourcedJob((llvm_of(TEXT.format(n)),), Job(f"k{n}", False, BUFFERS)) for n in numbers]
    return [Batch((job,), (1,)) for job in jobs]


def joined(cluster: Cluster, options: Options, builder: Builder, machines: int) -> Farm:
    farm = Farm(replace(options, farm=cluster.address), target_of(options), builder)
    end_s = time.monotonic() + 120
    while len(farm.machines) < machines and time.monotonic() < end_s:
        farm.join()
        time.sleep(0.05)
    return farm


@pytest.mark.long
def test_what_one_machine_fails_to_measure_another_one_does(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "korch.measure")
    for machine in ("lost", "good", *PRELOADS):
        cluster.add(machine)
    options = Options(threads=1)
    builder = Builder(target_of(options).isa, tmp_path / "own")
    farm = joined(cluster, options, builder, 5)
    assert {name: machine.is_timer for name, machine in farm.machines.items()} == {
        "lost": True,
        "good": True,
        "garbage": True,
        "differs (only compiles)": False,
        "limited (only compiles)": False,
    }
    found: dict[int, Sequence[Measured | None]] = {}

    def keep(i: int, records: Sequence[Measured | None]) -> None:
        assert i not in found
        found[i] = records
        if cluster.workers["lost"].poll() is None:
            cluster.kill("lost")

    setup = Setup((), 1)
    assert farm.measure(batches(range(12)), setup, Deadline(), keep, lambda text: None) == []
    records = [record for own in found.values() for record in own if record is not None]
    assert len(records) == 12 and {record.machine for record in records} <= {"lost", "good"}
    assert '"machine": "good"' in "".join(map(to_text, records))
    assert "its cpu is 'another', not" in caplog.text and "is no measurement" in caplog.text
    assert "only compiles: option threads: too many" in caplog.text
    assert caplog.text.count("gets no more work") + caplog.text.count("is lost") >= 2

    executable = korch.optimize(
        relu(), threads=1, farm=cluster.address, cache_folder=tmp_path / "cache", ledger=tmp_path / "ledger"
    )
    (y,) = executable(x=np.float32([[-1, 2]]))
    assert y.tolist() == [[0, 2]] and '\\"machine\\": \\"good\\"' in (tmp_path / "ledger").read_text("utf-8")

    cluster.kill("good")
    waiting = batches(range(20, 23))
    left = farm.measure(waiting, setup, Deadline(), keep, lambda text: None)
    assert left == [0, 1, 2]  # this machine measures them, with the objects of the one that only compiles
    assert builder.missing_work([source for batch in waiting for source in batch.sources]) == 0
    farm.close()


def relu() -> onnx.ModelProto:
    return parsed("(float[1,2] x) => (float[1,2] y) { y = Relu(x) }", 18)


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(farm_module, "CONNECT_S", 0.5)
    options = Options(threads=1, farm="tcp://127.0.0.1:9")
    with pytest.raises(OptionError, match=r"option --farm: no Dask scheduler answers at .tcp:..127\.0\.0\.1:9"):
        Farm(options, target_of(options), Builder("generic", tmp_path))


def test_answers_are_checked() -> None:
    text = to_text(Measured(100, (100,), is_disturbed=True))
    assert farm_module._measured(text, 100, "a") == Measured(100, (100,), is_disturbed=True, machine="a")
    failed = to_text(Failed("crashed", "it ran out of memory"))
    for doubtful, bound_ns in ((text, 1000), (failed, 1), (None, 1)):
        assert farm_module._measured(doubtful, bound_ns, "a") is None  # this machine measures it
    for wrong in ("{}", "x", '["source"]'):
        with pytest.raises(ValueError):
            farm_module._measured(wrong, 1, "a")
