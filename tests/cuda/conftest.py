"""Tests of kernels for CUDA devices without a device: interpreted by Triton, and cross-compiled."""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from korch.cuda.compile import CubinCompiler
from korch.cuda.target import NOMINAL, CudaTarget

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if find_spec("triton") is None:  # `make test-cuda` installs it
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True, scope="session")
def searches_share_a_compiler() -> Iterator[None]:
    """Compile with one process per architecture, unless a test says with how many: each takes a second to start."""
    begin, close, shared = CubinCompiler.__init__, CubinCompiler.close, dict[int, list[Any]]()

    def begin_shared(self: CubinCompiler, arch: int, folder: Path, workers: int | None = None) -> None:
        begin(self, arch, folder, workers or 1)
        if workers is None:
            self._processes = shared.setdefault(arch, self._processes)

    def close_own(self: CubinCompiler) -> None:
        if self._processes is not shared.get(self.arch):
            close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CubinCompiler, "__init__", begin_shared)
        patch.setattr(CubinCompiler, "close", close_own)
        yield
    for processes in shared.values():
        while processes:
            processes.pop().close()


@pytest.fixture
def small() -> CudaTarget:
    """Return a device so small that small tensors fill it."""
    return replace(NOMINAL[90], processors=2)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def whole() -> CudaTarget:
    """Return a device on which tests' tensors need few programs: their sums are cut into parts."""
    return NOMINAL[90]
