"""Sources of kernels -> compiled and timed kernels, on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from korch.measure.compiler import Builder, CompileFailure
from korch.measure.meter import BATCH
from korch.measure.pace import Pace
from korch.measure.record import Failed, Measured
from korch.measure.timer import Job, Setup, time_kernels
from korch.system.deadline import Deadline

BATCH_SHARE = 0.3
"""The largest fraction of the time left that is spent on timing one batch."""


@dataclass(frozen=True)
class SourcedJob:
    """A job with the sources of its kernel, which are to be compiled."""

    texts: tuple[str, ...]
    job: Job


@dataclass(frozen=True)
class NotCompiled:
    """A kernel that was not compiled: the source, and why."""

    source: str
    failure: CompileFailure


JobResult = Measured | Failed | NotCompiled | None
"""What became of a kernel; None if it was not timed before the end."""


def sources_of(jobs: Sequence[SourcedJob]) -> list[str]:
    """Return the distinct sources of jobs."""
    return list(dict.fromkeys(text for job in jobs for text in job.texts))


def compile_and_time(
    kernels: Sequence[SourcedJob],
    builder: Builder,
    setup: Setup,
    pace: Pace,
    deadline: Deadline,
    tell: Callable[[str], None] = lambda text: None,
) -> list[JobResult]:
    """Compile kernels and time those that were compiled before the deadline, less the time for timing them.

    Args:
        kernels: the kernels.
        builder: compiles them.
        setup: the process that times them; its objects are added here.
        pace: predicts durations, and records those of this batch.
        deadline: when to end.
        tell: called with a text for each step that takes a while.
    """
    sources = sources_of(kernels)
    with pace.noting("compile", builder.missing_work(sources)):
        objects = builder.compile(
            sources,
            deadline.before(least_timing_s(pace, len(kernels))),
            lambda done: tell(f"compiling {len(kernels)} kernels, {done} are done"),
        )
    by_text = dict(zip(sources, objects, strict=True))
    outcomes: list[JobResult] = [_not_compiled(kernel, by_text) for kernel in kernels]
    paths = [[path for text in kernel.texts if isinstance(path := by_text[text], Path)] for kernel in kernels]
    ready = [i for i, kernel in enumerate(kernels) if len(paths[i]) == len(kernel.texts)]
    if not ready:
        return outcomes
    tell(f"timing {len(ready)} kernels")
    left_s, begun_s = deadline.left_s, time.monotonic()
    records = time_kernels(
        [kernels[i].job for i in ready],
        replace(setup, objects=tuple(dict.fromkeys(path for i in ready for path in paths[i]))),
        seconds=None if left_s is None else max(0.0, BATCH_SHARE * left_s),
        stop=deadline,
    )
    spent_s = time.monotonic() - begun_s - pace.predict_s("start")
    samples = sum(len(r.samples_ns) for r in records if isinstance(r, Measured))
    pace.note("time", samples + 2 * len(ready), max(1e-3, spent_s))
    for i, record in zip(ready, records, strict=True):
        outcomes[i] = record
    return outcomes


def least_timing_s(pace: Pace, kernels: int) -> float:
    """Return the least predicted time for timing kernels: process starts, a first run of each, and a round."""
    return pace.predict_s("start", -(-kernels // BATCH)) + pace.predict_s("time", 3 * kernels)


def _not_compiled(kernel: SourcedJob, objects: dict[str, Path | CompileFailure | None]) -> NotCompiled | None:
    failed = ((text, objects[text]) for text in kernel.texts)
    return next((NotCompiled(text, found) for text, found in failed if isinstance(found, CompileFailure)), None)
