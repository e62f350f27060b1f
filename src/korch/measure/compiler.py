"""LLVM IR -> relocatable objects, through compilers and a content-addressed cache.

Objects are named after the hash of all that they depend on. They are written under a
temporary name and then moved, so that no process ever sees an incomplete file. Each has a file with its
SHA-256 next to it, so that a damaged file is detected and built again.
"""

import atexit
import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from korch.errors import CompileError
from korch.measure.llvm_process import (
    TICK_SECONDS,
    CompilerRefusedError,
    KilledError,
    StoppedError,
    compile_llvm,
    llvm_identity,
    object_name,
)
from korch.options import Options, default_cache_folder
from korch.system.archive import pack_objects
from korch.system.cores import usable_cores
from korch.system.deadline import Deadline
from korch.system.files import make_private
from korch.system.scratch import scratch_folder, write_atomically
from korch.target import Target, detect_target

logger = logging.getLogger("korch.measure")

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""A compiler whose result is needed may take at least this long, also after the end: the machine may just be busy."""

KERNELS = "kernels"
"""The subfolder of the cache folder for code that is loaded and run."""


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A source that was not compiled."""

    message: str  # the first errors that the compiler printed
    was_killed: bool = False  # the compiler was killed, or the system failed it, so the source may be correct
    output: str = ""  # all that the compiler printed


class Builder:
    """Compiles into a cache folder."""

    def __init__(self, isa: str, cache_folder: Path | None = None, end: Deadline | None = None) -> None:
        """Find the cache.

        `end`: when to give up a compiler whose result is needed, after `PATIENCE_SECONDS` at least.
        """
        self._end = end or Deadline()
        self.isa = isa
        self.folder = usable_folder(cache_folder or default_cache_folder()).absolute() / KERNELS

    def compile(
        self, sources: Sequence[str], deadline: Deadline | None = None, tell: Callable[[int], None] = lambda done: None
    ) -> list[Path | CompileFailure | None]:
        """Compile texts to objects, with as many compilers at once as there are cores.

        `deadline`: when to kill the compilers; a text that is not compiled by then gives None. Without it, the texts
        are needed: a compiler that does not end gives a failure.

        Raises:
            CompileError: the cache folder can't be written.
        """
        tasks = [partial(self._object, source, is_needed=deadline is None) for source in sources]
        return on_all_cores(tasks, deadline or Deadline(), tell)

    def objects(self, sources: Sequence[str]) -> bytes:
        """Compile texts, and return an archive of their objects.

        Raises:
            CompileError: the compiler refuses a text, or does not end.
        """
        objects = self.compile(list(dict.fromkeys(sources)))
        for found in objects:
            if isinstance(found, CompileFailure):
                what = found.message if found.was_killed else f"the compiler refused a source: {found.message}"
                raise CompileError(what, hint="`korch doctor` checks it")
        return pack_objects(path.read_bytes() for path in objects if isinstance(path, Path))

    def store(self, source: str, data: bytes) -> None:
        """Put the object of a text, which was compiled elsewhere, into the cache.

        Raises:
            CompileError: the cache folder can't be written.
        """
        target = self._target(source)
        try:
            write_atomically(_seal(target), hashlib.sha256(data).hexdigest().encode())
            write_atomically(target, data)
        except OSError as error:
            raise _cache_error(str(error), self.folder) from error

    def stored(self, source: str) -> bytes | None:
        """Return the object of a text from the cache; None if it has none, or a damaged one."""
        target = self._target(source)
        return target.read_bytes() if _is_sealed(target, _seal(target)) else None

    def missing_work(self, sources: Iterable[str]) -> int:
        """Return the number of texts that were not compiled before."""
        return sum(not self._target(source).exists() for source in dict.fromkeys(sources))

    def limited(self, stop: Deadline) -> Deadline:
        """Return when to give up a compiler that begins now: at the end of the search, too, but not at once."""
        end_s = self._end.at_s
        return stop.until(None if end_s is None else max(end_s, time.monotonic() + PATIENCE_SECONDS))

    def _target(self, source: str) -> Path:
        return self.folder / object_name(self.isa, source)

    def _object(
        self, source: str, stop: Deadline | None = None, *, is_needed: bool = False
    ) -> Path | CompileFailure | None:
        """Return the object of a text; if the compiler was stopped, a failure for a needed text, or else None."""
        target = self._target(source)

        def make(temporary: Path) -> None:
            text = temporary.with_suffix(".ll")
            text.write_text(source)
            compile_llvm(text, temporary, self.limited(stop or Deadline()))

        try:
            return self._cached(target, make)
        except _CacheError:
            raise  # the cache failed; the source may be correct
        except StoppedError as error:
            return CompileFailure(error.what, was_killed=True) if is_needed else None
        except CompileError as error:
            output = error.output if isinstance(error, CompilerRefusedError) else ""
            return CompileFailure(error.what, isinstance(error, KilledError), output)

    def _cached(self, target: Path, make: Callable[[Path], None]) -> Path:
        seal = _seal(target)
        if _is_sealed(target, seal):
            return target
        try:
            with scratch_folder(self.folder) as folder:
                temporary = folder / f"new{target.suffix}"
                temporary.touch()
                make(temporary)
                if not (data := temporary.read_bytes()):
                    raise KilledError("the compiler wrote nothing")
                write_atomically(seal, hashlib.sha256(data).hexdigest().encode())
                temporary.replace(target)
        except OSError as error:
            raise _cache_error(str(error), self.folder) from error
        except CompileError as error:
            if os.strerror(errno.ENOSPC) in error.what:
                raise _cache_error(os.strerror(errno.ENOSPC), self.folder) from error
            raise
        return target


