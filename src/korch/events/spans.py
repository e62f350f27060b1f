"""Runs of bytes -> a set of bytes: sorted runs that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from korch.primitive.op import Array

MOST_RUNS = 1 << 13
"""A set of more runs also includes the bytes of its smallest gaps, so that comparing sets stays cheap."""

PAIRS_AT_ONCE = 1 << 22
"""About how many pairs of runs are enumerated at a time."""


@dataclass(frozen=True, eq=False)
class Spans:
    """A set of bytes."""

    begins: Array  # int64[n], where each run begins, ascending
    ends: Array  # int64[n], where it ends; no two runs touch

    def __bool__(self) -> bool:
        return bool(self.begins.size)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return int((self.ends - self.begins).sum())

    def shifted(self, by: int) -> Spans:
        """Return the set with each byte moved by some bytes."""
        return Spans(self.begins + by, self.ends + by)

    def common_byte(self, other: Spans) -> int | None:
        """Return a byte that is in both sets, or None."""
        few, many = (self, other) if self.begins.size <= other.begins.size else (other, self)
        if not few or few.begins[0] >= many.ends[-1] or many.begins[0] >= few.ends[-1]:
            return None
        next_ = np.searchsorted(many.ends, few.begins, side="right")  # the first run that ends later
        begins = np.maximum(np.append(many.begins, few.ends[-1])[next_], few.begins)
        meets = begins < few.ends
        return int(begins[np.argmax(meets)]) if meets.any() else None


NOTHING = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def runs(begins: Array, ends: Array) -> Spans:
    """Return the bytes of runs, which may be in any order or empty."""
    is_some = begins < ends
    begins, ends = begins[is_some], ends[is_some]
    if not begins.size:
        return NOTHING
    order = np.argsort(begins, kind="stable")
    begins, last = begins[order], np.maximum.accumulate(ends[order])
    gaps = begins[1:] - last[:-1]
    least = 1
    if np.count_nonzero(gaps > 0) >= MOST_RUNS:
        least = max(1, int(np.partition(gaps, -MOST_RUNS)[-MOST_RUNS]) + 1)
    is_first = np.concatenate([[True], gaps >= least])
    return Spans(begins[is_first], last[np.concatenate([is_first[1:], [True]])])


def run(begin: int, end: int) -> Spans:
    """Return the bytes of one run."""
    return runs(np.array([begin]), np.array([end]))


def union(sets: Iterable[Spans]) -> Spans:
    """Return the bytes that are in any of some sets."""
    found = [spans for spans in sets if spans]
    if len(found) < 2:
        return found[0] if found else NOTHING
    return runs(np.concatenate([s.begins for s in found]), np.concatenate([s.ends for s in found]))


def overlapping(first: Sequence[Spans], second: Sequence[Spans]) -> Array:
    """Return int64[n, 2]: the positions of the sets that have a common byte, in ascending order."""
    a, b = _sorted_runs(first), _sorted_runs(second)
    # Of two runs with a common byte, one begins inside the other; a common beginning is counted once.
    found = np.concatenate([_begin_within(a, b, "left"), _begin_within(b, a, "right")[:, ::-1]])
    return unique_pairs(found)


def unique_pairs(pairs: Array) -> Array:
    """Return int64[n, 2]: the distinct ones of some pairs of non-negative numbers, in ascending order."""
    width = int(pairs.max(initial=0)) + 1
    codes = np.unique(pairs[:, 0] * width + pairs[:, 1])  # many times faster than on pairs
    return np.stack([codes // width, codes % width], 1)


_Runs = tuple[Array, Array, Array]
"""Begins, ends and the positions of the sets of runs, by begin."""


def _sorted_runs(sets: Sequence[Spans]) -> _Runs:
    begins, ends = (
        np.concatenate([NOTHING.begins, *(getattr(spans, side) for spans in sets)]) for side in ("begins", "ends")
    )
    order = np.argsort(begins, kind="stable")
    owners = np.repeat(np.arange(len(sets)), [spans.begins.size for spans in sets])
    return begins[order], ends[order], owners[order]


def _begin_within(outer: _Runs, inner: _Runs, side: Literal["left", "right"]) -> Array:
    """Return int64[n, 2]: the owners of runs and of runs that begin in them, for "right" after their first byte."""
    lows = np.searchsorted(inner[0], outer[0], side)
    counts = np.maximum(np.searchsorted(inner[0], outer[1]) - lows, 0)
    found = [np.zeros((0, 2), np.int64)]
    for part in np.array_split(np.flatnonzero(counts), 1 + int(counts.sum()) // PAIRS_AT_ONCE):
        own = counts[part]
        places = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own) + np.repeat(lows[part], own)
        found.append(unique_pairs(np.stack([np.repeat(outer[2][part], own), inner[2][places]], 1)))
    return np.concatenate(found)
