"""Machine -> calibration: the rates that lower bounds are made of.

A bound must never be above a true time, so each rate is the best of several tries and then raised
by a margin.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from korch.libraries import load_globally
from korch.target import Target

MARGIN = 1.15
TRIES = 16


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

    def bound_ns(self, read_bytes: int, write_bytes: int, work_flop: int) -> int:
        """Return a time below which no kernel can read, write and compute as much.

        Reads and writes may overlap, and so may both with the computation.
        """
        total = read_bytes + write_bytes
        level = next(x for x in self.levels if x.limit_bytes == 0 or total <= x.limit_bytes)
        seconds = max(
            read_bytes / level.read_bytes_per_s,
            write_bytes / level.write_bytes_per_s,
            total / (level.read_bytes_per_s + level.write_bytes_per_s),
            work_flop / self.rate_flop_per_s,
        )
        return max(1, int(self.launch_ns + 1e9 * seconds))

    def raised(self, read_bytes: int, write_bytes: int, work_flop: int, seconds: float
               ) -> Calibration:  # fmt: skip
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
    """Measure the machine; takes about a second.

    Args:
        timer: the shared library built from `korch_timer.cpp`.
        target: threads and cache sizes.
    """
    load_globally(())
    library = ctypes.CDLL(str(timer))
    library.korch_read_rate.restype = ctypes.c_double
    library.korch_write_rate.restype = ctypes.c_double
    library.korch_flop_rate.restype = ctypes.c_double
    library.korch_region_ns.restype = ctypes.c_double
    library.korch_time.restype = ctypes.c_int64
    threads = ctypes.c_int(target.threads)
    library.korch_threads(threads)

    def best_rate(function: Any, size_bytes: int) -> float:
        repeats = ctypes.c_int64(max(1, (32 << 20) // size_bytes))
        return max(
            float(function(ctypes.c_int64(size_bytes), threads, repeats)) for _ in range(TRIES)
        )

    nothing = [
        library.korch_time(library.korch_nothing, None, None, ctypes.c_int64(100_000)) / 1e5
        for _ in range(TRIES)
    ]
    # A level serves what fits the caches of all threads; half its size is sure to fit.
    sizes = [target.l1_bytes // 2, target.l2_bytes // 2,
             max(target.l3_bytes // (2 * target.threads), 1 << 16), 128 << 20]  # fmt: skip
    limits = [target.l1_bytes * target.threads, target.l2_bytes * target.threads,
              target.l3_bytes + target.l2_bytes * target.threads, 0]  # fmt: skip
    reads = [best_rate(library.korch_read_rate, size) for size in sizes]
    writes = [best_rate(library.korch_write_rate, size) for size in sizes]
    levels = [
        Level(limit, max(reads[i:]) * MARGIN, max(writes[i:]) * MARGIN)
        for i, limit in enumerate(limits)
    ]
    flop = max(
        float(library.korch_flop_rate(threads, ctypes.c_int64(100_000))) for _ in range(TRIES)
    )
    return Calibration(
        levels=tuple(levels), rate_flop_per_s=flop * MARGIN, launch_ns=min(nothing),
        region_ns=min(float(library.korch_region_ns(ctypes.c_int64(2000))) for _ in range(TRIES)),
    )  # fmt: skip
