"""Fixtures: this machine as the target, and a compiler with its own cache."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from korch.costs.rates import Calibration, MemoryLevel
from korch.measure.calibrate import FACT
from korch.measure.compiler import Builder
from korch.measure.database import Database
from korch.measure.llvm_process import llvm_identity
from korch.options import default_threads
from korch.target import Target, detect_target

# The same examples on every machine, however slow: a change is judged by itself, not by its luck.
# `--hypothesis-profile default` looks for others.
settings.register_profile(
    "korch", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("korch")

# A shell ignores interrupts in background jobs, and children inherit that: tests that interrupt them would wait.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # the order is shuffled before
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests marked as long, so that no process is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def no_fresh_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time no plan in a process of its own, which takes a second; `test_fresh.py` does it through its module."""
    monkeypatch.setattr("korch.pipeline.build.time_fresh", lambda *arguments: None)


class _Faults(logging.Handler):
    """Keeps what is logged of kernels that do not compile, and of rules and providers that raise errors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "uncompiled") or hasattr(record, "fault"):
            self.found.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_fault_is_survived(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a kernel does not compile, or a rule or a provider raises, unless it is meant to."""
    handler = _Faults()
    names = ("korch.measure", "korch.validation", "korch.equivalence", "korch.provider", "korch.runtime")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    if not any(request.node.get_closest_marker(name) for name in ("uncompiled", "fault")):
        assert handler.found == []


@pytest.fixture(scope="session")
def target() -> Target:
    return detect_target(threads=2, compiler=llvm_identity())


@pytest.fixture(scope="session")
def builder(target: Target, cache_folder: Path) -> Builder:
    return Builder(target.isa, cache_folder)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


RATES = Calibration(
    levels=(
        MemoryLevel(96 << 10, 8e11, 5e11),
        MemoryLevel(4 << 20, 4e11, 1.3e11),
        MemoryLevel(64 << 20, 8e10, 7e10),
        MemoryLevel(0, 5e10, 5e10),
    ),
    rate_flop_per_s=5e11,
    launch_ns=1.1,
    region_ns=545.0,
    split_flop_per_s=1.2e12,
    kept_bytes=32 << 20,
)
"""What two cores do at best, once and for all: rates that are measured take ten seconds of
computing for each number of threads, and another one on each machine decides what is tried."""


@pytest.fixture(scope="session", autouse=True)
def rates_are_known() -> Iterator[None]:
    """Take the rates of the machine as known in new cache folders, too; other processes read them (`calibrated`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("korch.measure.cpu.calibrate", lambda *_: RATES)
        yield


@pytest.fixture(scope="session")
def calibrated() -> Callable[[Path], Path]:
    """Return what makes a cache in which the machine's rates are known."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for threads, units in product({1, 2, 4, default_threads()}, (True, False)):
            machine = detect_target(threads, llvm_identity(), matrix_units=units)
            database = Database(folder, machine.fingerprint)
            database.put_fact(FACT, RATES.to_text())
            database.close()
        return folder

    return make


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory, calibrated: Callable[[Path], Path]) -> Path:
    """One cache for all tests that optimize, in all test processes: each kernel is built once."""
    folder = tmp_path_factory.getbasetemp()
    in_all = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return calibrated(in_all / "korch-cache")
