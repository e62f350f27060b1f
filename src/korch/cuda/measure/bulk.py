"""Measures a file of jobs on the device of this machine: nothing is planned, printed or compiled.

Records are appended to a file of the form of `korch database`, batch by batch, so that it is valid whenever the process
is ended. A later run skips the jobs that have a record. The file also describes the device, and has its rates.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from korch.cuda.measure.device import CALIBRATION, calibrate, detect_cuda_target, to_text
from korch.cuda.measure.job_file import JobFile, KernelJob
from korch.cuda.measure.lock import device_lock
from korch.cuda.measure.meter import HANG_SECONDS, WORKER
from korch.errors import OptionError
from korch.measure.database import sealed
from korch.measure.exchange import HEAD, as_line, read_rows
from korch.measure.record import Failed, is_lasting
from korch.measure.record import to_text as record_text
from korch.measure.session import MeasuringProcess, run_jobs
from korch.records import plain
from korch.system.deadline import Deadline
from korch.system.scratch import scratch_folder


@dataclass(slots=True)
class Counts:
    """How many jobs a run has measured, how many of them failed, and how many are left."""

    measured: int = 0
    failed: int = 0
    left: int = 0


def measure_jobs(path: Path, output: Path, seconds: float | None, tell: Callable[[str], None]) -> Counts:
    """Measure the jobs of a file that have no record yet, in order; append the records to a file.

    `seconds`: when to stop; None for no limit. `tell`: called with a line for each batch.

    Raises:
        OptionError: a file is damaged, or the cubins are for another architecture.
        UnsupportedError: there is no device.
    """
    end, found = Deadline.after(seconds, time.monotonic()), Counts()
    jobs = JobFile(path)
    target = detect_cuda_target(jobs.triton)
    if target.arch != jobs.arch:
        raise OptionError(f"its cubins are for sm_{jobs.arch}", str(path), f"sm_{target.arch}, as {target.name} is")
    known = set(map(_name_of, read_rows(output))) if _cut(output) else set()
    with output.open("a") as file, MeasuringProcess(WORKER) as process:

        def append(table: str, *values: Any) -> None:
            file.write(as_line([table, target.fingerprint, *values]))

        def append_sealed(table: str, key: str, value: str) -> None:
            append(table, key, sealed(target.fingerprint, key, value), int(time.time()))

        if not known:
            file.write(as_line(HEAD))
        if ("facts", target.fingerprint, CALIBRATION) not in known:
            with device_lock():
                append("targets", json.dumps(plain(target)))
                append_sealed("facts", CALIBRATION, to_text(calibrate(target)))
        for batch, cubins in jobs.batches():
            todo = [job for job in batch if ("records", target.fingerprint, job.key) not in known]
            if end.is_over:
                found.left += len(todo)
                continue
            with scratch_folder() as folder, device_lock():
                for symbol, image in cubins.items():
                    (folder / f"{symbol}.cubin").write_bytes(image)
                task = {"l2_bytes": target.l2_bytes}
                records = run_jobs([_task_of(job, folder) for job in todo], task, process, HANG_SECONDS, end)
            for job, record in zip(todo, records, strict=True):
                found.left += record is None
                found.measured += record is not None
                found.failed += isinstance(record, Failed)
                if record is not None and is_lasting(record):
                    append_sealed("records", job.key, record_text(record))
            file.flush()
            tell(f"{found.measured} kernels measured, {found.failed} of them failed")
    return found


def _task_of(job: KernelJob, folder: Path) -> dict[str, Any]:
    """Return what the measuring process reads of a job whose cubins are in a folder."""
    launches = [{**launch, "path": str(folder / f"{launch['symbol']}.cubin")} for launch in job.spec["launches"]]
    return {**job.spec, "launches": launches, "guess_ns": job.guess_ns}


def _name_of(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[:3]


def _cut(path: Path) -> bool:
    """Remove an incomplete last line, which a run that was ended has left; return whether the file has any line."""
    if not path.exists():
        return False
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(content.rfind(b"\n") + 1)
    return b"\n" in content
