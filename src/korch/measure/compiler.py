"""Sources -> shared libraries, through the system's C++ compiler and a content-addressed cache.

Objects and libraries are named after the hash of all that they depend on. They are written to a
temporary name and moved, so that two processes never see half a file; each has its SHA-256 beside
it, so that a damaged one is found and built again.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import importlib.util
import itertools
import logging
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from korch.cores import usable_cores
from korch.deadline import Deadline
from korch.errors import CompileError
from korch.extras import install_command
from korch.files import make_private
from korch.libraries import find_headers, find_library
from korch.options import default_cache_folder
from korch.scratch import scratch_folder
from korch.target import has_matrix_units

logger = logging.getLogger("korch.measure")

NATIVE_FOLDER = Path(__file__).resolve().parent.parent / "native"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fwrapv",
    "-Wno-psabi",
    "-w",
)
"""Never -ffinite-math-only: attention masks use -inf, and NaN must travel. Integers wrap, as in
NumPy: without -fwrapv a compiler takes x < x + 1 for true."""

GCC_FLAGS = ("-fno-tree-loop-if-convert", "-fno-gnu-unique")
"""GCC 12 vectorizes loops of guarded loads wrongly (tests/native has the case); Clang does not. A
library with symbols that are unique in the process is never unloaded."""

_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512cd",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mbmi",
    "-mbmi2",
    "-mprefer-vector-width=512",
)
ISA_COMPILER_FLAGS = {
    "amx": _AVX512,  # the matrix units are spoken to in assembly
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"),
    "neon": (),
    "generic": (),
}
COMPILE_SECONDS = 120
"""A compiler may compute for so long."""

PATIENCE = 10
"""Factor by which a compilation may take longer on a busy machine."""

TICK_SECONDS = 0.2
"""How often it is looked whether a compiler must be stopped."""

ONEDNN_HEADER = "korch_onednn.h"

KERNELS = "kernels"
"""The folder in the cache folder that has what is loaded and run."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: how it is called.
        version: the first line that it prints for --version.
        openmp: the flags that switch OpenMP on.
    """

    command: tuple[str, ...]
    version: str
    openmp: tuple[str, ...]

    @property
    def identity(self) -> str:
        """What tells its code and timings apart from another's: version and further arguments."""
        return " ".join((self.version, *self.command[1:]))


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A source that was not compiled.

    Attributes:
        message: the first errors that the compiler printed.
        was_killed: the system did not let the compiler work; it says nothing about the source.
        output: all that the compiler printed.
    """

    message: str
    was_killed: bool = False
    output: str = ""


@cache
def find_compiler() -> Compiler:
    """Return `$CXX`, else g++, clang++, or the one in the package `ziglang`.

    Raises:
        CompileError: there is none that works.
    """
    named = os.environ.get("CXX")
    if named:
        compiler = _try(tuple(shlex.split(named)))
        if compiler is None:
            raise CompileError(f"{named!r} does not run", where="environment variable CXX", expected="a C++ compiler")
        return compiler
    for name in ("g++", "clang++"):
        path = shutil.which(name)
        compiler = _try((path,)) if path else None
        if compiler is not None:
            return compiler
    if importlib.util.find_spec("ziglang") is not None:
        compiler = _try((sys.executable, "-m", "ziglang", "c++"))
        if compiler is not None:
            return compiler
    raise CompileError(
        "there is no C++ compiler on this machine",
        expected="g++ or clang++, or one in $CXX",
        hint="Install g++ with the system's package manager, or run: " + install_command("compiler"),
    )


def _own_flags(version: str, isa: str) -> tuple[str, ...]:
    """Return the flags of one compiler: Clang 18 to 21 counts vectors of 512 bits apart."""
    if "clang" not in version.lower():
        return GCC_FLAGS
    number = re.search(r"clang version (\d+)", version)
    is_apart = number is not None and 18 <= int(number[1]) <= 21
    return ("-mevex512",) if is_apart and isa in ("amx", "avx512") else ()


class Builder:
    """Compiles and links into a cache folder."""

    def __init__(self, isa: str, cache_folder: Path | None = None) -> None:
        self.compiler = find_compiler()
        self.isa = isa
        self.folder = usable_folder(cache_folder or default_cache_folder()) / KERNELS
        own = _own_flags(self.compiler.version, isa)
        if isa == "amx" and not has_matrix_units():
            own = (*own, "-DKORCH_AMX_IN_SOFTWARE")
        self.flags = (*FLAGS, *own, *ISA_COMPILER_FLAGS[isa], *self.compiler.openmp)
        headers = "".join(p.read_text() for p in sorted(NATIVE_FOLDER.iterdir()) if p.is_file())
        stamp = (self.compiler.identity, *self.flags, headers)
        self._salt = hashlib.sha256("\n".join(stamp).encode()).hexdigest()
        self._precompiled: list[str] | None = None
        self._ahead = _Ahead()

    def begin(self, sources: Iterable[str]) -> None:
        """Begin to compile texts that `compile` may be asked for, beside other work.

        One compiler runs at a time, each when the one before is done: it is for a core that is
        idle. Nothing is timed until `rest` was called, or `compile`, which does.
        """
        todo = [s for s in dict.fromkeys(sources) if not self._target(s).exists()]
        if self._precompiled is None and self._are_slow(todo):
            self._ahead.begin(ONEDNN_HEADER, lambda: self._precompile_if_slow(todo))
        for source in todo:
            self._ahead.begin(source, partial(self._object, source))

    def rest(self) -> None:
        """Forget what was begun but for what a compiler works on, and wait for that."""
        self._ahead.end()

    def compile(
        self, sources: Sequence[str], deadline: Deadline | None = None, tell: Callable[[int], None] = lambda done: None
    ) -> list[Path | CompileFailure | None]:
        """Compile C++ texts to objects, as many at once as there are cores.

        Args:
            sources: the texts.
            deadline: when to kill the compilers; what is not compiled then is None.
            tell: told of how many are done.

        Raises:
            CompileError: the cache folder can't be written.
        """
        self.rest()
        # With an own end: when this thread is interrupted, no compiler may run on.
        stop = Deadline(None if deadline is None else deadline.at_s)
        self._precompile_if_slow(sources)
        pool = ThreadPoolExecutor(usable_cores())
        try:
            found: list[Path | CompileFailure | None] = []
            waiting = [pool.submit(self._object, source, stop) for source in sources]
            for future in waiting:
                while not future.done() and not (deadline is not None and deadline.is_over):
                    with contextlib.suppress(TimeoutError):
                        future.result(timeout=TICK_SECONDS)
                    tell(sum(one.done() for one in waiting))
                if not future.done():
                    stop.stop()
                found.append(future.result())
            return found
        finally:
            stop.stop()
            pool.shutdown(wait=True, cancel_futures=True)

    def link(self, objects: Iterable[Path], libraries: Iterable[str] = ()) -> Path:
        """Link objects to a shared library.

        Raises:
            CompileError: the linker refuses.
        """
        files = list(objects)
        flags = _link_flags(sorted(set(libraries)))
        target = self.folder / f"{self._key(*(p.name for p in files), *flags)}.so"

        def make(temporary: Path) -> None:
            command = [
                *self.compiler.command,
                "-shared",
                *self.compiler.openmp,
                "-o",
                str(temporary),
                *map(str, files),
                *flags,
            ]
            _run(command, temporary.parent)

        return self._cached(target, make)

    def library(self, sources: Sequence[str], libraries: Iterable[str] = ()) -> Path:
        """Compile and link.

        Raises:
            CompileError: the compiler or the linker refuses.
        """
        objects = self.compile(sources)
        for found in objects:
            if isinstance(found, CompileFailure):
                raise CompileError(f"the compiler refused a source: {found.message}")
        return self.link([p for p in objects if isinstance(p, Path)], libraries)

    def _precompile_if_slow(self, sources: Sequence[str]) -> None:
        if self._precompiled is None and self._are_slow(sources):
            self._precompiled = self._precompile()

    def _are_slow(self, sources: Sequence[str]) -> bool:
        """Whether several are to be compiled that include the header."""
        slow = (source for source in sources if ONEDNN_HEADER in source)
        missing = (1 for source in slow if not self._target(source).exists())
        return sum(itertools.islice(missing, 2)) > 1

    def count_missing(self, sources: Iterable[str]) -> int:
        """Return how many of some texts were not compiled before."""
        return sum(not self._target(source).exists() for source in dict.fromkeys(sources))

    def _target(self, source: str) -> Path:
        return self.folder / f"{self._key(source)}.o"

    def _precompile(self) -> list[str]:
        """Compile the header that takes longer than what includes it; return where it lies.

        Each of the sources would take twice as long without it. Only GCC finds it by itself. The
        header lies beside it: a source that includes it twice, or after another, opens that.
        """
        headers = find_headers("dnnl.h")
        if headers is None or "clang" in self.compiler.version.lower():
            return []
        folder = self.folder / f"include-{self._salt[:16]}"

        def make(temporary: Path) -> None:
            _run(
                [
                    *self.compiler.command,
                    *self.flags,
                    f"-I{NATIVE_FOLDER}",
                    f"-I{headers}",
                    "-x",
                    "c++-header",
                    str(header),
                    "-o",
                    str(temporary),
                ],
                temporary.parent,
            )

        header = folder / ONEDNN_HEADER
        try:
            folder.mkdir(exist_ok=True)
            text = (NATIVE_FOLDER / ONEDNN_HEADER).read_text()
            if not header.exists() or header.read_text() != text:
                _write_atomically(header, text)
            self._cached(folder / f"{ONEDNN_HEADER}.gch", make)
        except (OSError, CompileError) as error:
            logger.info("no header is precompiled: %s", error)
            return []
        return [f"-I{folder}"]

    def _object(self, source: str, stop: Deadline | None = None) -> Path | CompileFailure | None:
        """Return a text's object; None if it was stopped."""
        target = self._target(source)

        def make(temporary: Path) -> None:
            text = temporary.with_suffix(".cpp")
            include = [f"-I{NATIVE_FOLDER}"]
            if ONEDNN_HEADER in source and self._precompiled:
                include = [*self._precompiled, *include]
            if ONEDNN_HEADER in source and (headers := find_headers("dnnl.h")) is not None:
                include.append(f"-I{headers}")
            text.write_text(source)
            _run(
                [*self.compiler.command, *self.flags, *include, "-c", str(text), "-o", str(temporary)],
                temporary.parent,
                stop,
            )

        try:
            return self._cached(target, make)
        except _CacheError:
            raise  # it says nothing about the source
        except _StoppedError:
            return None
        except CompileError as error:
            output = error.output if isinstance(error, _RefusedError) else ""
            return CompileFailure(error.what, isinstance(error, _KilledError), output)

    def _key(self, *parts: str) -> str:
        return hashlib.sha256("\n".join((self._salt, *parts)).encode()).hexdigest()[:32]

    def _cached(self, target: Path, make: Callable[[Path], None]) -> Path:
        seal = target.with_name(target.name + ".sha256")
        if _is_sealed(target, seal):
            return target
        try:
            with scratch_folder(self.folder) as folder:
                temporary = folder / f"new{target.suffix}"
                temporary.touch()
                make(temporary)
                digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
                _write_atomically(seal, digest)
                temporary.replace(target)
        except OSError as error:
            raise _cache_error(str(error), self.folder) from error
        except CompileError as error:
            if os.strerror(errno.ENOSPC) in error.what:
                raise _cache_error(os.strerror(errno.ENOSPC), self.folder) from error
            raise
        return target


