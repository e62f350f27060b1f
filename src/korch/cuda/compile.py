"""Compiles launches to cubins with Triton's compiler, many kernels in parallel in separate processes.

Cubins are cached by the hash of their source, so that a kernel is compiled once per architecture.
No device is needed.
"""

import hashlib
import json
import logging
import os
import pickle
import select
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from korch.cuda.kernel import Launch
from korch.cuda.module import require_triton
from korch.system.child import child_command
from korch.system.cores import usable_cores
from korch.system.files import make_private
from korch.system.scratch import scratch_folder

logger = logging.getLogger("korch.cuda")

WORKER = "korch.cuda.compile_worker"
COMPILE_SECONDS = 60.0
"""How long a kernel may compile, with the start of the process; most take less than a second."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled launch."""

    symbol: str  # the function's name
    image: bytes  # the bytes of the cubin file
    shared_bytes: int  # the shared memory of a program
    registers: int  # the registers of a thread
    spill_bytes: int  # the stack memory of a thread, for spilled registers


@dataclass(frozen=True, slots=True)
class CubinFailure:
    """Why a launch could not be compiled."""

    symbol: str
    message: str


class CubinCompiler:
    """Compiles launches for one architecture; `close` ends its processes.

    Args:
        arch: the compute capability as a number.
        folder: the folder in which cubins are cached.
        workers: the most compiler processes; by default, one per usable core.

    Raises:
        UnsupportedError: Triton is not installed.
    """

    def __init__(self, arch: int, folder: Path, workers: int | None = None) -> None:
        require_triton()
        functions = (Path(__file__).parent / "functions.py").read_bytes()
        own = hashlib.sha256(functions).hexdigest()[:8]
        self.arch = arch
        self.folder = folder / "cuda" / f"triton-{version('triton')}-{own}" / f"sm_{arch}"
        self.workers = workers or usable_cores()
        self._processes: list[_Process] = []

    def close(self) -> None:
        """End the processes."""
        while self._processes:
            self._processes.pop().close()

    def compile(self, launches: Sequence[Launch]) -> dict[str, Cubin | CubinFailure]:
        """Return a cubin or the failure for each launch's symbol."""
        found: dict[str, Cubin | CubinFailure] = {}
        todo: dict[str, Launch] = {}
        for launch in launches:
            kept = self._kept(launch.symbol)
            if kept is not None:
                found[launch.symbol] = kept
            else:
                todo[launch.symbol] = launch
        for launch, result in zip(todo.values(), self._run(list(todo.values())), strict=True):
            found[launch.symbol] = result
            if isinstance(result, Cubin):
                self._keep(result)
            else:
                logger.info("%s is not compiled: %s", launch.symbol, result.message)
        return found

    def _run(self, launches: Sequence[Launch]) -> list[Cubin | CubinFailure]:
        while len(self._processes) < min(self.workers, len(launches)):
            self._processes.append(_Process(self.arch))
        idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._processes:
            idle.put(process)

        def run(launch: Launch) -> Cubin | CubinFailure:
            process = idle.get()
            try:
                return process.compile(launch)
            finally:
                idle.put(process)

        pool = ThreadPoolExecutor(max(1, len(self._processes)))
        try:
            return list(pool.map(run, launches))
        finally:  # on Ctrl-C, launches that have not begun are cancelled
            pool.shutdown(wait=True, cancel_futures=True)

    def _kept(self, symbol: str) -> Cubin | None:
        try:
            data = json.loads((self.folder / f"{symbol}.json").read_text("utf-8"))
            image = (self.folder / f"{symbol}.cubin").read_bytes()
            if hashlib.sha256(image).hexdigest() != data.pop("sha256"):
                raise ValueError("its bytes have changed")
            return Cubin(image=image, **data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("the kept cubin of %s is damaged (%s); it is compiled again", symbol, error)
            return None

    def _keep(self, cubin: Cubin) -> None:
        data = asdict(cubin)
        image = data.pop("image")
        data["sha256"] = hashlib.sha256(image).hexdigest()
        try:
            make_private(self.folder)
            with scratch_folder(self.folder) as folder:
                for suffix, content in (("cubin", image), ("json", json.dumps(data).encode())):
                    (folder / suffix).write_bytes(content)
                    (folder / suffix).replace(self.folder / f"{cubin.symbol}.{suffix}")
        except OSError as error:
            logger.warning("a cubin can't be kept: %s", error)


class _Process:
    """A compiler process, which is restarted if it crashes."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._process: subprocess.Popen[bytes] | None = None
        self._left = ExitStack()

    def compile(self, launch: Launch) -> Cubin | CubinFailure:
        """Let the process compile a launch, and wait for the result."""
        try:
            return self._ask(launch)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.close()
            return CubinFailure(launch.symbol, "the compiler crashed")
        except TimeoutError:
            return CubinFailure(launch.symbol, f"the compiler took longer than {COMPILE_SECONDS:g} s")

    def close(self) -> None:
        """End the process, and remove files that a crash has left behind."""
        if self._process is not None:
            self._process.communicate()
            self._left.close()
        self._process = None

    def _ask(self, launch: Launch) -> Cubin | CubinFailure:
        request = pickle.dumps((launch, self._arch))
        if self._process is None:
            folder = self._left.enter_context(scratch_folder())
            request = pickle.dumps(str(folder)) + request
            self._process = subprocess.Popen(
                child_command(WORKER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the parent only, which ends this process
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise EOFError
        self._process.stdin.write(request)
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], COMPILE_SECONDS)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)  # also ends `ptxas`
            self.close()
            raise TimeoutError
        found: Cubin | CubinFailure = pickle.load(self._process.stdout)
        return found
