"""Deadlines, and the effect of an interrupt on a search."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.models import build
from korch.system.deadline import Deadline, stopped_by_interrupt


def test_a_deadline_is_over_at_its_time_or_when_told() -> None:
    now_s = time.monotonic()
    assert Deadline().left_s is None and not Deadline().is_over
    assert Deadline(now_s - 1).is_over
    later = Deadline.after(1000, now_s)
    assert 990 < (later.left_s or 0) <= 1000
    sooner, never = later.until(now_s + 10), Deadline.after(None, now_s).until(None)
    assert (sooner.left_s or 99) <= 10 and (later.until(now_s + 5000).left_s or 0) <= 1000
    assert never.left_s is None
    sooner.stop()
    assert later.is_over and later.until(None).is_over and not never.is_over


def test_the_first_interrupt_stops_and_the_second_raises() -> None:
    deadline, told = Deadline(), []
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # runners may ignore it
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stopped_by_interrupt(deadline, lambda: told.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
        assert deadline.is_over and told == [1]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert signal.signal(signal.SIGINT, outer) is before


INTERRUPTED_AT_FIRST_SOLUTION = """
import logging, os, signal, sys
import korch
from korch.limits import SearchLimits
from korch.records import to_json

def interrupt(record):
    if "solved:" in record.getMessage():
        logger.removeFilter(interrupt)
        os.kill(os.getpid(), signal.SIGINT)
    return True

logger = logging.getLogger("korch.orchestrate")
logger.addFilter(interrupt)
logging.getLogger("korch").setLevel(logging.INFO)
logging.getLogger("korch").addHandler(logging.StreamHandler(sys.stderr))
model, output, cache = sys.argv[1:]
limits = SearchLimits(max_primitives=4)
found = korch.optimize(model, cache_folder=cache, search=limits)
found.save(output)
print(to_json(found.report))
"""
"""The search is under way then: a signal from another process may come when it has ended."""


@pytest.mark.long
def test_an_interrupted_search_builds_its_best_plan(tmp_path: Path, calibrated: Callable[[Path], Path]) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(build("tiny_transformer").SerializeToString())
    output = tmp_path / "m.korch"
    command = [
        sys.executable,
        "-c",
        INTERRUPTED_AT_FIRST_SOLUTION,
        str(model),
        str(output),
        str(calibrated(tmp_path / "cache")),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and output.exists(), done.stderr
    assert "solved:" in done.stderr
    report = json.loads(done.stdout)
    assert report["stopped_by_budget"] and report["max_error"] < 1e-3
