"""This machine as the target, and a compiler with a cache of its own."""

import numpy as np
import pytest

from korch.measure.compiler import Builder, find_compiler
from korch.target import Target, detect_target


@pytest.fixture(scope="session")
def target() -> Target:
    return detect_target(threads=2, compiler=find_compiler().version)


@pytest.fixture(scope="session")
def builder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(target.isa, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
