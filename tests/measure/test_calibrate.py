"""Calibration: rates must not be below what the machine reaches, because bounds would then be too high."""

import ctypes
import dataclasses
import os
import time
from pathlib import Path

import pytest

from korch.costs.rates import Calibration
from korch.measure import calibrate as module
from korch.measure.calibrate import calibrate, kept_size, shared_sizes
from korch.measure.rate_loops import print_rates
from korch.system.deadline import Deadline
from korch.system.native import Code, runtime

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def library():
    return runtime()


@pytest.fixture
def loops(target, builder):
    return Code(builder.objects([print_rates(target)[0]]))


@pytest.fixture
def quick(target, monkeypatch):
    """This machine as if it had a small shared cache: to see past it, gigabytes may be needed."""
    monkeypatch.setattr(module, "TRIES", 1)
    monkeypatch.setattr(module, "CHUNKS", 8)
    monkeypatch.setattr(module, "MEMORY_BYTES", 1 << 20)
    return dataclasses.replace(target, l3_bytes=8 << 20)


def work_rate(loops, threads):
    return module._rate(loops, "multiply", 1.0, threads, 0, 10_000, 200, 10_000)


def test_this_machine_has_rates(quick, builder):
    found = calibrate(quick, builder)
    assert [level.limit_bytes for level in found.levels][-1] == 0
    for rates in (
        [level.read_bytes_per_s for level in found.levels],
        [level.write_bytes_per_s for level in found.levels],
    ):
        assert rates == sorted(rates, reverse=True), "a nearer level is not slower"
        assert rates[-1] > 1e6
    assert found.rate_flop_per_s > 1e6
    assert 0 < found.launch_ns < found.region_ns
    assert Calibration.from_text(found.to_text()) == found


@pytest.mark.parametrize(("left_s", "tries"), [(-1.0, 1), (1000.0, 3)])
def test_after_the_end_each_rate_is_tried_once(quick, builder, monkeypatch, left_s, tries):
    found, rate = [], module._MemoryRates.rate
    monkeypatch.setattr(module, "TRIES", 3)
    monkeypatch.setattr(module._MemoryRates, "rate", lambda own, *args: found.append(args) or rate(own, *args))
    assert calibrate(quick, builder, Deadline.after(left_s, time.monotonic())).rate_flop_per_s > 1e6
    (first,) = [one for one in found if one[2:3] == (1,)]  # the threads write to memory before it is measured
    assert {found.count(one) for one in set(found) - {first}} == {tries}


def resident_bytes():
    """What is resident now: the counters of `statm` may lag behind."""
    for line in Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Rss in smaps_rollup")


def test_memory_is_given_back(quick, builder):
    calibrate(quick, builder)
    before = resident_bytes()
    calibrate(quick, builder)
    assert resident_bytes() - before < 4 * quick.l3_bytes // 2


def test_the_count_of_threads_is_the_callers_again(library, quick, builder):
    first = library.korch_set_threads(ctypes.c_int(3))
    try:
        calibrate(quick, builder)
        assert library.korch_set_threads(ctypes.c_int(first)) == 3
    finally:
        library.korch_set_threads(ctypes.c_int(first))


def test_threads_that_wait_for_a_core_spoil_no_rate(loops):
    """Eight threads a core: each is waiting for seven eighths of the time."""
    alone, oversubscribed = work_rate(loops, 1), work_rate(loops, 8 * CORES)
    assert oversubscribed > 2 * CORES * alone


def test_threads_beyond_the_cores_add_nothing(quick, builder, monkeypatch):
    """Eight times the rate would be wrong, but neighbours come and go between the two."""
    monkeypatch.setattr(module, "TRIES", 4)
    few, many = (calibrate(dataclasses.replace(quick, threads=n * CORES), builder).rate_flop_per_s for n in (1, 8))
    assert many < 4 * few


@pytest.mark.parametrize("name", ["read", "write", "stream"])
def test_any_number_of_bytes_will_do(loops, target, monkeypatch, name):
    monkeypatch.setattr(module, "CHUNKS", 2)
    sizes = (0, 100, 511, 512, 4100, 5_000_001, (8 << 20) + 512)
    rates = module._MemoryRates(loops, dataclasses.replace(target, threads=2), max(sizes))
    found = [rates.rate(name, size) for size in sizes]
    assert found[0] == 0  # nothing fits: no rate, and no crash
    assert all(rate > 0 for rate in found[4:])


@pytest.mark.parametrize(
    ("l2_bytes", "l3_bytes", "sizes"),
    [(4 << 20, 128 << 20, [8, 16, 32, 64, 128]), (4 << 20, 6 << 20, [3, 6]), (1 << 20, 32 << 20, [2, 4, 8, 16, 32])],
)
def test_sizes_of_the_shared_cache_begin_beyond_the_cores_own(l2_bytes, l3_bytes, sizes):
    assert shared_sizes(l2_bytes, l3_bytes) == tuple(n << 20 for n in sizes)
    assert all(n > 0 for n in shared_sizes(l2_bytes, 0))


@pytest.mark.parametrize(
    ("rates", "kept"),
    [
        ((50, 50, 48, 30), 4),  # a part of a cache that others use, too
        ((50, 50, 48, 45), 8),
        ((50, 30, 48, 45), 1),  # what is kept beyond a size that is not, is chance
        ((27, 27, 27, 27), 1),  # noise: memory looks faster
    ],
)
def test_what_a_cache_keeps_is_read_faster_than_memory(rates, kept):
    assert kept_size([(1 << i, rate) for i, rate in enumerate(rates)], 28) == kept
