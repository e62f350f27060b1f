"""A kernel that is built and compiled in another process: what is sent to it, and what it answers."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.llvm_process import object_name
from korch.provider.provider import Kernel, Provider
from korch.target import Target

PRINTING = tuple(f"korch.provider.{name}" for name in ("attention", "conv", "gemm", "generated", "winograd"))
"""The modules of providers that print their kernels, which takes long enough to do it in these processes."""


def import_printing() -> None:
    """Import the modules that print kernels."""
    for name in PRINTING:
        importlib.import_module(name)


@dataclass(frozen=True)
class BuildJob:
    """A kernel to build and to compile."""

    provider: Provider[Target, Kernel]  # a copy, which has learned nothing from other jobs
    group: Group
    offer: Offer
    target: Target
    folder: Path | None  # the folder of compiled objects; what it has is not compiled again; None to compile nothing

    def run(self, compile_text: Callable[[str], bytes]) -> tuple[Kernel | Refusal, tuple[bytes | None, ...]]:
        """Return the kernel, and the object of each of its texts; None for one that is not compiled.

        Raises:
            Exception: whatever the provider raises.
        """
        kernel = self.provider.build(self.group, self.offer, self.target)
        if isinstance(kernel, Refusal):
            return kernel, ()
        return kernel, tuple(compile_text(text) if self._is_missing(text) else None for text in kernel.texts)

    def _is_missing(self, text: str) -> bool:
        return self.folder is not None and not (self.folder / object_name(self.target.isa, text)).exists()
