"""Processes that time kernels on one device exclude each other."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile

from korch.cuda.measure.lock import device_lock

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


def test_nothing_is_waited_for_without_a_folder(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with device_lock(), device_lock() as held:
        assert held is None
