"""What compilers make wrong at -O3 is tested here, so nothing is compiled with less."""

from __future__ import annotations

from pathlib import Path

import pytest

from korch.measure.compiler import Builder
from korch.measure.toolchain import FLAGS
from korch.target import Target


@pytest.fixture(scope="session")
def builder(target: Target, cache_folder: Path, kernels_are_compiled_quickly: None) -> Builder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("korch.measure.compiler.FLAGS", FLAGS)
        return Builder(target.isa, cache_folder)
