"""Candidates -> costs: bounds at once, measured times when they are asked for.

Ties together providers, compiler, measuring process and database.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType

from korch.candidate.candidate import Candidate, Refusal
from korch.libraries import needed_libraries
from korch.measure.calibrate import FACT, Calibration, calibrate
from korch.measure.compiler import NATIVE_FOLDER, Builder, CompileFailure, find_compiler
from korch.measure.database import Database
from korch.measure.record import (
    Failed,
    FailureKind,
    Measured,
    Record,
    is_lasting,
    is_worth_retrying,
    retried,
)
from korch.measure.timer import BufferSpec, Job, time_kernels
from korch.options import Options
from korch.provider.provider import Kernel, Provider
from korch.target import detect_target

logger = logging.getLogger("korch.measure")

BATCH = 24
"""Kernels that are timed by one process."""

BATCH_BYTES = 1 << 30
"""Memory for the buffers of one batch."""

DISPATCH_NS = 20
"""What the executable spends per kernel outside of it: loading pointers, an indirect call."""


class CandidateMeter:
    """Costs of candidates on this machine; a context that closes its database."""

    def __init__(self, options: Options, providers: Sequence[Provider]) -> None:
        self.options = options
        self.providers = tuple(providers)
        self._provider = {provider.name: provider for provider in providers}
        self.target = detect_target(options.threads, find_compiler().identity)
        self.builder = Builder(self.target.isa, options.cache_folder)
        self.database = Database(self.builder.folder.parent, self.target.fingerprint)
        self._timer = self.builder.library([(NATIVE_FOLDER / "korch_timer.cpp").read_text()])
        self.calibration = self._calibrate()
        self._kernels: dict[str, Kernel | Refusal] = {}
        self._records: dict[str, Record] = {}
        self._retried: set[str] = set()  # what hung in another session

    def __enter__(self) -> CandidateMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.database.close()

    def bound_ns(self, candidate: Candidate) -> int:
        """Return a time that no kernel for a candidate can undercut."""
        flop = max(candidate.linear_flop, candidate.offer.work_flop)
        bound_ns = self.calibration.bound_ns(candidate.read_bytes, candidate.write_bytes, flop)
        return DISPATCH_NS + bound_ns

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

    def correct(self, candidate: Candidate, record: Record) -> None:
        """Raise the calibrated rates until the bound holds for a measured candidate."""
        if not isinstance(record, Measured):
            return
        if record.time_ns < self.bound_ns(candidate):
            flop = max(candidate.linear_flop, candidate.offer.work_flop)
            seconds = 1e-9 * max(1, record.time_ns - DISPATCH_NS)
            self.calibration = self.calibration.raised(
                candidate.read_bytes, candidate.write_bytes, flop, seconds
            )
            self.database.put_fact(FACT, self.calibration.to_text())

    def kernel(self, candidate: Candidate) -> Kernel | Refusal:
        """Return the kernel that a candidate's provider builds."""
        if candidate.key not in self._kernels:
            provider = self._provider[candidate.provider]
            built = provider.build(candidate.group, candidate.offer, self.target)
            self._kernels[candidate.key] = built
        return self._kernels[candidate.key]

    def measure(self, candidates: Sequence[Candidate]) -> list[Record]:
        """Build and time candidates; what is found is kept in the database at once."""
        todo = {c.key: c for c in candidates if self.known(c) is None}
        kernels: dict[str, Kernel] = {}
        for key, candidate in todo.items():
            built = self.kernel(candidate)
            if isinstance(built, Refusal):
                self._keep(key, Failed("refused", built.reason))
            else:
                kernels[key] = built
        for batch in _batches([todo[key] for key in kernels]):
            self._measure_batch(batch, kernels)
        return [self._records[c.key] for c in candidates]

    def _measure_batch(self, batch: Sequence[Candidate], kernels: dict[str, Kernel]) -> None:
        objects = self.builder.compile([kernels[c.key].source for c in batch])
        compiled = []
        for candidate, found in zip(batch, objects, strict=True):
            if isinstance(found, CompileFailure):
                kind: FailureKind = "killed" if found.was_killed else "not compiled"
                self._keep(candidate.key, Failed(kind, found.message))
            else:
                compiled.append((candidate, found))
        if not compiled:
            return
        names = sorted({name for c, _ in compiled for name in kernels[c.key].libraries})
        library = self.builder.link(dict.fromkeys(path for _, path in compiled), names)
        records = time_kernels(
            [_job(c, kernels[c.key]) for c, _ in compiled], library, self._timer,
            needed_libraries(names), self.options.threads, sweep_bytes=self.target.l2_bytes,
        )  # fmt: skip
        for (candidate, _), record in zip(compiled, records, strict=True):
            if isinstance(record, Measured):
                record = Measured(record.time_ns + DISPATCH_NS, record.spread, record.samples_ns)
            self._keep(candidate.key, record)

    def _keep(self, key: str, record: Record) -> None:
        if isinstance(record, Failed):
            logger.info("candidate %s is excluded: %s: %s", key[:8], record.kind, record.message)
        if key in self._retried:
            record = retried(record)
        self._records[key] = record
        if is_lasting(record):
            self.database.put_record(key, record)

    def _calibrate(self) -> Calibration:
        text = self.database.fact(FACT)
        if text is not None:
            try:
                return Calibration.from_text(text)
            except (ValueError, TypeError, KeyError):
                logger.warning("the stored calibration is damaged; the machine is measured again")
        found = calibrate(self._timer, self.target)
        self.database.put_fact(FACT, found.to_text())
        return found


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


def _job(candidate: Candidate, kernel: Kernel) -> Job:
    group, offer = candidate.group, candidate.offer
    buffers = [
        BufferSpec(layout.size_bytes(type_), type_.dtype.value)
        for layout, type_ in zip(
            (*offer.inputs, *offer.outputs), (*group.input_types, *group.output_types), strict=True
        )
    ]
    buffers.append(BufferSpec(max(64, kernel.workspace_bytes), "u8"))
    written = (i for i in range(len(group.inputs)) if i not in group.constant_inputs)
    return Job(kernel.symbol, kernel.has_state, tuple(buffers), tuple(written))