def on_all_cores(
    tasks: Sequence[Callable[[Deadline], T]], deadline: Deadline, tell: Callable[[int], None] = lambda done: None
) -> list[T]:
    """Return the results of functions that wait for processes, as many at once as there are cores.

    Each is called with a deadline, at which it ends its process. `tell`: called with the number of results so far.
    """
    # A separate deadline, so that the processes can be stopped when this thread is interrupted.
    stop = Deadline(deadline.at_s)
    pool = ThreadPoolExecutor(usable_cores())
    try:
        waiting = [pool.submit(task, stop) for task in tasks]
        for future in waiting:
            while not future.done():
                if deadline.is_over:  # also if it was stopped
                    stop.stop()
                with contextlib.suppress(TimeoutError):
                    future.result(timeout=TICK_SECONDS)
                tell(sum(one.done() for one in waiting))
        return [future.result() for future in waiting]
    finally:
        stop.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def target_of(options: Options) -> Target:
    """Return the target for this machine, with the threads and the instructions that the options allow.

    Raises:
        OptionError: this CPU does not have the instruction set.
    """
    return detect_target(options.threads, llvm_identity(), matrix_units=not options.strict, isa=options.isa)


class _CacheError(CompileError):
    """A file could not be written to the cache folder; the source that was compiled may be correct."""


def _cache_error(text: str, folder: Path) -> _CacheError:
    return _CacheError(
        f"the cache can't be written: {text}",
        where=str(folder),
        hint="Free some space, or choose another folder with --cache-folder",
    )


def usable_folder(folder: Path) -> Path:
    """Return the folder if it can be written, or else a temporary one, with a warning.

    Raises:
        CompileError: no folder can be written at all.
    """
    try:
        if not folder.exists():
            make_private(folder)
        make_private(folder / KERNELS)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"korch")
            probe.flush()
        return folder
    except OSError as error:
        try:
            other = _temporary_folder()
        except OSError as worse:
            raise CompileError(f"no folder can be written: {worse}", where=str(folder)) from worse
        logger.warning(
            "the cache folder %s can't be written (%s); nothing is kept for the next run",
            folder,
            error.strerror or error,
        )
        return other


@cache
def _temporary_folder() -> Path:
    holder = contextlib.ExitStack()
    atexit.register(holder.close)
    folder = holder.enter_context(scratch_folder())
    make_private(folder / KERNELS)
    return folder


def _seal(path: Path) -> Path:
    """Return the file with the checksum of an object."""
    return path.with_name(path.name + ".sha256")


def _is_sealed(path: Path, seal: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == seal.read_text("utf-8").strip()
    except OSError:
        return False
