"""Footprints of tasks, in order, and their threads -> the bytes that each task fetches from the caches of other cores.

A cache line is held by the thread that wrote it and by those that have read it since, until the threads have touched
as many other bytes as their caches hold. A task that reads a line that only other threads hold, or writes a line that
other threads also hold, must wait for their cores. A line in no cache comes from memory, for every thread.
"""

from __future__ import annotations

import numpy as np

from korch.events.graph import Touched
from korch.events.spans import Spans
from korch.primitive.op import Array
from korch.system.alignment import ALIGNMENT

THREADS = 64
"""The number of threads that are distinguished."""


class CachedLines:
    """Which threads hold each line of each memory.

    Args:
        size_bytes: the caches of all threads together.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._touched_bytes = 0
        self._threads: dict[str, Array] = {}  # as bits
        self._since: dict[str, Array] = {}  # the bytes touched until then

    def fetch(self, touched: Touched, thread: int) -> int:
        """Return how many bytes a task on a thread fetches from others, and record that the thread holds them."""
        own, count = np.uint64(1 << thread % THREADS), 0
        for memory, spans in touched.reads.items():
            lines, known = self._lines(memory, spans)
            count += int(np.count_nonzero((known != 0) & (known & own == 0)))
            self._note(memory, lines, known | own)
        for memory, spans in touched.writes.items():
            lines, known = self._lines(memory, spans)
            count += int(np.count_nonzero(known & ~own))
            self._note(memory, lines, own)
        return ALIGNMENT * count

    def _lines(self, memory: str, spans: Spans) -> tuple[Array, Array]:
        """Return the lines of some bytes, and the threads that hold them."""
        first, counts = spans.begins // ALIGNMENT, -(-spans.ends // ALIGNMENT) - spans.begins // ALIGNMENT
        before = np.cumsum(counts) - counts
        lines = np.unique(np.repeat(first - before, counts) + np.arange(counts.sum()))
        threads, since = (kept.get(memory, np.zeros(0, np.uint64)) for kept in (self._threads, self._since))
        if lines.size and lines[-1] >= threads.size:
            more = np.zeros(lines[-1] + 1 - threads.size, np.uint64)
            threads, since = np.concatenate([threads, more]), np.concatenate([since, more])
        self._threads[memory], self._since[memory] = threads, since
        is_there = self._touched_bytes - since[lines].astype(np.int64) <= self.size_bytes
        return lines, np.where(is_there, threads[lines], np.uint64(0))

    def _note(self, memory: str, lines: Array, threads: Array | np.uint64) -> None:
        """Record that threads hold some lines."""
        self._touched_bytes += ALIGNMENT * lines.size
        self._threads[memory][lines] = threads
        self._since[memory][lines] = self._touched_bytes
