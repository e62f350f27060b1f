"""Machine -> calibration: the rates that lower bounds are made of.

A bound must never be above a true time, so each rate adds up what every thread reached at best, in
the best of several tries, and is then raised by a margin. Neighbours that take a core away spoil
samples, not the result.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from korch.candidate.candidate import ALL_PAIRS
from korch.libraries import load_globally
from korch.records import read_record
from korch.target import OF_COMPONENTS, Target

FACT = "calibration-5"
"""The database keeps a calibration by this name; another way of measuring takes another name."""

MARGIN = 1.15
TRIES = 8
CHUNKS = 64
"""Samples of a thread in a try, 8 MiB each."""

PASSES = 3
PASS_BYTES = 256 << 20
"""Passes of a thread in a try, and its longest one."""

MEMORY_BYTES = 256 << 20
"""What the threads walk over together to see main memory, at least."""

REGION_LIMIT_NS = 200_000_000


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A level of memory.

    Attributes:
        limit_bytes: what fits into it on all threads; 0 for no limit.
        read_bytes_per_s: how fast it is read.
        write_bytes_per_s: how fast it is written.
    """

    limit_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine, for the report; 0 where a rate is not known.

    Attributes:
        levels: the levels of memory, from the nearest to the farthest.
        rate_flop_per_s: float32 operations.
        split_flop_per_s: the same by matrix units, with split operands.
        copy_bytes_per_s: bytes read and written, on a device whose levels are not measured.
        launch_ns: the time to call a kernel that does nothing.
        region_ns: the time of an empty parallel region.
        kept_bytes: the size of what stays in the caches.
        margin: the factor by which the rates exceed the measured ones.
    """

    levels: tuple[MemoryLevel, ...] = ()
    rate_flop_per_s: float = 0.0
    split_flop_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    launch_ns: float = 0.0
    region_ns: float = 0.0
    kept_bytes: int = 0
    margin: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a kernel.

    Attributes:
        read_bytes: read in all.
        write_bytes: written.
        flop: floating-point operations.
        cold_bytes: of the bytes read, those that come from the farthest level.
        pairs: the products of components by which matrix units multiply two numbers, a half for bytes; 0 if vector
            units multiply.
    """

    read_bytes: int
    write_bytes: int
    flop: int
    cold_bytes: int = 0
    pairs: float = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the machine can do at best.

    Attributes:
        levels: from the nearest to the farthest; the last one has no limit.
        rate_flop_per_s: float32 multiply-adds, two operations each, on all threads.
        split_flop_per_s: the same of numbers split into three components of bfloat16; 0 if nothing multiplies these.
        launch_ns: calling a kernel that does nothing.
        region_ns: an empty parallel region.
        kept_bytes: what is still in the caches when it is read again and again. A virtual machine
            is told the size of a cache that it has but a part of.
    """

    levels: tuple[MemoryLevel, ...]
    rate_flop_per_s: float
    launch_ns: float
    region_ns: float
    split_flop_per_s: float = 0.0
    kept_bytes: int = 0

    def bound_ns(self, work: Work) -> int:
        """Return the lower bound of the time of a kernel that does this work.

        Reads and writes may overlap, and so may both with the computation. What is cold is read
        from the farthest level.
        """
        level = self.levels[self._level(work)]
        seconds = max(
            work.read_bytes / level.read_bytes_per_s,
            work.write_bytes / level.write_bytes_per_s,
            work.moved_bytes / (level.read_bytes_per_s + level.write_bytes_per_s),
            work.flop / self.flop_per_s(work),
            work.cold_bytes / self.levels[-1].read_bytes_per_s,
        )
        return max(1, int(self.launch_ns + 1e9 * seconds))

    def raised(self, work: Work, seconds: float) -> Calibration:
        """Return rates at which so much work fits into a time that was measured.

        Only the rates that forbid it are raised, and with a memory level those nearer to the core.
        """
        launch_ns = min(self.launch_ns, seconds * 1e9 / 2)
        seconds = max(seconds - launch_ns * 1e-9, 1e-10)
        own = self._level(work)
        read = max(self.levels[own].read_bytes_per_s, work.read_bytes / seconds * MARGIN)
        write = max(self.levels[own].write_bytes_per_s, work.write_bytes / seconds * MARGIN)
        both = work.moved_bytes / seconds / (read + write)
        read, write = read * max(1.0, both * MARGIN), write * max(1.0, both * MARGIN)
        levels = tuple(
            MemoryLevel(x.limit_bytes, max(x.read_bytes_per_s, read), max(x.write_bytes_per_s, write))
            if i <= own
            else x
            for i, x in enumerate(self.levels)
        )
        far = max(levels[-1].read_bytes_per_s, work.cold_bytes / seconds * MARGIN)
        levels = tuple(replace(x, read_bytes_per_s=max(x.read_bytes_per_s, far)) for x in levels)
        flop = max(self.flop_per_s(work), work.flop / seconds * MARGIN)
        found: dict[str, Any] = {"levels": levels, "launch_ns": launch_ns}
        if self._splits(work):
            found["split_flop_per_s"] = flop * work.pairs / ALL_PAIRS
        else:
            found["rate_flop_per_s"] = flop
        return replace(self, **found)

    def _level(self, work: Work) -> int:
        return next(
            i for i, level in enumerate(self.levels) if level.limit_bytes == 0 or work.moved_bytes <= level.limit_bytes
        )

    def _splits(self, work: Work) -> bool:
        return work.pairs > 0 and self._split_flop_per_s(work) > self.rate_flop_per_s

    def _split_flop_per_s(self, work: Work) -> float:
        return self.split_flop_per_s * ALL_PAIRS / work.pairs

    def flop_per_s(self, work: Work) -> float:
        """Return the rate of the faster units that may be used."""
        return self._split_flop_per_s(work) if self._splits(work) else self.rate_flop_per_s

    @property
    def rates(self) -> Rates:
        """Its rates, for the report."""
        return Rates(**{f.name: getattr(self, f.name) for f in fields(self)}, margin=MARGIN)

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Calibration:
        """Return the calibration that `to_text` gives as `text`."""
        return read_record(Calibration, json.loads(text), "calibration")


def calibrate(timer: Path, target: Target) -> Calibration:
    """Measure the machine; takes about three seconds.

    Args:
        timer: the shared library built from `korch_timer.cpp`.
        target: threads and cache sizes.
    """
    load_globally(())
    library = ctypes.CDLL(str(timer))
    for name in ("read", "pass", "write", "stream", "flop", "split"):
        getattr(library, f"korch_{name}_rate").restype = ctypes.c_double
    library.korch_time.restype = library.korch_region_ns.restype = ctypes.c_int64
    before = library.korch_threads(ctypes.c_int(target.threads))
    try:
        nothing = [
            library.korch_time(library.korch_nothing, None, None, ctypes.c_int64(1000)) / 1e3 for _ in range(1000)
        ]
        levels, kept_bytes = _levels(library, target)
        return Calibration(
            levels=levels,
            rate_flop_per_s=_flop_rate(library, target) * MARGIN,
            launch_ns=min(nothing),
            region_ns=library.korch_region_ns(ctypes.c_int64(REGION_LIMIT_NS)),
            split_flop_per_s=_flop_rate(library, target, "split") * MARGIN if target.isa in OF_COMPONENTS else 0.0,
            kept_bytes=kept_bytes,
        )
    finally:
        library.korch_free_memory()
        library.korch_threads(ctypes.c_int(before))  # the caller's own OpenMP code keeps its count


def _levels(library: ctypes.CDLL, target: Target) -> tuple[tuple[MemoryLevel, ...], int]:
    """Return the levels of memory, and how many bytes the farthest cache keeps."""
    # A level serves what fits the caches of all threads; half its size is sure to fit.
    threads, all_l2_bytes = target.threads, target.l2_bytes * target.threads
    all_bytes = target.l3_bytes + all_l2_bytes
    farthest = max(MEMORY_BYTES, 4 * all_bytes) // threads
    shared = [n // threads for n in shared_sizes(all_l2_bytes, target.l3_bytes)]
    sizes = [target.l1_bytes // 2, target.l2_bytes // 2, shared[0], farthest]
    reads, writes = [0.0] * len(sizes), [0.0] * len(sizes)
    passes = dict.fromkeys((*shared, farthest), 0.0)
    for _ in range(TRIES):
        for i, size in enumerate(sizes):
            reads[i] = max(reads[i], _rate(library, "read", size, threads))
            writes[i] = max(writes[i], _rate(library, "write", size, threads))
        # Into main memory a kernel may write past the caches, which then need not read first.
        writes[-1] = max(writes[-1], _rate(library, "stream", farthest, threads))
        for size in passes:
            passes[size] = max(passes[size], _pass_rate(library, size, threads))
    kept = threads * kept_size([(n, passes[n]) for n in shared], passes[farthest])
    # A bound must be right for what is mostly kept, too: memory is taken to begin a step later.
    limits = [target.l1_bytes * threads, all_l2_bytes, min(2 * kept, all_bytes), 0]
    levels = tuple(
        MemoryLevel(limit, max(reads[i:]) * MARGIN, max(writes[i:]) * MARGIN) for i, limit in enumerate(limits)
    )
    return levels, kept


def shared_sizes(all_l2_bytes: int, l3_bytes: int) -> tuple[int, ...]:
    """Return sizes from the cores' own caches, or half the shared one, to all of it, in doubles."""
    sizes = [max(l3_bytes, 1 << 18), max(l3_bytes, 1 << 18) // 2]
    while sizes[-1] >= 4 * all_l2_bytes:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


def kept_size(rates: Sequence[tuple[int, float]], far_rate: float) -> int:
    """Return the largest size that is read again faster than memory is.

    Args:
        rates: sizes, from the least one on, and how fast each is read again and again.
        far_rate: how fast main memory is read.

    Returns:
        The last size up to which all rates are nearer to the first one than to memory's.
    """
    least = math.sqrt(rates[0][1] * far_rate)
    kept = itertools.takewhile(lambda found: found[1] >= least, rates)
    return max((size for size, _ in kept), default=rates[0][0])


def _rate(library: ctypes.CDLL, name: str, size_bytes: int, threads: int) -> float:
    function = getattr(library, f"korch_{name}_rate")
    return float(function(ctypes.c_int64(size_bytes), _at_once(threads), ctypes.c_int64(CHUNKS)))


def _pass_rate(library: ctypes.CDLL, size_bytes: int, threads: int) -> float:
    """Return the rate of whole passes over memory: parts of it that a cache keeps do not count."""
    pass_bytes = ctypes.c_int64(min(size_bytes, PASS_BYTES))
    size, count = ctypes.c_int64(size_bytes), ctypes.c_int64(PASSES)
    return float(library.korch_pass_rate(size, _at_once(threads), count, pass_bytes))


def _flop_rate(library: ctypes.CDLL, target: Target, units: str = "flop") -> float:
    count, repeats = ctypes.c_int64(CHUNKS), ctypes.c_int64(10_000 if units == "flop" else 1000)
    threads = _at_once(target.threads)
    rate = getattr(library, f"korch_{units}_rate")
    return max(float(rate(threads, count, repeats)) for _ in range(TRIES))


def _at_once(threads: int) -> ctypes.c_int:
    """Return the number of threads that can run at once, because the best rate of each counts."""
    return ctypes.c_int(min(threads, len(os.sched_getaffinity(0))))
