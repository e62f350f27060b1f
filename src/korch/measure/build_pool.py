"""Candidates -> kernels, by processes that build and compile them at the same time.

Making a kernel's program and printing it takes longer than to compile it. A process that fails to build a kernel for
any reason says nothing about the kernel: the caller builds it itself, and sees the error.
"""

import logging
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from korch.candidate.candidate import Candidate
from korch.measure.build_job import BuildJob
from korch.measure.compiler import Builder, on_all_cores
from korch.measure.llvm_process import compile_llvm
from korch.provider.provider import AnyProvider, Kernel
from korch.system.deadline import Deadline
from korch.system.scratch import scratch_folder
from korch.target import Target

logger = logging.getLogger("korch.measure")

Wanted = Mapping[str, Candidate]
"""Candidates by the keys of their kernels."""


class BuildPool:
    """Builds kernels in other processes; their objects are put into the compiler's cache folder.

    Attributes:
        providers: those whose kernels are built here, by name; others are left to the caller.
    """

    def __init__(
        self, builder: Builder, target: Target, providers: Mapping[str, AnyProvider], *, compiles: bool = True
    ) -> None:
        """Begin without work.

        `compiles`: whether kernels are also compiled.
        """
        self._folder = builder.folder if compiles else None
        self._builder, self._target, self.providers = builder, target, providers
        self._stop = Deadline()
        self._ahead: ThreadPoolExecutor | None = None
        self._begun: dict[str, Future[Kernel | None]] = {}

    def begin(self, wanted: Wanted) -> None:
        """Begin to build kernels, one at a time, to use an idle core; call `rest` before kernels are timed."""
        self._ahead = self._ahead or ThreadPoolExecutor(1)
        for key, candidate in wanted.items():
            if key not in self._begun:
                self._begun[key] = self._ahead.submit(self._built, candidate, self._stop)

    def rest(self) -> dict[str, Kernel]:
        """Cancel the work of `begin` that has not started, wait for the rest, and return the kernels."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
        found = {key: future.result() for key, future in self._begun.items() if not future.cancelled()}
        self._ahead, self._begun = None, {}
        return {key: kernel for key, kernel in found.items() if kernel is not None}

    def build(
        self, wanted: Wanted, deadline: Deadline, tell: Callable[[str], None] = lambda text: None
    ) -> dict[str, Kernel]:
        """Build kernels on all cores; return those that were built before the deadline."""
        found = on_all_cores(
            [partial(self._built, candidate) for candidate in wanted.values()],
            deadline,
            lambda done: tell(f"building {len(wanted)} kernels, {done} are done"),
        )
        return {key: kernel for key, kernel in zip(wanted, found, strict=True) if kernel is not None}

    def close(self) -> None:
        """Stop all work."""
        self._stop.stop()
        self.rest()

    def _built(self, candidate: Candidate, stop: Deadline) -> Kernel | None:
        """Return a candidate's kernel; None if it is not built in time, or refused, or if anything fails."""
        if stop.is_over:
            return None
        try:
            provider = self.providers[candidate.provider]
            job = BuildJob(provider, candidate.group, candidate.offer, self._target, self._folder)
            with scratch_folder(self._builder.folder) as folder:
                (folder / "new.job").write_bytes(pickle.dumps(job))
                compile_llvm(folder / "new.job", folder / "answer", self._builder.limited(stop))
                kernel, objects = pickle.loads((folder / "answer").read_bytes())
            if not isinstance(kernel, Kernel):
                return None
            for text, data in zip(kernel.texts, objects, strict=True):
                if data is not None:
                    self._builder.store(text, data)
            return kernel
        except Exception as error:  # noqa: BLE001 - the caller builds it, and reports what a provider raises
            logger.debug("a kernel of %s is built here: %s", candidate.provider, error)
            return None
