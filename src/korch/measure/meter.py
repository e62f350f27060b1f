"""Candidates -> costs: bounds at once, measured times when they are asked for.

Ties together providers, a compiler, a measuring process and the database. What is of one kind of
target only is in its own meter: `korch.measure.cpu` and `korch.measure.cuda.meter`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from korch.candidate.candidate import Candidate, Refusal
from korch.deadline import Deadline
from korch.measure.calibrate import Rates
from korch.measure.database import Database
from korch.measure.pace import Pace
from korch.measure.record import Failed, Measured, Record, confirmed, is_lasting, is_worth_retrying, retried
from korch.measure.uncompiled import Uncompiled
from korch.options import Options
from korch.provider.provider import Provider, faults_named

logger = logging.getLogger("korch.measure")

BATCH = 24
"""Kernels that are timed by one process."""

BATCH_BYTES = 1 << 30
"""Memory for the buffers of one batch."""

GUESS = 4
"""What kernels take over their bounds, as a rule."""


NEVER = Deadline()

T = TypeVar("T")
K = TypeVar("K")


class CandidateMeter(ABC, Generic[T, K]):
    """Costs of candidates on a target; a context that closes its database.

    Attributes:
        target: the machine.
        database: what was measured before.
        providers: who makes kernels.
        uncompiled: by candidate, the kernels that the compiler refused.
        tell: told of each step that takes a while.
        expect_compiling: told the predicted seconds to compile the kernels of a first plan.
        pace: how long compiling and timing takes.
        disturbed: runs of kernels in which a thread had no core; they were dropped.
        sized: returns the kernel as which a candidate with `served` is timed.
    """

    target: T
    database: Database

    def __init__(self, options: Options, providers: Sequence[Provider[T, K]]) -> None:
        self.options = options
        self.providers = tuple(providers)
        self._provider = {provider.name: provider for provider in providers}
        self._kernels: dict[str, K | Refusal] = {}
        self._sized: dict[str, K | Refusal] = {}
        self.uncompiled: dict[str, Uncompiled] = {}
        self._records: dict[str, Record] = {}
        self._retried: set[str] = set()  # what hung in another session
        self._first: dict[str, Measured] = {}  # of what is timed a second time just now
        self.expect_compiling: Callable[[float], None] = lambda seconds: None
        self.tell: Callable[[str], None] = lambda text: None
        self.pace = Pace()
        self.disturbed = 0
        self.sized: Callable[[Candidate, K], K] = lambda candidate, kernel: kernel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database, and end what runs beside."""
        self.database.close()

    @abstractmethod
    def bound_ns(self, candidate: Candidate) -> int:
        """Return a time that no kernel for a candidate can undercut."""

    def guess_ns(self, candidate: Candidate) -> int:
        """Return about what a candidate takes; it may be wrong by a factor."""
        return GUESS * self.bound_ns(candidate)

    @abstractmethod
    def correct(self, candidate: Candidate, record: Record) -> None:
        """Raise the rates of the bounds until they hold for a measured candidate."""

    @abstractmethod
    def rates(self) -> Rates:
        """Return the best rates of the machine."""

    @abstractmethod
    def measure_batch(self, batch: Sequence[Candidate], kernels: Mapping[str, K], deadline: Deadline) -> None:
        """Build and time some kernels, given by their candidates' keys; keep what is found."""

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds to compile those of the candidates that are not compiled."""
        return 0.0

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Begin to build candidates that will likely be measured, beside other work."""

    def rest(self) -> None:
        """End what `begin` has begun: what is timed next needs a quiet machine."""

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        """Return the measured time, or the bound, and whether it is measured."""
        record = self.known(candidate)
        if isinstance(record, Measured):
            return record.time_ns, True
        return self.bound_ns(candidate), False

    def known(self, candidate: Candidate) -> Record | None:
        """Return what this run or the database knows of a candidate."""
        if candidate.key not in self._records:
            record = self.database.record(candidate.key)
            if record is None:
                return None
            if is_worth_retrying(record):
                self._retried.add(candidate.key)
                return None
            self._records[candidate.key] = record
        return self._records[candidate.key]

    def kernel(self, candidate: Candidate) -> K | Refusal:
        """Return the kernel that a candidate's provider builds."""
        if candidate.key not in self._kernels:
            provider = self._provider[candidate.provider]
            with faults_named(provider, candidate.group):
                built = provider.build(candidate.group, candidate.offer, self.target)
            self._kernels[candidate.key] = built
        return self._kernels[candidate.key]

    def timed_kernel(self, candidate: Candidate) -> K | Refusal:
        """Return the kernel as which a candidate is timed: in a plan for a range of sizes, one that leaves out some."""
        if candidate.served is None:
            return self.kernel(candidate)
        if candidate.key not in self._sized:
            built = self.kernel(candidate)
            self._sized[candidate.key] = built if isinstance(built, Refusal) else self.sized(candidate, built)
        return self._sized[candidate.key]

    def measure(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Build and time candidates; what is found is kept in the database at once.

        Returns:
            What is known of each; None if the deadline came before.
        """
        todo = {c.key: c for c in candidates if self.known(c) is None}
        self._time(todo, deadline)
        return [self._records.get(c.key) for c in candidates]

    def confirm(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Time candidates a second time that were timed once; the longer time counts.

        A plan has the kernels that seem to be the fastest, and among them those that were timed
        too short by chance: a sum over them promises too much (the winner's curse).
        """
        self._first = {
            c.key: record
            for c in candidates
            if isinstance(record := self.known(c), Measured) and not record.is_confirmed
        }
        self._time({c.key: c for c in candidates if c.key in self._first}, deadline)
        self._first = {}
        return [self._records.get(c.key) for c in candidates]

    def measure_again(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Time candidates anew; what was known of them before no longer counts."""
        self._time({c.key: c for c in candidates if not c.offer.is_in_place}, deadline)
        return [self._records.get(c.key) for c in candidates]

    def _time(self, todo: Mapping[str, Candidate], deadline: Deadline) -> None:
        kernels: dict[str, K] = {}
        for key, candidate in todo.items():
            built = self.timed_kernel(candidate)
            if isinstance(built, Refusal):
                self.keep(key, Failed("refused", built.reason))
            else:
                kernels[key] = built
        for batch in _batches([todo[key] for key in kernels]):
            if deadline.is_over:
                break
            self.measure_batch(batch, kernels, deadline)

    def keep(self, key: str, record: Record) -> None:
        """Keep what was found of a candidate."""
        if isinstance(record, Failed):
            logger.info("candidate %s is excluded: %s: %s", key[:8], record.kind, record.message)
        if key in self._retried:
            record = retried(record)
        if isinstance(record, Measured):
            self.disturbed += record.disturbed
        if key in self._first:
            record = confirmed(self._first[key], record)
        self._records[key] = record
        if is_lasting(record):
            self.database.put_record(key, record)


def _batches(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    batches: list[list[Candidate]] = []
    room = 0
    for candidate in candidates:
        if not batches or len(batches[-1]) >= BATCH or room < candidate.size_bytes:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(candidate)
        room -= candidate.size_bytes
    return batches


AnyMeter = CandidateMeter[Any, Any]
