"""This machine as the target, and a compiler with a cache of its own."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from korch.measure.compiler import Builder, find_compiler
from korch.target import Target, detect_target

# The same examples on every machine, however slow: a change is judged by itself, not by its luck.
# `--hypothesis-profile default` looks for others.
settings.register_profile(
    "korch", deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("korch")


@pytest.hookimpl(trylast=True)  # the order is shuffled before
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests marked as long, so that no process is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def target() -> Target:
    return detect_target(threads=2, compiler=find_compiler().version)


@pytest.fixture(scope="session")
def builder(target: Target, cache_folder: Path) -> Builder:
    return Builder(target.isa, cache_folder)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that optimize, in all test processes: each kernel is built once."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "korch-cache"
