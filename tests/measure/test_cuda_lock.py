"""Processes that time kernels on one device exclude each other."""

import select
import subprocess
import sys
import tempfile
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"in order": 3.0, "branches": 2.0, "early": 0.5, "branches early": 1.0}, "branches early"),
        ({"in order": 2.0, "branches": 3.0, "early": 1.0}, "early"),
        ({"in order": 1.0, "branches": 2.0, "early": 3.0}, "in order"),
        ({"in order": 2.0, "branches": 1.0}, "branches"),  # the driver can't capture the other one
        ({"in order": 2.0, "branches": 3.0, "early": 1.0, "wrong": "early"}, "in order"),
    ],
)
def test_schedules_are_compared_while_others_wait(times, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    real = executable.CudaExecutable

    class Made:
        def __init__(self, program):
            assert lock._held  # libraries time kernels here
            self._program, self._is_early, self.schedules_ns = program, program.is_early, {}
            self.schedule = self._own = real.schedule.fget(self)
            if self.schedule not in times:
                raise RuntimeError("capture failed")

        def _clock(self):
            return lambda: int(1e6 * times[self.schedule]) if lock._held else 0

    monkeypatch.setattr(executable, "CudaExecutable", Made)
    monkeypatch.setattr(executable, "use_equal_inputs", lambda one, other: None)
    monkeypatch.setattr(executable, "agree", lambda one, other: other != times.get("wrong"))
    monkeypatch.setattr(executable, "schedule", lambda steps: [executable.Turn(0, ()), executable.Turn(1, ())])
    program = record.CudaProgram(None, 90, False, (), (), (), None, {}, {})
    early = replace(program, is_early=True)
    found = executable.with_best_schedule(program, early)
    assert found.schedule == chosen and found.schedules_ns[chosen] == min(found.schedules_ns.values())
    expected = "branches" if times["branches"] < times["in order"] else "in order"
    assert executable.with_best_schedule(program).schedule == expected


def test_nothing_is_waited_for_without_a_folder(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with device_lock(), device_lock() as held:
        assert held is None
