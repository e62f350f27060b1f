"""What a worker of a farm does for a search: describe its machine, compile kernels, and time them.

Dask calls these functions by name, so that a worker needs Korch, of the same version. Results are checked by
`korch.measure.farm`. Errors are answers, too: Dask can't pass on all kinds.
"""

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from korch import __version__
from korch.errors import OptionError
from korch.measure.batch import SourcedJob, compile_and_time, sources_of
from korch.measure.compiler import Builder, target_of
from korch.measure.llvm_process import llvm_identity
from korch.measure.pace import Pace
from korch.measure.record import Failed, Measured, to_text
from korch.measure.timer import Setup
from korch.options import Options, default_cache_folder
from korch.records import plain
from korch.system.deadline import Deadline

MACHINE = "KORCH_MACHINE"
"""The environment variable with the name of a worker's machine, if it is not that of the host: workers with the same
name never time at once. Containers on one machine need the same name."""


def answer(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return what a function of this module returns, or its error as text."""
    try:
        return {"answer": function(*args)}
    except Exception as error:  # noqa: BLE001 - the worker goes on, and the client must know
        return {"error": f"{type(error).__name__}: {error}"}


def describe(threads: int, isa: str, strict: bool) -> dict[str, Any]:
    """Return versions, the machine's name, and the fields of its target with such options, or why it has none."""
    facts: dict[str, Any] = {
        "Korch": __version__,
        "the compiler": llvm_identity(),
        "machine": os.environ.get(MACHINE) or socket.gethostname(),
        "target": {},
        "why": "",
    }
    try:
        return facts | {"target": plain(target_of(Options(threads=threads, isa=isa, strict=strict)))}
    except OptionError as error:
        return facts | {"why": str(error)}


def compile_sources(isa: str, sources: Sequence[str], seconds: float | None) -> list[bytes | None]:
    """Return the objects of sources; None for those that are not compiled, which is for the client to find out."""
    builder = Builder(isa, default_cache_folder())
    with _alone():
        builder.compile(sources, Deadline.after(seconds, time.monotonic()))
    return [builder.stored(source) for source in sources]


def time_batch(
    jobs: Sequence[SourcedJob], objects: Sequence[tuple[str, bytes]], isa: str, setup: Setup, seconds: float | None
) -> dict[str, Any]:
    """Compile and time kernels.

    Args:
        jobs: the kernels.
        objects: sources that other workers have compiled, with their objects.
        isa: the instruction set.
        setup: the process that times them.
        seconds: the time after which nothing more is timed; None for no limit.

    Returns:
        "records", for each kernel as text, None for those that were not compiled or not timed; and "objects", for each
        distinct source, None for those that were not compiled.
    """
    deadline = Deadline.after(seconds, time.monotonic())
    builder = Builder(isa, default_cache_folder())
    with _alone():
        for source, data in objects:
            builder.store(source, data)
        found = compile_and_time(jobs, builder, setup, Pace(), deadline)
    records = [to_text(one) if isinstance(one, Measured | Failed) else None for one in found]
    return {"records": records, "objects": [builder.stored(source) for source in sources_of(jobs)]}


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other worker of this machine compiles or times; the system frees the lock if this one dies."""
    with (Path(tempfile.gettempdir()) / f"korch-farm-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
