"""Machine -> calibration: the rates that lower bounds are made of.

A bound must never be above a true time, so each rate is the best of several tries and then raised
by a margin.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from korch.target import Target

MARGIN = 1.15
TRIES = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the machine can do at best.

    Attributes:
        levels: (bytes, bytes per second) per level of memory: data of up to so many bytes can be
            read so fast; the last level has no limit and its bytes are 0.
        rate_flop_per_s: float32 multiply-adds, two operations each, on all threads.
        launch_ns: calling a kernel that does nothing.
        region_ns: an empty parallel region.
    """

    levels: tuple[tuple[int, float], ...]
    rate_flop_per_s: float
    launch_ns: float
    region_ns: float

    def bound_ns(self, size_bytes: int, work_flop: int) -> int:
        """Return a time below which no kernel can read, write and compute as much."""
        rate = next((r for limit, r in self.levels if limit == 0 or size_bytes <= limit))
        memory_s = size_bytes / rate
        compute_s = work_flop / self.rate_flop_per_s
        return max(1, int(self.launch_ns + 1e9 * max(memory_s, compute_s)))

    def raised(self, size_bytes: int, work_flop: int, seconds: float) -> Calibration:
        """Return rates at which so much work fits into a time that was measured."""
        rate = size_bytes / seconds * MARGIN
        levels = []
        for limit, old in self.levels:
            is_own = limit == 0 or size_bytes <= limit
            levels.append((limit, max(old, rate) if is_own else old))
        # Nearer levels are at least as fast as farther ones.
        for i in range(len(levels) - 2, -1, -1):
            levels[i] = (levels[i][0], max(levels[i][1], levels[i + 1][1]))
        return Calibration(
            levels=tuple(levels),
            rate_flop_per_s=max(self.rate_flop_per_s, work_flop / seconds * MARGIN),
            launch_ns=min(self.launch_ns, seconds * 1e9 / 2),
            region_ns=self.region_ns,
        )

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Calibration:
        """Return the calibration that `to_text` gives as `text`."""
        data = json.loads(text)
        levels = tuple((int(limit), float(rate)) for limit, rate in data.pop("levels"))
        return Calibration(levels=levels, **data)


def calibrate(timer: Path, target: Target) -> Calibration:
    """Measure the machine; takes about a second.

    Args:
        timer: the shared library built from `korch_timer.cpp`.
        target: threads and cache sizes.
    """
    library = ctypes.CDLL(str(timer))
    library.korch_read_rate.restype = ctypes.c_double
    library.korch_flop_rate.restype = ctypes.c_double
    library.korch_region_ns.restype = ctypes.c_double
    library.korch_time.restype = ctypes.c_int64
    threads = ctypes.c_int(target.threads)
    library.korch_threads(threads)

    def read_rate(size_bytes: int) -> float:
        repeats = ctypes.c_int64(max(1, (32 << 20) // size_bytes))
        return max(
            float(library.korch_read_rate(ctypes.c_int64(size_bytes), threads, repeats))
            for _ in range(TRIES)
        )

    nothing = [
        library.korch_time(library.korch_nothing, None, None, ctypes.c_int64(100_000)) / 1e5
        for _ in range(TRIES)
    ]
    # A level serves what fits the caches of all threads; half its size is sure to fit.
    rates = [read_rate(size // 2) for size in (target.l1_bytes, target.l2_bytes)]
    rates += [
        read_rate(max(target.l3_bytes // (2 * target.threads), 1 << 16)),
        read_rate(128 << 20),
    ]
    limits = [target.l1_bytes * target.threads, target.l2_bytes * target.threads,
              target.l3_bytes + target.l2_bytes * target.threads, 0]  # fmt: skip
    best = [max(rates[i:]) * MARGIN for i in range(len(rates))]
    flop = max(
        float(library.korch_flop_rate(threads, ctypes.c_int64(100_000))) for _ in range(TRIES)
    )
    return Calibration(
        levels=tuple(zip(limits, best, strict=True)), rate_flop_per_s=flop * MARGIN,
        launch_ns=min(nothing),
        region_ns=min(float(library.korch_region_ns(ctypes.c_int64(2000))) for _ in range(TRIES)),
    )  # fmt: skip
