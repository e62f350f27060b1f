"""Costs of candidates on a CUDA device, or only their bounds if there is no device."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from korch.candidate.candidate import Candidate
from korch.costs.rates import Rates
from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.kernel import CudaKernel, TorchCall
from korch.cuda.measure.bounds import bound_ns
from korch.cuda.measure.device import CALIBRATION, calibrate, detect_cuda_target, from_text, to_text
from korch.cuda.measure.lock import device_lock
from korch.cuda.target import CudaTarget, nominal_target
from korch.measure.database import Database
from korch.measure.meter import CandidateMeter
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

    Raises:
        UnsupportedError: there is no device, or no Triton.
    """

    def __init__(self, options: Options, providers: Sequence[Provider[CudaTarget, CudaKernel]]) -> None:
        super().__init__(options, providers)
        is_here = options.target == "cuda"
        known = detect_cuda_target() if is_here else nominal_target(options.target)
        self.target = dataclasses.replace(known, allow_tf32=options.allows_tf32, allow_split=not options.strict)
        self._worker = MeasuringProcess(WORKER)
        self.compiler = CubinCompiler(self.target.arch, options.cache_folder)
        self.database = Database(
            self.compiler.folder.parent, self.target.fingerprint, fields=json.dumps(plain(self.target))
        )
        if is_here:
            self.target = self._calibrated(self.target)

    def close(self) -> None:
        """Close the database and end the processes that compile and measure."""
        self.compiler.close()
        self._worker.close()
        super().close()

    def bound_ns(self, candidate: Candidate) -> int:
        """Return a lower bound of the time of any kernel for a candidate."""
        return bound_ns(candidate, self.target)

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        """Return the approximate time of each candidate in nanoseconds, and the usual error of its logarithm.

        It is the provider's estimate, if it has one, which does not count what surrounds a product.
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
        target = self.target
        self.target = dataclasses.replace(
            target,
            launch_ns=min(target.launch_ns, record.time_ns // 2),
            copy_bytes_per_s=target.copy_bytes_per_s * factor,
            l2_bytes_per_s=target.l2_bytes_per_s * factor,
            f32_flop_per_s=target.f32_flop_per_s * factor,
            tf32_flop_per_s=target.tf32_flop_per_s * factor,
            half_flop_per_s=target.half_flop_per_s * factor,
        )
        self.database.put_fact(self._calibration, to_text(self.target))

    def rates(self) -> Rates:
        """Return the device's rates."""
        return Rates(rate_flop_per_s=self.target.f32_flop_per_s, copy_bytes_per_s=self.target.copy_bytes_per_s)

    def measure_batch(self, batch: Sequence[Candidate], kernels: Mapping[str, CudaKernel], deadline: Deadline) -> None:
        """Compile kernels and time them."""
        cubins = self.compiler.compile([la for c in batch for la in kernels[c.key].launches])
        ready: list[Candidate] = []
        for candidate in batch:
            failed = failure_of(kernels[candidate.key], cubins)
            if failed is None:
                ready.append(candidate)
            else:
                self.keep(candidate.key, Failed("not compiled", failed))
        task = {"allow_tf32": self.target.allow_tf32, "l2_bytes": self.target.l2_bytes}
        for has_engine, seconds in ((False, HANG_SECONDS), (True, ENGINE_SECONDS)):
            part = [c for c in ready if (kernels[c.key].network is not None) is has_engine]
            jobs = [_job(c, kernels[c.key], cubins, self.compiler) for c in part]
            if not jobs:
                continue
            with device_lock():
                records = run_jobs(jobs, task, self._worker, seconds)
            for candidate, record in zip(part, records, strict=True):
                if record is not None:
                    self.keep(candidate.key, record)

    @property
    def _calibration(self) -> str:
        return f"{CALIBRATION} {'tf32' if self.target.allow_tf32 else 'f32'}"

    def _calibrated(self, target: CudaTarget) -> CudaTarget:
        found = self._known_rates()
        if found is None:
            with device_lock():
                found = self._known_rates()  # another process may have measured them meanwhile
                if found is None:
                    found = calibrate(target)
                    self.database.put_fact(self._calibration, to_text(found))
        return found

    def _known_rates(self) -> CudaTarget | None:
        text = self.database.fact(self._calibration)
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


def _job(
    candidate: Candidate, kernel: CudaKernel, cubins: Mapping[str, Cubin | CubinFailure], compiler: CubinCompiler
) -> dict[str, Any]:
    """Return the description of a kernel for the measuring process."""
    group = candidate.group
    buffers: list[dict[str, Any]] = []
    for i, (type_, layout) in enumerate(candidate.stored):
        kind = "output" if i >= len(group.inputs) else ("constant" if i in group.constant_inputs else "input")
        buffers.append(
            {
                "kind": kind,
                "bytes": layout.size_bytes(type_),
                "dtype": type_.dtype.value,
                "shape": list(type_.shape),
                "layout": str(layout),
            }
        )
    buffers += [
        {"kind": "scratch", "bytes": size * dtype.size_bytes, "dtype": dtype.value} for dtype, size in kernel.scratch
    ]
    buffers += [{"kind": "table", "bytes": 4 * len(table), "table": list(table)} for table in kernel.tables]
    step = kernel.steps[0] if kernel.steps else None
    call = {"symbol": step.symbol, "source": step.source} if isinstance(step, TorchCall) else None
    launches = []
    for launch in kernel.launches:
        cubin = cubins[launch.symbol]
        if isinstance(cubin, Cubin):
            launches.append(
                {
                    "path": str(compiler.folder / f"{launch.symbol}.cubin"),
                    "symbol": launch.symbol,
                    "shared_bytes": cubin.shared_bytes,
                    "warps": launch.warps,
                    "programs": launch.grid,
                    "arguments": list(launch.arguments),
                }
            )
    network = kernel.network and {
        "model": base64.b64encode(kernel.network.model).decode(),
        "known": list(kernel.network.constants),
    }
    return {"buffers": buffers, "launches": launches, "call": call, "network": network}