class _Ahead:
    """What is compiled before it is asked for; objects are found in the cache folder."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: set[str] = set()

    def begin(self, name: str, make: Callable[[], object]) -> None:
        """Put something at the end of the line, once."""
        if name not in self._begun:
            self._begun.add(name)
            self._pool = self._pool or ThreadPoolExecutor(1)
            self._pool.submit(make)

    def end(self) -> None:
        """Leave out what has not begun, and wait for the rest. Errors show when it is asked for."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self._begun = None, set()


class _CacheError(CompileError):
    """The cache folder does not take a file: not the fault of what was to be compiled."""


class _StoppedError(CompileError):
    """The compiler was stopped, as its result would come too late."""


class _KilledError(CompileError):
    """The system did not start the compiler, or killed it."""


class _RefusedError(CompileError):
    """The compiler found errors in the source.

    Attributes:
        output: all that it printed.
    """

    output = ""


def _cache_error(text: str, folder: Path) -> _CacheError:
    return _CacheError(
        f"the cache can't be written: {text}",
        where=str(folder),
        hint="Free some space, or choose another folder with --cache-folder",
    )


def usable_folder(folder: Path) -> Path:
    """Return a folder if it can be written, else a temporary one, with a warning.

    Raises:
        CompileError: no folder at all can be written.
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


def _try(command: tuple[str, ...]) -> Compiler | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    version = done.stdout.splitlines()[0] if done.stdout else command[0]
    is_gcc = "clang" not in done.stdout.lower()
    return Compiler(command, version, ("-fopenmp",) if is_gcc else _clang_openmp())


def _clang_openmp() -> tuple[str, ...]:
    flags = ["-fopenmp=libiomp5"] if find_library("iomp5") else ["-fopenmp"]
    if (headers := find_headers("omp.h")) is not None:
        flags.append(f"-I{headers}")
    if (library := find_library("iomp5")) is not None:
        flags.append(f"-L{library.parent}")
    return tuple(flags)


def _link_flags(names: Sequence[str]) -> list[str]:
    # First beside the library itself: there `korch unpack` puts what it needs.
    flags = ["-Wl,-rpath,$ORIGIN"]
    for name in names:
        path = find_library(name)
        if path is None:
            flags.append(f"-l{name}")
        else:
            flags += [str(path), f"-Wl,-rpath,{path.parent}"]
    return flags


def _run(command: Sequence[str], folder: Path, stop: Deadline | None = None) -> None:
    """Run a compiler that puts its temporary files into a folder."""
    code, said = _call(command, folder, stop or Deadline())
    # A driver that lost its compiler to the system says so and ends in the ordinary way.
    if code == -signal.SIGXCPU or (code and "CPU time limit exceeded" in said):
        raise CompileError(f"the compiler took longer than {COMPILE_SECONDS} s")
    if code < 0 or (code and ": Killed" in said):
        raise _KilledError("the system killed the compiler, most likely for want of memory")
    if code:
        lines = [line for line in said.splitlines() if "error" in line] or ["no message"]
        refusal = _RefusedError("; ".join(lines[:3]))
        refusal.output = said
        raise refusal


def _call(command: Sequence[str], folder: Path, stop: Deadline) -> tuple[int, str]:
    """Return how a compiler ended, and what it said. Waiting for a core is not its fault."""
    limit = Deadline.after(PATIENCE * COMPILE_SECONDS, time.monotonic())
    if stop.is_over:
        raise _StoppedError("the compiler was not started: there is no time left")
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as process:
            try:
                _limit_computing(process.pid)
                while True:
                    try:
                        said = process.communicate(timeout=TICK_SECONDS)[1]
                        break
                    except subprocess.TimeoutExpired:
                        if stop.is_over:
                            raise _StoppedError("the compiler was stopped") from None
                        if limit.is_over:
                            raise
            except BaseException:
                # The driver has started others, which would run on.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        limit_s = PATIENCE * COMPILE_SECONDS
        raise _KilledError(f"the compiler did not end within {limit_s:g} s") from error
    except OSError as error:
        raise _KilledError(f"the compiler does not start: {error}") from error
    return process.returncode, said


def _limit_computing(process: int) -> None:
    """Limit a process that has just begun, and those that it will start."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it may have ended, or no limit be allowed
            most = resource.prlimit(process, resource.RLIMIT_CPU)[1]
            soft = COMPILE_SECONDS if most == resource.RLIM_INFINITY else min(COMPILE_SECONDS, most)
            resource.prlimit(process, resource.RLIMIT_CPU, (soft, most))
            resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))


def _is_sealed(path: Path, seal: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == seal.read_text().strip()
    except OSError:
        return False


def _write_atomically(path: Path, text: str) -> None:
    with scratch_folder(path.parent) as folder:
        (folder / "new").write_text(text)
        (folder / "new").replace(path)
