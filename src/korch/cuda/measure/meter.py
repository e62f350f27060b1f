"""Costs of candidates on a CUDA device, or only their bounds if there is no device."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from korch.candidate.candidate import Candidate, Refusal
from korch.costs.rates import Rates
from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.kernel import CudaKernel
from korch.cuda.measure.bounds import bound_ns
from korch.cuda.measure.device import (
    CALIBRATION,
    calibrate,
    detect_cuda_target,
    from_text,
    recorded_target,
    to_text,
    with_rates,
)
from korch.cuda.measure.job import job_key, job_of, with_cubins
from korch.cuda.measure.lock import device_lock
from korch.cuda.target import CudaTarget, nominal_target, planning_fingerprint
from korch.measure.database import Database
from korch.measure.meter import NEVER, CandidateMeter
from korch.measure.record import Failed, Measured, Record
from korch.measure.session import MeasuringProcess, run_jobs
from korch.options import Options
from korch.primitive.op import Category
from korch.provider.provider import Provider
from korch.records import plain
from korch.system.deadline import Deadline

logger = logging.getLogger("korch.cuda")

HANG_SECONDS, ENGINE_SECONDS = 15.0, 60.0
"""How long a job may send nothing, without and with the time in which TensorRT builds an engine."""
WORKER = "korch.cuda.measure.worker"

PASSES = 2
"""The typical ratio of the time to the bound of kernels without products, on an H100 and an H200."""


class CudaMeter(CandidateMeter[CudaTarget, CudaKernel]):
    """Compiles kernels with Triton and times them on the device, in a separate process.

    Without a device, the times that were measured elsewhere are known, and nothing else is. A record belongs to a job,
    not to a candidate: equal kernels have equal records, however they were found. Which job a candidate has is stored
    when its kernel is built, for all devices for which the same kernels are built.

    Attributes:
        target: what kernels are made for. Its rates are those of a data sheet, so that the same kernels are offered
            on a machine without the device.
        rated: the target with measured rates, if they are known.
        only_known: whether kernels without a record count as failed, because a plan is built of the others.

    Raises:
        UnsupportedError: there is no device, or no Triton.
    """

    def __init__(self, options: Options, providers: Sequence[Provider[CudaTarget, CudaKernel]]) -> None:
        super().__init__(options, providers)
        self._has_device = options.target == "cuda"
        self._is_recorded = options.is_recorded
        found = self._device(options)
        self.target = dataclasses.replace(found, allow_tf32=options.allows_tf32, allow_split=not options.strict)
        self._worker = MeasuringProcess(WORKER)
        self.compiler = CubinCompiler(self.target.arch, options.cache_folder)
        self.database = Database(options.cache_folder, found.fingerprint, fields=json.dumps(plain(found)))
        self.rated = self.target if self.target.is_nominal else self._calibrated()
        self.only_known = False
        self._named = Database(options.cache_folder, f"jobs {planning_fingerprint(self.target)}")
        self._names: dict[str, str] = {}

    def _device(self, options: Options) -> CudaTarget:
        if self._has_device:
            return detect_cuda_target()
        if self._is_recorded:
            return recorded_target(options.target, options.cache_folder)
        return nominal_target(options.target)

    def close(self) -> None:
        """Close the database and end the processes that compile and measure."""
        self.compiler.close()
        self._worker.close()
        self._named.close()
        super().close()

    def bound_ns(self, candidate: Candidate) -> int:
        """Return a lower bound of the time of any kernel for a candidate."""
        return bound_ns(candidate, self.rated)

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        """Return the approximate time of each candidate in nanoseconds, and the usual error of its logarithm.

        It is the provider's estimate, if it has one.
        """
        found = []
        for candidate, (guess_ns, spread) in zip(candidates, super().predict(candidates), strict=True):
            if candidate.offer.guess_ns:
                guess_ns = max(self.bound_ns(candidate), candidate.offer.guess_ns)
            elif all(p.row.category not in (Category.LINEAR, Category.OPAQUE) for p in candidate.group.body.primitives):
                guess_ns = PASSES * self.bound_ns(candidate)
            found.append((guess_ns, spread))
        return found

    def correct(self, candidate: Candidate, record: Record) -> None:
        """Raise the device's rates until the bound holds for a measured candidate."""
        if not isinstance(record, Measured):
            return
        factor = self.bound_ns(candidate) / max(1, record.time_ns)
        if factor <= 1:
            return
        target = self.rated
        self.rated = dataclasses.replace(
            target,
            launch_ns=min(target.launch_ns, record.time_ns // 2),
            copy_bytes_per_s=target.copy_bytes_per_s * factor,
            l2_bytes_per_s=target.l2_bytes_per_s * factor,
            f32_flop_per_s=target.f32_flop_per_s * factor,
            tf32_flop_per_s=target.tf32_flop_per_s * factor,
            half_flop_per_s=target.half_flop_per_s * factor,
        )
        self.database.put_fact(CALIBRATION, to_text(self.rated))

    def rates(self) -> Rates:
        """Return the device's rates."""
        return Rates(rate_flop_per_s=self.rated.f32_flop_per_s, copy_bytes_per_s=self.rated.copy_bytes_per_s)

    def build(self, candidate: Candidate) -> CudaKernel | Refusal:
        """Let a candidate's provider build its kernel, and store the key of its job."""
        built = super().build(candidate)
        if isinstance(built, CudaKernel):
            key = job_key(self.job(candidate, built))
            if self.record_key(candidate.key) != key:
                self._names[candidate.key] = key
                self._named.put_fact(candidate.key, key)
        return built

    def job(self, candidate: Candidate, kernel: CudaKernel) -> dict[str, Any]:
        """Return the job of a candidate's kernel, without its cubins."""
        return job_of(candidate, kernel, self.target.allow_tf32)

    def record_key(self, key: str) -> str:
        """Return the key of the job of a candidate; the candidate's own if its kernel was never built."""
        if key not in self._names and (name := self._named.fact(key)) is not None:
            self._names[key] = name
        return self._names.get(key, key)

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of a candidate; with `only_known`, a failure if there is none."""
        found = super().known(candidate)
        if found is None and self.only_known:
            found = self._records[candidate.key] = Failed("late", "it was not measured on the device")
        return found

    def measure(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Build and time candidates whose kernels have no record yet."""
        for candidate in candidates:
            if self.known(candidate) is None:
                self.kernel(candidate)  # its record may be known by the kernel's name
        return super().measure(candidates, deadline)

    def measure_batch(self, batch: Sequence[Candidate], kernels: Mapping[str, CudaKernel], deadline: Deadline) -> None:
        """Compile kernels and time them; without a device, do nothing."""
        if not self._has_device:
            return
        cubins = self.compiler.compile([la for c in batch for la in kernels[c.key].launches])
        ready: list[tuple[Candidate, dict[str, Any]]] = []
        for candidate in batch:
            job = with_cubins(self.job(candidate, kernels[candidate.key]), cubins, self.compiler.folder)
            if isinstance(job, str):
                self.keep(candidate.key, Failed("not compiled", job))
            else:
                ready.append((candidate, job))
        for has_engine, seconds in ((False, HANG_SECONDS), (True, ENGINE_SECONDS)):
            part = [(c, job) for c, job in ready if (job["network"] is not None) is has_engine]
            if not part:
                continue
            with device_lock():
                records = run_jobs([job for _, job in part], {"l2_bytes": self.target.l2_bytes}, self._worker, seconds)
            for (candidate, _), record in zip(part, records, strict=True):
                if record is not None:
                    self.keep(candidate.key, record)

    def _calibrated(self) -> CudaTarget:
        found = self._known_rates()
        if found is None and self._has_device:
            with device_lock():
                found = self._known_rates()  # another process may have measured them meanwhile
                if found is None:
                    found = calibrate(self.target)
                    self.database.put_fact(CALIBRATION, to_text(found))
        return with_rates(self.target, found or self.target)

    def _known_rates(self) -> CudaTarget | None:
        text = self.database.fact(CALIBRATION)
        try:
            return from_text(text) if text is not None else None
        except ValueError:
            logger.warning("the stored calibration is damaged; the device is measured again")
            return None


def failure_of(kernel: CudaKernel, cubins: Mapping[str, Cubin | CubinFailure]) -> str | None:
    """Return why a kernel can't run; None if all of its launches are compiled."""
    for launch in kernel.launches:
        found = cubins[launch.symbol]
        if isinstance(found, CubinFailure):
            return found.message
    return None
