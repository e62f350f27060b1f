"""Processes that time kernels on one device exclude each other."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
from threading import Thread
from types import SimpleNamespace

import pytest

from korch.cuda.measure import lock
from korch.cuda.measure.lock import device_lock
from korch.cuda.runtime import executable, record
from tests.support.fake_clock import FakeTorch

HOLD = """
import sys
print("begun", flush=True)
from korch.cuda.measure.lock import device_lock
with device_lock():
    print("held", flush=True)
    sys.stdin.readline()
"""


def begin():
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    return process


def test_one_process_waits_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = begin()
    assert first.stdout.readline() == "held\n"
    second = begin()
    assert not select.select([second.stdout], [], [], 1.0)[0]
    first.communicate("\n")
    assert second.stdout.readline() == "held\n"
    second.communicate("\n")


def test_a_thread_enters_again_and_another_one_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def enter():
        with device_lock():
            seen.append("other")

    with device_lock():
        thread = Thread(target=enter)
        thread.start()
        with device_lock():
            seen.append("own")
        assert lock._held  # an inner context leaves the lock to the outer one
        thread.join(0.05)
        assert seen == ["own"]
    thread.join()
    assert seen == ["own", "other"] and not lock._held


def test_a_plan_is_timed_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = []
    owner = object.__new__(executable.CudaExecutable)
    owner._torch = FakeTorch()
    owner._own = SimpleNamespace(replay=lambda: held.append(bool(lock._held)) or owner._torch.work(0.0, 3.0))
    assert owner._clock()() == 3_000_000 and held == [True] * (1 + executable.REPLAYS)


@pytest.mark.parametrize(("times", "is_parallel"), [((2.0, 1.0), True), ((1.0, 2.0), False)])
def test_branches_are_compared_while_others_wait(times, is_parallel, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Made:
        def __init__(self, program):
            assert lock._held  # libraries time kernels here
            self.program = program

        def _clock(self):
            return lambda: int(1e6 * times[self.program.is_parallel]) if lock._held else 0

    monkeypatch.setattr(executable, "CudaExecutable", Made)
    monkeypatch.setattr(executable, "schedule", lambda steps: [executable.Turn(0, ()), executable.Turn(1, ())])
    program = record.CudaProgram(None, 90, False, (), (), (), None, {}, {})
    assert executable.with_best_branches(program).program.is_parallel is is_parallel


def test_nothing_is_waited_for_without_a_folder(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with device_lock(), device_lock() as held:
        assert held is None
