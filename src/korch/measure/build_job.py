"""A candidate's kernel, built and compiled in another process: what is sent to it, and what it answers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from korch.candidate.candidate import Candidate, Refusal
from korch.measure.llvm_process import object_name
from korch.provider.for_sizes import kernel_for_sizes
from korch.provider.provider import AnyProvider, Kernel
from korch.target import Target


@dataclass(frozen=True)
class BuildJob:
    """A kernel to build and to compile."""

    candidate: Candidate
    provider: bytes  # the pickled provider
    target: Target
    folder: Path | None  # the folder of compiled objects; what it has is not compiled again; None to compile nothing

    def run(self, compile_text: Callable[[str], bytes]) -> tuple[Kernel | Refusal, tuple[bytes | None, ...]]:
        """Return the kernel, and the object of each of its texts; None for one that is not compiled.

        Raises:
            Exception: whatever the provider raises.
        """

        def build(candidate: Candidate) -> Kernel | Refusal:
            return _provider(self.provider).build(candidate.group, candidate.offer, self.target)

        kernel = kernel_for_sizes(self.candidate, build)
        if isinstance(kernel, Refusal):
            return kernel, ()
        return kernel, tuple(compile_text(text) if self._is_missing(text) else None for text in kernel.texts)

    def _is_missing(self, text: str) -> bool:
        return self.folder is not None and not (self.folder / object_name(self.target.isa, text)).exists()


@cache
def _provider(data: bytes) -> AnyProvider:
    """Return a provider; it keeps what it learns of one candidate for the next."""
    provider: AnyProvider = pickle.loads(data)
    return provider
