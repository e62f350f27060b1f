"""Machine -> calibration: the rates that lower bounds are made of.

A bound must never be above a true time, so each rate adds up what every thread reached at best, in
the best of several tries, and is then raised by a margin. Neighbours that take a core away spoil
samples, not the result.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from korch.libraries import load_globally
from korch.target import Target

FACT = "calibration-3"
"""The database keeps a calibration by this name; another way of measuring takes another name."""

MARGIN = 1.15
TRIES = 8
CHUNKS = 64
"""Samples of a thread in a try, 8 MiB each."""

MEMORY_BYTES = 256 << 20
"""What the threads walk over together to see main memory, at least."""

REGION_LIMIT_NS = 200_000_000


@dataclass(frozen=True, slots=True)
class Level:
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
class Calibration:
    """What the machine can do at best.

    Attributes:
        levels: from the nearest to the farthest; the last one has no limit.
        rate_flop_per_s: float32 multiply-adds, two operations each, on all threads.
        launch_ns: calling a kernel that does nothing.
        region_ns: an empty parallel region.
    """

    levels: tuple[Level, ...]
    rate_flop_per_s: float
    launch_ns: float
    region_ns: float

    def bound_ns(self, read_bytes: int, write_bytes: int, work_flop: int, cold_bytes: int = 0
                 ) -> int:  # fmt: skip
        """Return a time below which no kernel can read, write and compute as much.

        Reads and writes may overlap, and so may both with the computation. What is cold is read
        from the farthest level.
        """
        total = read_bytes + write_bytes
        level = next(x for x in self.levels if x.limit_bytes == 0 or total <= x.limit_bytes)
        seconds = max(
            read_bytes / level.read_bytes_per_s,
            write_bytes / level.write_bytes_per_s,
            total / (level.read_bytes_per_s + level.write_bytes_per_s),
            work_flop / self.rate_flop_per_s,
            cold_bytes / self.levels[-1].read_bytes_per_s,
        )
        return max(1, int(self.launch_ns + 1e9 * seconds))

    def raised(self, read_bytes: int, write_bytes: int, work_flop: int, seconds: float,
               cold_bytes: int = 0) -> Calibration:  # fmt: skip
        """Return rates at which so much work fits into a time that was measured.

        Only the rates that forbid it are raised, and with a memory level those nearer to the core.
        """
        total = read_bytes + write_bytes
        launch_ns = min(self.launch_ns, seconds * 1e9 / 2)
        seconds = max(seconds - launch_ns * 1e-9, 1e-10)
        own = next(
            i for i, x in enumerate(self.levels) if x.limit_bytes == 0 or total <= x.limit_bytes
        )
        read = max(self.levels[own].read_bytes_per_s, read_bytes / seconds * MARGIN)
        write = max(self.levels[own].write_bytes_per_s, write_bytes / seconds * MARGIN)
        both = total / seconds / (read + write)
        read, write = read * max(1.0, both * MARGIN), write * max(1.0, both * MARGIN)
        levels = tuple(
            Level(x.limit_bytes, max(x.read_bytes_per_s, read), max(x.write_bytes_per_s, write))
            if i <= own else x
            for i, x in enumerate(self.levels)
        )  # fmt: skip
        far = max(levels[-1].read_bytes_per_s, cold_bytes / seconds * MARGIN)
        levels = tuple(replace(x, read_bytes_per_s=max(x.read_bytes_per_s, far)) for x in levels)
        flop = max(self.rate_flop_per_s, work_flop / seconds * MARGIN)
        return Calibration(levels, flop, launch_ns, self.region_ns)

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Calibration:
        """Return the calibration that `to_text` gives as `text`."""
        data = json.loads(text)
        levels = tuple(Level(**level) for level in data.pop("levels"))
        return Calibration(levels=levels, **data)


def calibrate(timer: Path, target: Target) -> Calibration:
    """Measure the machine; takes about two seconds.

    Args:
        timer: the shared library built from `korch_timer.cpp`.
        target: threads and cache sizes.
    """
    load_globally(())
    library = ctypes.CDLL(str(timer))
    for name in ("read_rate", "write_rate", "stream_rate", "flop_rate"):
        getattr(library, f"korch_{name}").restype = ctypes.c_double
    library.korch_time.restype = library.korch_region_ns.restype = ctypes.c_int64
    before = library.korch_threads(ctypes.c_int(target.threads))
    try:
        nothing = [
            library.korch_time(library.korch_nothing, None, None, ctypes.c_int64(1000)) / 1e3
            for _ in range(1000)
        ]
        return Calibration(
            levels=_levels(library, target),
            rate_flop_per_s=_flop_rate(library, target) * MARGIN,
            launch_ns=min(nothing),
            region_ns=library.korch_region_ns(ctypes.c_int64(REGION_LIMIT_NS)),
        )
    finally:
        library.korch_threads(ctypes.c_int(before))  # the caller's own OpenMP code keeps its count


def _levels(library: ctypes.CDLL, target: Target) -> tuple[Level, ...]:
    # A level serves what fits the caches of all threads; half its size is sure to fit.
    threads, all_l2_bytes = target.threads, target.l2_bytes * target.threads
    farthest = max(MEMORY_BYTES, 4 * (target.l3_bytes + all_l2_bytes)) // threads
    sizes = [target.l1_bytes // 2, target.l2_bytes // 2,
             max(target.l3_bytes // (2 * threads), 1 << 16), farthest]  # fmt: skip
    limits = [target.l1_bytes * threads, all_l2_bytes, target.l3_bytes + all_l2_bytes, 0]
    reads, writes = [0.0] * len(sizes), [0.0] * len(sizes)
    for _ in range(TRIES):
        for i, size in enumerate(sizes):
            reads[i] = max(reads[i], _rate(library, "read", size, threads))
            writes[i] = max(writes[i], _rate(library, "write", size, threads))
        # Into main memory a kernel may write past the caches, which then need not read first.
        writes[-1] = max(writes[-1], _rate(library, "stream", farthest, threads))
    return tuple(
        Level(limit, max(reads[i:]) * MARGIN, max(writes[i:]) * MARGIN)
        for i, limit in enumerate(limits)
    )


def _rate(library: ctypes.CDLL, name: str, size_bytes: int, threads: int) -> float:
    function = getattr(library, f"korch_{name}_rate")
    return float(function(ctypes.c_int64(size_bytes), _at_once(threads), ctypes.c_int64(CHUNKS)))


def _flop_rate(library: ctypes.CDLL, target: Target) -> float:
    count, repeats = ctypes.c_int64(CHUNKS), ctypes.c_int64(10_000)
    threads = _at_once(target.threads)
    return max(float(library.korch_flop_rate(threads, count, repeats)) for _ in range(TRIES))


def _at_once(threads: int) -> ctypes.c_int:
    """Threads that share cores take turns: the best of each would count those cores twice."""
    return ctypes.c_int(min(threads, len(os.sched_getaffinity(0))))
