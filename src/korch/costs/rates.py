"""The rates of a machine, and the lower bounds of times that follow from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from korch.candidate.candidate import ALL_PAIRS
from korch.records import read_record

MARGIN = 1.15
"""The factor by which rates exceed the measured ones, so that no bound exceeds a true time."""


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
