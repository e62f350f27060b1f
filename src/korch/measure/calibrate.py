"""Machine -> calibration: the rates from which lower bounds are computed.

A bound must never exceed a true time. So each rate is the sum of the best rates of all threads, from the best of
several tries, raised by a margin. Other processes that take a core away disturb single samples, not the result.
"""

import ctypes
import itertools
import math
import os
from collections.abc import Iterator, Sequence

from korch.costs.rates import MARGIN, Calibration, MemoryLevel
from korch.measure.compiler import Builder
from korch.measure.rate_loops import CHAINS, LOADS, print_rates
from korch.system.alignment import address_of, aligned_bytes
from korch.system.deadline import Deadline
from korch.system.native import Code, runtime
from korch.target import Target

FACT = "calibration-6"
"""The name of the calibration in the database. It must change when the way of measuring changes."""

TRIES = 8
CHUNKS = 64
CHUNK_BYTES = 8 << 20
"""The number of samples of a thread in a try, and their size: they take much longer than the clock's resolution, and
less than a time slice."""

PASSES = 3
PASS_BYTES = 256 << 20
"""The number of passes of a thread in a try, and the size of the largest pass."""

MEMORY_BYTES = 256 << 20
"""The least size that all threads together read or write to measure main memory."""

LAUNCH_LIMIT_NS, REGION_LIMIT_NS = 20_000_000, 200_000_000


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
        levels, kept_bytes = _levels(loops, target, end)
        return Calibration(
            levels=levels,
            rate_flop_per_s=_flop_rate(loops, target, end) * MARGIN,
            launch_ns=_least_ns(loops, "nothing", 1000, LAUNCH_LIMIT_NS) / 1e3,
            region_ns=_least_ns(loops, "region", 1, REGION_LIMIT_NS),
            split_flop_per_s=_flop_rate(loops, target, end, split_work) * MARGIN if has_split else 0.0,
            kept_bytes=kept_bytes,
        )
    finally:
        library.korch_set_threads(ctypes.c_int(before))


def _levels(loops: Code, target: Target, end: Deadline) -> tuple[tuple[MemoryLevel, ...], int]:
    """Return the levels of memory, and how many bytes the farthest cache keeps."""
    # A level's limit is the size of the caches of all threads; it is measured with half of that, which surely fits.
    threads, all_l2_bytes = target.threads, target.l2_bytes * target.threads
    all_bytes = target.l3_bytes + all_l2_bytes
    farthest = max(MEMORY_BYTES, 4 * all_bytes) // threads
    shared = [n // threads for n in shared_sizes(all_l2_bytes, target.l3_bytes)]
    sizes = [target.l1_bytes // 2, target.l2_bytes // 2, shared[0], farthest]
    rates = _MemoryRates(loops, target, max(shared[-1], farthest))
    reads, writes = [0.0] * len(sizes), [0.0] * len(sizes)
    passes = dict.fromkeys((*shared, farthest), 0.0)
    for _ in _tries(end):
        for i, size in enumerate(sizes):
            reads[i] = max(reads[i], rates.rate("read", size))
            writes[i] = max(writes[i], rates.rate("write", size))
        # A kernel may write to main memory with streaming stores, which need not read the cache lines first.
        writes[-1] = max(writes[-1], rates.rate("stream", farthest))
        for size in passes:
            passes[size] = max(passes[size], rates.pass_rate(size))
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


class _MemoryRates:
    """Memory of the threads that can run at once, and the rates at which they access the first part of it."""

    def __init__(self, loops: Code, target: Target, size_bytes: int) -> None:
        """Allocate `size_bytes` for each thread; the threads are the first to write to it."""
        self._loops, self._threads = loops, _at_once(target.threads)
        self._block_bytes = 4 * LOADS * target.lanes
        self._memory = aligned_bytes(size_bytes * self._threads)
        self.rate("write", size_bytes, 1, size_bytes)

    def rate(self, name: str, size_bytes: int, chunks: int = 0, chunk_bytes: int = CHUNK_BYTES) -> float:
        """Return a rate of memory; by default that of `CHUNKS` chunks, which may begin and end anywhere."""
        size, chunk = (n // self._block_bytes * self._block_bytes for n in (size_bytes, chunk_bytes))
        place = address_of(self._memory), size // 4
        return _rate(self._loops, name, chunk, self._threads, *place, chunks or CHUNKS, chunk // 4) if size else 0.0

    def pass_rate(self, size_bytes: int) -> float:
        """Return the rate of complete reads, which is not raised by parts that are still in a cache."""
        return self.rate("read", size_bytes, PASSES, min(size_bytes, PASS_BYTES))


def _rate(loops: Code, name: str, work: float, threads: int, *numbers: int) -> float:
    """Return a rate; `numbers`: the address and the floats of memory, the chunks and their length (`korch_rates.c`)."""
    loop, own = ctypes.c_void_p(loops.address(name)), (ctypes.c_double(work), ctypes.c_int(threads))
    return float(runtime().korch_rate(loop, *own, *map(ctypes.c_int64, numbers)))


def _flop_rate(loops: Code, target: Target, end: Deadline, split_work: float = 0.0) -> float:
    """Return the rate of multiply-adds, or that of products of components if the work of an iteration is given."""
    name, repeats = ("multiply_split", 1000) if split_work else ("multiply", 10_000)
    work, threads = repeats * (split_work or 2.0 * CHAINS * target.lanes), _at_once(target.threads)
    return max(_rate(loops, name, work, threads, 0, repeats, CHUNKS, repeats) for _ in _tries(end))


def _least_ns(loops: Code, name: str, repeats: int, limit_ns: int) -> int:
    """Return the least time of some runs of a kernel without buffers."""
    kernel = ctypes.c_void_p(loops.address(name))
    return int(runtime().korch_least_time(kernel, ctypes.c_int64(repeats), ctypes.c_int64(limit_ns)))


def _tries(end: Deadline) -> Iterator[int]:
    """Yield the number of each try: all of them, or only those that begin before the end, and always the first."""
    return itertools.takewhile(lambda turn: turn == 0 or not end.is_over, range(TRIES))


def _at_once(threads: int) -> int:
    """Return the number of threads that can run at once: more would add up best rates of the same core."""
    return min(threads, len(os.sched_getaffinity(0)))
