"""Candidates -> costs: bounds are available at once, measured times on request.

Combines providers, a compiler, a measuring process and the database. Code for only one kind of target is in
that target's meter: `korch.measure.cpu` and `korch.cuda.measure.meter`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from korch.candidate.candidate import Candidate, Refusal
from korch.costs.calibrated import ScoreTail
from korch.costs.rates import Rates
from korch.measure.database import Database
from korch.measure.pace import Pace
from korch.measure.record import Failed, Measured, Record, confirmed, is_lasting, is_worth_retrying, retried
from korch.measure.uncompiled import Uncompiled
from korch.options import Options
from korch.provider.faults import Fault, Faults
from korch.provider.provider import Provider
from korch.system.deadline import Deadline

logger = logging.getLogger("korch.measure")

BATCH = 24
"""The most kernels that one process times."""

BATCH_BYTES = 1 << 30
"""The memory limit for the buffers of one batch."""

GUESS = 4
"""The typical ratio of a kernel's time to its bound."""

SPREAD = 0.45
"""The usual error of the logarithm of an analytic guess."""

NEVER = Deadline()

T = TypeVar("T")
K = TypeVar("K")


class CandidateMeter(ABC, Generic[T, K]):
    """Costs of candidates on a target; a context that closes its database.

    Attributes:
        target: the machine.
        database: the records of earlier measurements.
        providers: the providers of kernels.
        uncompiled: by candidate, the kernels that the compiler refused.
        faults: the errors that providers raised.
        tell: called with a text for each step that takes a while.
        expect_compiling: called with the predicted seconds to compile the kernels of a first plan.
        pace: the durations of compiling and timing.
        disturbed: the number of runs of kernels in which a thread had no core.
        has_brief_rates: whether a budget has shortened the measurement of the machine, so that bounds may be too high.
    """

    target: T
    database: Database

    def __init__(self, options: Options, providers: Sequence[Provider[T, K]]) -> None:
        self.options = options
        self.providers = tuple(providers)
        self._provider = {provider.name: provider for provider in providers}
        self._kernels: dict[str, K | Refusal] = {}
        self.uncompiled: dict[str, Uncompiled] = {}
        self.faults = Faults()
        self._records: dict[str, Record] = {}
        self._retried: set[str] = set()  # candidates that hung in another session
        self._first: dict[str, Measured] = {}  # first records of candidates that `confirm` is timing again
        self.expect_compiling: Callable[[float], None] = lambda seconds: None
        self.tell: Callable[[str], None] = lambda text: None
        self.pace = Pace()
        self.disturbed = 0
        self.has_brief_rates = False

    def __enter__(self) -> Self:
        return self

    def expect_work(self) -> None:
        """Prepare to build kernels, while the caller does something else."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_provider(self, provider: Provider[T, K]) -> None:
        """Let a provider build kernels that is made for one model."""
        self.providers = (*self.providers, provider)
        self._provider[provider.name] = provider

    def provider_reports(self) -> tuple[str, ...]:
        """Return what providers report of a search."""
        return tuple(line for p in self.providers if (report := getattr(p, "report", None)) for line in report())

    def described(self, candidate: Candidate) -> tuple[str, ...]:
        """Return what the provider of a candidate says of its kernel."""
        describe = getattr(self._provider[candidate.provider], "describe", None)
        return tuple(describe(candidate.group, candidate.offer)) if describe else ()

    def close(self) -> None:
        """Close the database, and stop concurrent work."""
        self.database.close()

    @abstractmethod
    def bound_ns(self, candidate: Candidate) -> int:
        """Return a lower bound of the time of any kernel for a candidate."""

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        """Return the approximate time of each candidate in nanoseconds, and the usual error of its logarithm."""
        return [(GUESS * self.bound_ns(candidate), SPREAD) for candidate in candidates]

    def tails(self) -> Mapping[str, ScoreTail]:
        """Return the scores of predictions by provider, from which calibrated bounds follow; empty without records."""
        return {}

    @abstractmethod
    def correct(self, candidate: Candidate, record: Record) -> None:
        """Raise the rates, which lowers the bounds, until the bound holds for a measured candidate."""

    @abstractmethod
    def rates(self) -> Rates:
        """Return the best rates of the machine."""

    @property
    def machines(self) -> int:
        """The number of machines that compile or time kernels at once."""
        return 1

    @abstractmethod
    def measure_batch(self, batch: Sequence[Candidate], kernels: Mapping[str, K], deadline: Deadline) -> None:
        """Build and time the kernels of a batch, given by their candidates' keys, and keep the records."""

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds to compile the candidates that are not compiled yet."""
        return 0.0

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Begin to build candidates that will likely be measured, in parallel with other work."""

    def prepare(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Candidate]:
        """Build candidates for `kernel` at the same time, if the meter can; return those for which there is time."""
        return list(candidates)

    def rest(self) -> None:
        """Stop the work that `begin` has started: timing needs an otherwise idle machine."""

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        """Return the measured time or, if there is none, the bound; and whether it is measured."""
        record = self.known(candidate)
        if isinstance(record, Measured):
            return record.time_ns, True
        return self.bound_ns(candidate), False

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of a candidate from this run or the database; None if there is none."""
        if candidate.key not in self._records:
            record = self.database.record(self.record_key(candidate.key))
            if record is None:
                return None
            if is_worth_retrying(record):
                self._retried.add(candidate.key)
                return None
            self._records[candidate.key] = record
        return self._records[candidate.key]

    def kernel(self, candidate: Candidate) -> K | Refusal:
        """Return the kernel that a candidate's provider builds."""
        if candidate.kernel_key not in self._kernels:
            self._kernels[candidate.kernel_key] = self.build(candidate)
        return self._kernels[candidate.kernel_key]

    def build(self, candidate: Candidate) -> K | Refusal:
        """Let a candidate's provider build its kernel."""
        provider = self._provider[candidate.provider]
        return self.faults.kernel(provider, candidate.group, candidate.offer, self.target)

    def refused(self, candidates: Sequence[Candidate]) -> list[Record | None]:
        """Return the record of each candidate whose provider refuses to build it, None for the others."""
        self.prepare(candidates)
        return [_refused(built) if isinstance(built := self.kernel(c), Refusal) else None for c in candidates]

    def measure(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Build and time candidates; records are stored in the database at once.

        Returns:
            The record of each; None for a candidate that was not timed before the deadline.
        """
        todo = {c.key: c for c in candidates if self.known(c) is None}
        self._time(todo, deadline)
        return [self._records.get(c.key) for c in candidates]

    def confirm(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Time candidates again that were timed once; the longer of the two times is recorded.

        A plan consists of the kernels that seem fastest, and some of these only seem so because of a
        measurement that was too short by chance. So a plan's sum is too optimistic (the winner's curse).
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
        """Time candidates again; their earlier records are replaced."""
        self._time({c.key: c for c in candidates if not c.offer.is_in_place}, deadline)
        return [self._records.get(c.key) for c in candidates]

    def _time(self, todo: Mapping[str, Candidate], deadline: Deadline) -> None:
        kernels: dict[str, K] = {}
        for candidate in self.prepare(list(todo.values()), deadline):
            if deadline.is_over and candidate.kernel_key not in self._kernels:
                continue
            built = self.kernel(candidate)
            if isinstance(built, Refusal):
                self.keep(candidate.key, _refused(built))
            else:
                kernels[candidate.key] = built
        self.measure_batches(_batches([todo[key] for key in kernels]), kernels, deadline)

    def measure_batches(
        self, batches: Sequence[Sequence[Candidate]], kernels: Mapping[str, K], deadline: Deadline
    ) -> None:
        """Build and time batches of kernels until the deadline."""
        for batch in batches:
            if deadline.is_over:
                break
            self.measure_batch(batch, kernels, deadline)

    def keep(self, key: str, record: Record) -> None:
        """Store the record of a candidate, also in the database if it is valid for later searches."""
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
            self.database.put_record(self.record_key(key), record)

    def record_key(self, key: str) -> str:
        """Return the key of a candidate's record in the database."""
        return key


def _refused(refusal: Refusal) -> Failed:
    return Failed("raised" if isinstance(refusal, Fault) else "refused", refusal.reason)


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
