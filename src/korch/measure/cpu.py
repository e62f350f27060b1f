"""Costs of candidates on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from korch.candidate.candidate import Candidate
from korch.libraries import needed_libraries
from korch.measure.calibrate import FACT, Calibration, calibrate
from korch.measure.compiler import NATIVE_FOLDER, Builder, CompileFailure, find_compiler
from korch.measure.database import Database
from korch.measure.meter import CandidateMeter
from korch.measure.record import Failed, FailureKind, Measured, Record
from korch.measure.timer import BufferSpec, Job, time_kernels
from korch.options import Options
from korch.provider.provider import Kernel, Provider
from korch.target import Target, detect_target

logger = logging.getLogger("korch.measure")

DISPATCH_NS = 20
"""What the executable spends per kernel outside of it: loading pointers, an indirect call."""


class CpuMeter(CandidateMeter[Target, Kernel]):
    """Builds kernels with the machine's compiler and times them in a process of their own."""

    def __init__(self, options: Options, providers: Sequence[Provider[Target, Kernel]]) -> None:
        super().__init__(options, providers)
        self.target = detect_target(options.threads, find_compiler().identity)
        self.builder = Builder(self.target.isa, options.cache_folder)
        self.database = Database(self.builder.folder.parent, self.target.fingerprint)
        self._timer = self.builder.library([(NATIVE_FOLDER / "korch_timer.cpp").read_text()])
        self.calibration = self._calibrate()

    def bound_ns(self, candidate: Candidate) -> int:
        """Return a time that no kernel for a candidate can undercut."""
        flop = max(candidate.linear_flop, candidate.offer.work_flop)
        bound_ns = self.calibration.bound_ns(candidate.read_bytes, candidate.write_bytes, flop)
        return DISPATCH_NS + bound_ns

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

    def rates(self) -> dict[str, Any]:
        """Return the calibration."""
        return asdict(self.calibration)

    def measure_batch(self, batch: Sequence[Candidate], kernels: Mapping[str, Kernel]) -> None:
        """Compile kernels to one library and time them."""
        objects = self.builder.compile([kernels[c.key].source for c in batch])
        compiled = []
        for candidate, found in zip(batch, objects, strict=True):
            if isinstance(found, CompileFailure):
                kind: FailureKind = "killed" if found.was_killed else "not compiled"
                self.keep(candidate.key, Failed(kind, found.message))
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
            self.keep(candidate.key, record)

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
