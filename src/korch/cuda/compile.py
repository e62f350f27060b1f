"""Launches -> cubins: Triton's compiler, many kernels at a time in processes of their own.

A cubin is kept by the hash of its source, so that a kernel is compiled once for an architecture.
Nothing here needs a device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from korch.cuda.kernel import SIGNATURE, Launch
from korch.cuda.module import load_functions, require_triton

logger = logging.getLogger("korch.cuda")


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled launch.

    Attributes:
        symbol: the function's name.
        image: the file's bytes.
        shared_bytes: shared memory of a program.
        registers: of a thread.
        spill_bytes: memory of a thread for what did not fit into registers.
    """

    symbol: str
    image: bytes
    shared_bytes: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class CubinFailure:
    """Why a launch could not be compiled."""

    symbol: str
    message: str


class CubinCompiler:
    """Compiles launches for one architecture; a context that ends its processes.

    Args:
        arch: compute capability as a number.
        folder: where cubins are kept.
        workers: processes.

    Raises:
        UnsupportedError: Triton is not installed.
    """

    def __init__(self, arch: int, folder: Path, workers: int | None = None) -> None:
        require_triton()
        functions = (Path(__file__).parent / "functions.py").read_bytes()
        own = hashlib.sha256(functions).hexdigest()[:8]
        self.arch = arch
        self.folder = folder / "cuda" / f"triton-{version('triton')}-{own}" / f"sm_{arch}"
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def compile(self, launches: Sequence[Launch]) -> dict[str, Cubin | CubinFailure]:
        """Return a cubin, or why there is none, for each symbol."""
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
        if not launches:
            return []
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _begin)
        futures = [self._pool.submit(_compile, launch, self.arch) for launch in launches]
        results: list[Cubin | CubinFailure] = []
        for launch, future in zip(launches, futures, strict=True):
            try:
                results.append(future.result())
            except BrokenProcessPool:
                self._pool = None
                results.append(self._alone(launch))
        return results

    def _alone(self, launch: Launch) -> Cubin | CubinFailure:
        """Compile a launch by itself after the compiler has crashed on it, or on another."""
        with ProcessPoolExecutor(1, get_context("spawn"), _begin) as pool:
            try:
                return pool.submit(_compile, launch, self.arch).result()
            except BrokenProcessPool:
                return CubinFailure(launch.symbol, "the compiler crashed")

    def _kept(self, symbol: str) -> Cubin | None:
        try:
            data = json.loads((self.folder / f"{symbol}.json").read_text())
            image = (self.folder / f"{symbol}.cubin").read_bytes()
            if hashlib.sha256(image).hexdigest() != data.pop("sha256"):
                raise ValueError("its bytes have changed")
            return Cubin(image=image, **data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("the kept cubin of %s is damaged (%s); it is compiled again", symbol,
                           error)  # fmt: skip
            return None

    def _keep(self, cubin: Cubin) -> None:
        data = asdict(cubin)
        image = data.pop("image")
        data["sha256"] = hashlib.sha256(image).hexdigest()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for suffix, content in (("cubin", image), ("json", json.dumps(data).encode())):
                with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                    file.write(content)
                Path(file.name).replace(self.folder / f"{cubin.symbol}.{suffix}")
        except OSError as error:
            logger.warning("a cubin can't be kept: %s", error)


def _begin() -> None:
    """Prepare a process: it compiles, whatever interprets kernels in its parent."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # it names the file, which lives for a moment
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="korch-triton-"))


def _compile(launch: Launch, arch: int) -> Cubin | CubinFailure:
    """Compile one launch; what a compiler says in an exception is its answer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        function = getattr(load_functions([launch]), launch.symbol)
        signature = {
            name: SIGNATURE[dtype]
            for name, dtype in zip(function.arg_names, launch.signature, strict=True)
        }
        # All memory begins at multiples of 256 bytes.
        attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
        source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)
        # Overflows are looked for in debug modes only, but the tests for them would be built.
        compiled = triton.compile(
            source, target=GPUTarget("cuda", arch, 32),
            options={"num_warps": launch.warps, "num_stages": launch.stages,
                     "sanitize_overflow": False},
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - the compiler raises what it likes
        text = str(error).strip() or type(error).__name__
        return CubinFailure(launch.symbol, text.splitlines()[-1][:300])
    metadata: Any = compiled.metadata
    if metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        return CubinFailure(launch.symbol, "the compiler asks for global scratch memory")
    if metadata.num_warps != launch.warps or metadata.num_ctas != 1:
        return CubinFailure(launch.symbol, "the compiler asks for another number of warps")
    image: bytes = compiled.asm["cubin"]
    registers, spills = _resources(image)
    return Cubin(launch.symbol, image, metadata.shared, registers, spills)


def _resources(image: bytes) -> tuple[int, int]:
    """Return registers and stack bytes of a thread, as the disassembler reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True,
                              check=False)  # fmt: skip
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    if match is None:
        raise ValueError(f"cuobjdump says nothing of resources: {done.stdout[:200]}")
    return int(match[1]), int(match[2])
