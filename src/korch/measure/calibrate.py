"""Machine -> calibration: the rates from which lower bounds are computed.

A bound must never exceed a true time. So each rate is the sum of the best rates of all threads, from the best of
several tries, raised by a margin. Other processes that take a core away disturb single samples, not the result.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from korch.candidate.candidate import ALL_PAIRS
from korch.measure.compiler import Builder
from korch.measure.rate_loops import CHAINS, print_rates
from korch.records import read_record
from korch.system.deadline import Deadline
from korch.system.native import Code, runtime
from korch.target import Target

FACT = "calibration-6"
"""The name of the calibration in the database. It must change when the way of measuring changes."""

MARGIN = 1.15
TRIES = 8
CHUNKS = 64
"""The number of samples of a thread in a try, of 8 MiB each."""

PASSES = 3
PASS_BYTES = 256 << 20
"""The number of passes of a thread in a try, and the size of the largest pass."""

MEMORY_BYTES = 256 << 20
"""The least size that all threads together read or write to measure main memory."""

REGION_LIMIT_NS = 200_000_000


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A level of memory."""

    limit_bytes: int  # the bytes that fit into it, for all threads together; 0 for no limit
    read_bytes_per_s: float  # the read rate
    write_bytes_per_s: float  # the write rate


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine, for the report; 0 where a rate is not known."""

    levels: tuple[MemoryLevel, ...] = ()  # the levels of memory, from the nearest to the farthest
    rate_flop_per_s: float = 0.0  # float32 operations
    split_flop_per_s: float = 0.0  # float32 operations by matrix units, with split operands
    copy_bytes_per_s: float = 0.0  # bytes read and written, on a device whose levels are not measured
    launch_ns: float = 0.0  # the time to call a kernel that does nothing
    region_ns: float = 0.0  # the time of an empty parallel region
    kept_bytes: int = 0  # the size of data that remain in the caches between runs
    margin: float = 1.0  # the factor by which the rates exceed the measured ones


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a kernel."""

    read_bytes: int  # all bytes that it reads
    write_bytes: int  # all bytes that it writes
    flop: int  # floating-point operations
    cold_bytes: int = 0  # the part of the bytes read that comes from the farthest level
    # the number of products of parts by which matrix units multiply two numbers, a half for bytes; 0 if vector units
    # multiply
    pairs: float = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Calibration:
    """The best rates of the machine."""

    levels: tuple[MemoryLevel, ...]  # the levels of memory, from the nearest to the farthest; the last one has no limit
    rate_flop_per_s: float  # float32 multiply-adds, two operations each, on all threads
    launch_ns: float  # the time to call a kernel that does nothing
    region_ns: float  # the time of an empty parallel region
    # the same for numbers split into three bfloat16 parts; 0 without units that multiply these
    split_flop_per_s: float = 0.0
    # the size of data that remain in the caches when they are read repeatedly. It is measured, because a virtual
    # machine may have only a part of the cache whose size the system reports.
    kept_bytes: int = 0

    def bound_ns(self, work: Work) -> int:
        """Return the lower bound of the time of a kernel that does this work.

        Reads, writes and computation may overlap. Cold bytes are read from the farthest level.
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
        """Return rates that are high enough for this work to fit into a measured time.

        Only rates that are too low for it are raised. With a level of memory, the levels nearer to the core are raised.
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
        """Return the rate of the fastest units that the kernel may use."""
        return self._split_flop_per_s(work) if self._splits(work) else self.rate_flop_per_s

    @property
    def rates(self) -> Rates:
        """The rates for the report."""
        return Rates(**{f.name: getattr(self, f.name) for f in fields(self)}, margin=MARGIN)

    def to_text(self) -> str:
        """Return the calibration as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Calibration:
        """Return the calibration that `to_text` gives as `text`."""
        return read_record(Calibration, json.loads(text), "calibration")


def calibrate(target: Target, builder: Builder, end: Deadline | None = None) -> Calibration:
    """Measure the machine, which takes about three seconds if it is idle.

    `builder` compiles the loops that are timed. `end`: when each rate is tried only once more, if it was not tried yet;
    rates may then be too low.
    """
    end = end or Deadline()
    library, (source, split_work) = runtime(), print_rates(target)
    loops = Code(builder.objects([source]))
    has_split = split_work and (target.isa != "amx" or library.korch_matrix_units())
    before = library.korch_set_threads(ctypes.c_int(target.threads))
    try:
        nothing = [
            library.korch_time(library.korch_nothing, None, None, ctypes.c_int64(1000)) / 1e3 for _ in range(1000)
        ]
        levels, kept_bytes = _levels(loops, target, end)
        return Calibration(
            levels=levels,
            rate_flop_per_s=_flop_rate(loops, target, end) * MARGIN,
            launch_ns=min(nothing),
            region_ns=library.korch_region_ns(ctypes.c_int64(REGION_LIMIT_NS)),
            split_flop_per_s=_flop_rate(loops, target, end, split_work) * MARGIN if has_split else 0.0,
            kept_bytes=kept_bytes,
        )
    finally:
        library.korch_free_memory()
        library.korch_set_threads(ctypes.c_int(before))


def _levels(loops: Code, target: Target, end: Deadline) -> tuple[tuple[MemoryLevel, ...], int]:
    """Return the levels of memory, and how many bytes the farthest cache keeps."""
    # A level's limit is the size of the caches of all threads; it is measured with half of that, which surely fits.
    threads, all_l2_bytes = target.threads, target.l2_bytes * target.threads
    all_bytes = target.l3_bytes + all_l2_bytes
    farthest = max(MEMORY_BYTES, 4 * all_bytes) // threads
    shared = [n // threads for n in shared_sizes(all_l2_bytes, target.l3_bytes)]
    sizes = [target.l1_bytes // 2, target.l2_bytes // 2, shared[0], farthest]
    reads, writes = [0.0] * len(sizes), [0.0] * len(sizes)
    passes = dict.fromkeys((*shared, farthest), 0.0)
    for _ in _tries(end):
        for i, size in enumerate(sizes):
            reads[i] = max(reads[i], _rate(loops, "read", size, threads))
            writes[i] = max(writes[i], _rate(loops, "write", size, threads))
        # A kernel may write to main memory with streaming stores, which need not read the cache lines first.
        writes[-1] = max(writes[-1], _rate(loops, "stream", farthest, threads))
        for size in passes:
            passes[size] = max(passes[size], _rate(loops, "read", size, threads, in_passes=True))
    kept = threads * kept_size([(n, passes[n]) for n in shared], passes[farthest])
    # A bound must hold for data that are mostly in the cache, too: main memory is assumed to begin one step later.
    limits = [target.l1_bytes * threads, all_l2_bytes, min(2 * kept, all_bytes), 0]
    levels = tuple(
        MemoryLevel(limit, max(reads[i:]) * MARGIN, max(writes[i:]) * MARGIN) for i, limit in enumerate(limits)
    )
    return levels, kept


def shared_sizes(all_l2_bytes: int, l3_bytes: int) -> tuple[int, ...]:
    """Return doubling sizes, from about that of the private caches, or half the shared cache, to the shared cache."""
    sizes = [max(l3_bytes, 1 << 18), max(l3_bytes, 1 << 18) // 2]
    while sizes[-1] >= 4 * all_l2_bytes:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


def kept_size(rates: Sequence[tuple[int, float]], far_rate: float) -> int:
    """Return the largest size whose repeated reading is faster than main memory.

    `rates`: sizes in ascending order, and the rate at which each is read repeatedly.

    Returns:
        The last size up to which all rates are nearer to the first rate than to main memory's (by ratio).
    """
    least = math.sqrt(rates[0][1] * far_rate)
    kept = itertools.takewhile(lambda found: found[1] >= least, rates)
    return max((size for size, _ in kept), default=rates[0][0])


def _rate(loops: Code, name: str, size_bytes: int, threads: int, *, in_passes: bool = False) -> float:
    """Return a rate of memory; that of complete passes is not raised by parts that are still in a cache."""
    chunks, chunk_bytes = (PASSES, min(size_bytes, PASS_BYTES)) if in_passes else (CHUNKS, 0)
    numbers = ctypes.c_int64(chunks), ctypes.c_int64(chunk_bytes)
    loop, size = ctypes.c_void_p(loops.address(name)), ctypes.c_int64(size_bytes)
    return float(runtime().korch_memory_rate(loop, size, _at_once(threads), *numbers))


def _flop_rate(loops: Code, target: Target, end: Deadline, split_work: float = 0.0) -> float:
    """Return the rate of multiply-adds, or that of products of components if the work of an iteration is given."""
    name, repeats = ("multiply_split", 1000) if split_work else ("multiply", 10_000)
    loop, work = ctypes.c_void_p(loops.address(name)), split_work or 2.0 * CHAINS * target.lanes
    numbers = _at_once(target.threads), ctypes.c_int64(CHUNKS), ctypes.c_int64(repeats), ctypes.c_double(work)
    return max(float(runtime().korch_work_rate(loop, *numbers)) for _ in _tries(end))


def _tries(end: Deadline) -> Iterator[int]:
    """Yield the number of each try: all of them, or only those that begin before the end, and always the first."""
    return itertools.takewhile(lambda turn: turn == 0 or not end.is_over, range(TRIES))


def _at_once(threads: int) -> ctypes.c_int:
    """Return the number of threads that can run at once: more would add up best rates of the same core."""
    return ctypes.c_int(min(threads, len(os.sched_getaffinity(0))))
